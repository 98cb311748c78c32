"""For your own training loop: a loader for this rank, and a meter of averages over all ranks."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti import comm
from tutti.data.dataset import as_samples
from tutti.data.loader import Loader
from tutti.train.init import check_same_samples
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
    """Return a Loader of `batch` samples per rank, on this rank's device. Ranks share no samples.

    `dataset` is a torch map-style dataset, a pair (inputs, targets) of tensors, or tutti's Samples.
    The order of samples depends on seed and epoch only. `state_dict()` returns the position in the
    data; `load_state_dict()` continues exactly there, even with a different number of ranks.

    Call this function on every rank. Raises RanksDiffer if ranks have different datasets, which
    happens after a random split without a seed.
    """
    samples = as_samples(dataset)
    check_same_samples(world, samples, seed)
    return Loader(
        samples,
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
    """The values of a meter since it was last read, over all ranks."""

    mean: float
    count: int
    per_second: float


class Meter:
    """The mean of a value over all samples of all ranks, and the samples per second.

    meter = tutti.Meter(world)
    meter.add(loss.detach() * len(x), len(x))      # a sum and its count; does not synchronise
    reading = meter.read()                         # all ranks must call it; waits for the device
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._reset()

    def add(self, total: Tensor, count: int) -> None:
        """Add `count` samples whose values sum to `total`."""
        self._total += total.detach().double()
        self._count += count

    def read(self) -> Reading:
        """Return the mean over all ranks since the last call. All ranks must call this method."""
        sums = torch.stack([self._total, torch.full_like(self._total, self._count)])
        comm.all_reduce(sums)
        total, count = sums.tolist()
        seconds = time.perf_counter() - self._since
        self._reset()
        mean = total / count if count else float("nan")
        return Reading(mean, int(count), count / seconds)

    def _reset(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self._count = 0
        self._since = time.perf_counter()
