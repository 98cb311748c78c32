"""Helpers for tests of engines: splits of a batch, the engines to test, a plain reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tutti.parallel import Engine, EngineOptions

Batch = tuple[torch.Tensor, torch.Tensor]

# Small enough that the tests' models fill several buckets.
BUCKET_MB = 0.001

ENGINES: dict[str, EngineOptions] = {
    "scratch each": EngineOptions(engine="scratch", scratch_reduce="each"),
    "scratch grouped": EngineOptions(engine="scratch"),
    "ddp": EngineOptions(bucket_mb=BUCKET_MB),
    "ddp copies": EngineOptions(bucket_mb=BUCKET_MB, gradient_as_bucket_view=False),
    "ddp no-overlap": EngineOptions(bucket_mb=BUCKET_MB, overlap=False),
    "ddp static": EngineOptions(bucket_mb=BUCKET_MB, static_graph=True),
    "ddp find-unused": EngineOptions(bucket_mb=BUCKET_MB, find_unused=True),
}


def shares(kind: str, ranks: int) -> list[int]:
    """Return each rank's weight in the split."""
    if kind == "even":
        return [1] * ranks
    if kind == "uneven":
        return [rank + 1 for rank in range(ranks)]
    # The last rank has no samples in any step.
    return [1] * (ranks - 1) + [0]


def cut(batch: Batch, weights: Sequence[int]) -> list[Batch]:
    """Divide a batch by weights. Parts may be empty, and every sample is in one part."""
    total = sum(weights)
    ends = [len(batch[0]) * sum(weights[: k + 1]) // total for k in range(len(weights))]
    starts = [0, *ends[:-1]]
    return [(batch[0][a:b], batch[1][a:b]) for a, b in zip(starts, ends, strict=True)]


def batches(
    sizes: Sequence[int], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Batch]:
    """Return random inputs and random classes 0, 1 and 2, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=dtype).to(device),
            torch.randint(3, (size,), generator=generator).to(device),
        )
        for size in sizes
    ]


def step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    weights: Sequence[int],
    accumulate: int,
) -> None:
    """Run one step by the contract of Engine, on this rank's part of the batch."""
    mine = cut(batch, weights)[engine.world.rank]
    optimizer.zero_grad()
    for number, (x, y) in enumerate(cut(mine, [1] * accumulate)):
        last = number == accumulate - 1
        if len(x) == 0:
            engine.empty_microbatch(batch[0][:2], last=last)
            continue
        with engine.microbatch(last):
            engine.backward(F.cross_entropy(engine(x), y, reduction="sum") / len(batch[0]))
    engine.reduce()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with weight decay, which distinguishes a zero gradient from a missing one."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def plain_training(
    model: nn.Module,
    steps: Sequence[Batch],
    microbatches: Callable[[Batch], Sequence[Batch]] = lambda batch: [batch],
) -> nn.Module:
    """Train the reference model: one process, the whole batch, plain torch."""
    optimizer = sgd(model)
    for batch in steps:
        optimizer.zero_grad()
        for x, y in microbatches(batch):
            loss: Any = F.cross_entropy(model(x), y, reduction="sum") / len(batch[0])
            loss.backward()
        optimizer.step()
    return model


def worst_error(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference in the states, relative to the tensor's largest value."""
    state, wanted = model.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    return max(
        ((state[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-30))
        .nan_to_num(nan=float("inf"))
        .item()
        for name in wanted
    )
