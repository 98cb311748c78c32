"""A pipeline whose stages write activations directly into the memory of the next stage.

    tutti run -n 2 --device cpu examples/symmetric/pipeline_handoff.py

Rank r holds stage r. A matrix product writes its result into a free slot of a ring buffer, and the
next stage reads the slot, without a copy. Gradients are sent back in the same way.
"""

import time

import torch

import tutti
from tutti.comm import symmetric
from tutti.structures import RingBuffer

MICROBATCHES, BATCH, WIDTH = 64, 16, 256


def stage_weights(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5


def sample(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


with tutti.init() as world, symmetric.Heap(bytes=16 << 20) as heap:
    rank, last = world.rank, world.size - 1
    slot = {"slots": 4, "slot_shape": (BATCH, WIDTH), "dtype": torch.float64}
    forward = [RingBuffer(heap, r, r + 1, **slot) for r in range(last)]
    backward = [RingBuffer(heap, r + 1, r, **slot) for r in range(last)]
    weights = stage_weights(rank)
    gradient = torch.zeros_like(weights)
    inputs: list[torch.Tensor] = []

    def run_backward(error: torch.Tensor) -> None:
        """Compute the gradients of the weights and of the input, for the oldest microbatch."""
        gradient.addmm_(inputs.pop(0).T, error)
        if rank > 0:
            with backward[rank - 1].reserve() as free:
                torch.mm(error, weights.T, out=free)

    start = time.perf_counter()
    for number in range(MICROBATCHES):
        # The number of microbatches in flight is at most the number of later stages + 1 (1F1B).
        if rank < last and len(inputs) > last - rank:
            with backward[rank].next() as error:
                run_backward(error)
        x = sample(number) if rank == 0 else forward[rank - 1].get()
        inputs.append(x)
        if rank < last:
            with forward[rank].reserve() as free:
                torch.mm(x, weights, out=free)
        else:
            run_backward(x @ weights)  # the loss is y² / 2, so its gradient is y
    while inputs:
        with backward[rank].next() as error:
            run_backward(error)
    seconds = time.perf_counter() - start

    reference = [stage_weights(r).requires_grad_() for r in range(world.size)]
    for number in range(MICROBATCHES):  # the same on one rank, by autograd
        x = sample(number)
        for stage in reference:
            x = x @ stage
        (x.square().sum() / 2).backward()
    assert reference[rank].grad is not None
    error = float((gradient - reference[rank].grad).norm() / gradient.norm())
    assert error < 1e-12, error
    for ring in (*forward, *backward):
        ring.close()
    print(f"stage {rank}: same gradient as on one rank (relative difference {error:.0e})")
    if rank == last:
        print(f"{MICROBATCHES} microbatches through {world.size} stages in {seconds * 1e3:.1f} ms")
