"""Gradients in symmetric memory: backward writes the gradients, and one all-reduce averages them.

    tutti run -n 2 --device cpu examples/symmetric/gradient_sync.py

This is the fastest way for a small model: there are no buckets and no copies, and the only
collective takes microseconds.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

import tutti
from tutti.comm import symmetric

STEPS, BATCH = 50, 24


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).double()


with tutti.init() as world, symmetric.Heap(bytes=1 << 20) as heap:
    torch.manual_seed(1)
    x = torch.randn(BATCH * world.size, 16, dtype=torch.float64)
    y = x[:, :4].sin()
    local_batch = slice(world.rank * BATCH, (world.rank + 1) * BATCH)

    shared = model()
    parameters = list(shared.parameters())
    gradients = heap.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    first = 0
    for p in parameters:  # each .grad is a view: autograd adds into it in place
        p.grad = gradients.local[first : first + p.numel()].view_as(p)
        first += p.numel()

    times = []
    for _ in range(STEPS):
        gradients.local.zero_()
        F.mse_loss(shared(x[local_batch]), y[local_batch]).backward()
        start = time.perf_counter()
        symmetric.all_reduce(gradients, op="mean")
        times.append(time.perf_counter() - start)
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.grad

    reference = model()  # the same steps on one rank, with the whole batch
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(reference(x), y).backward()
        optimizer.step()
    pairs = zip(parameters, reference.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert difference < 1e-12, difference
    if world.is_first:
        kilobytes = gradients.local.numel() * 8 / 1024
        print(f"{world.size} ranks and one rank differ by {difference:.0e} after {STEPS} steps")
        microseconds = sorted(times)[STEPS // 2] * 1e6
        print(f"all-reduce of {kilobytes:.1f} KiB of gradients: {microseconds:.1f} µs")
