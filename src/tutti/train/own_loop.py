"""For one's own training loop: a loader for this rank, and a meter that is exact over all ranks."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.data.dataset import as_samples
from tutti.data.loader import Loader
from tutti.world.world import World


def loader(
    dataset: object,
    batch: int,
    *,
    world: World,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    data_on_device: bool = False,
    workers: int = 0,
) -> Loader:
    """Batches of `batch` samples per rank, on this rank's device, each sample on one rank only.

    `dataset` is a torch map-style data set, a pair (inputs, targets) of tensors, or tutti's own.
    The order depends on seed and epoch alone; `state_dict()` is the position, and resumes exactly,
    also on another number of ranks.
    """
    return Loader(
        as_samples(dataset),
        batch * world.size,
        rank=world.rank,
        ranks=world.size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        device=world.device,
        data_on_device=data_on_device,
        workers=workers,
    )


@dataclass(frozen=True)
class Reading:
    """What a meter saw since it was last read, over all ranks."""

    mean: float
    count: int
    per_second: float


class Meter:
    """The mean of something over all samples of all ranks, and how many came per second.

    meter = tutti.Meter(world)
    meter.add(loss.detach() * len(x), len(x))      # a sum, and over how many; waits for nothing
    reading = meter.read()                         # on all ranks at once; waits for the device
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._reset()

    def add(self, total: Tensor, count: int) -> None:
        """Count `count` samples whose values add up to `total`."""
        self._total += total.detach().double()
        self._count += count

    def read(self) -> Reading:
        """The mean over all ranks since the last reading. A collective: call it on every rank."""
        both = torch.stack([self._total, torch.full_like(self._total, self._count)])
        dist.all_reduce(both)
        total, count = both.tolist()
        seconds = time.perf_counter() - self._since
        self._reset()
        mean = total / count if count else float("nan")
        return Reading(mean, int(count), count / seconds)

    def _reset(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self._count = 0
        self._since = time.perf_counter()
