"""Which samples a step takes: the next `global_batch` positions of the epoch's permutation.

The samples of a step are drawn for all ranks together and then divided among the ranks (split.py).
The sample at a position is a function of (seed, epoch, position), so all ranks compute the same
order without communication, and a run can resume at any position, even after a library upgrade.

Algorithm: a position is (row, column) in a rows × columns grid with rows · columns >= size. Each
round adds a hash of the column to the row, then a hash of the row to the column (a Feistel network
with modular addition), so any number of rounds is a permutation of the grid. A position that lands
outside `size` is mapped again until it lands inside (cycle walking).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tutti.data import DataError

Indices = npt.NDArray[np.int64]

# Measured over many seeds: with 6 or more rounds, the distributions of (position, sample) and of
# neighbouring samples are uniform even for a dataset of 7 samples. With 4 rounds, they are uniform
# only for datasets of 50 or more samples.
ROUNDS = 8


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each value: the finaliser of the random generator splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_integers(*values: int) -> int:
    """Return one 64-bit hash of several integers, which depends on their order."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        low = np.array([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        state = splitmix64(state ^ splitmix64(low))
    return int(state[0])


def shuffled(positions: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Return the sample at each of `positions` of an epoch, from a permutation of range(size)."""
    columns = math.isqrt(size - 1) + 1  # √size, rounded up
    rows = -(-size // columns)
    keys = splitmix64(
        np.arange(2 * ROUNDS, dtype=np.uint64) + np.uint64(hash_integers(seed, epoch))
    )
    values = positions.astype(np.uint64)
    result = np.empty_like(values)
    outside = np.arange(len(values))  # positions whose value is still at least `size`
    while len(outside):
        row, column = np.divmod(values, np.uint64(columns))
        for first, second in keys.reshape(-1, 2):
            row = (row + splitmix64(column ^ first)) % np.uint64(rows)
            column = (column + splitmix64(row ^ second)) % np.uint64(columns)
        values = row * np.uint64(columns) + column
        inside = values < np.uint64(size)
        result[outside[inside]] = values[inside]
        outside, values = outside[~inside], values[~inside]
    return result.astype(np.int64)


@lru_cache(maxsize=4)
def _shuffled_block(first: int, stop: int, size: int, seed: int, epoch: int) -> Indices:
    return shuffled(np.arange(first, stop, dtype=np.int64), size, seed, epoch)


class EpochOrder:
    """The order of the samples in every epoch of a dataset of `size` samples."""

    # A numpy call costs microseconds even on a short array, so the order is computed in blocks of
    # 65,536 positions, 0.5 MB.
    BLOCK = 1 << 16

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the indices of the samples at positions `start` to `stop` - 1 of an epoch."""
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        slices = [np.empty(0, dtype=np.int64)]
        for first in range(start - start % self.BLOCK, stop, self.BLOCK):
            end = min(first + self.BLOCK, self.size)
            block = _shuffled_block(first, end, self.size, self.seed, epoch)
            slices.append(block[max(0, start - first) : stop - first])
        return np.concatenate(slices)


@dataclass(frozen=True, slots=True)
class Position:
    """A data position: all ranks together have taken `sample` samples of epoch `epoch`."""

    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples of one step, and the positions before and after the step."""

    indices: Indices
    start: Position
    after: Position


class GlobalSampler:
    """Draws the samples of every step of a run from a dataset of `size` samples.

    With `drop_last` an epoch ends when no full batch is left; without it the last batch is shorter.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        if size < 1:
            raise DataError("the dataset is empty: it has 0 samples")
        if global_batch < 1:
            raise DataError(f"the global batch must have at least 1 sample, got {global_batch}")
        if drop_last and global_batch > size:
            raise DataError(
                f"the global batch of {global_batch} samples is larger than the dataset of {size}: "
                f"use at most {size} samples, or drop_last=False"
            )
        self.size, self.global_batch, self.drop_last = size, global_batch, drop_last
        self.order = EpochOrder(size, seed, shuffle)

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch."""
        return self.steps_left(Position())

    def steps_left(self, at: Position) -> int:
        """Return the number of steps from position `at` to the end of the epoch."""
        remaining = self.size - at.sample
        return (
            remaining // self.global_batch if self.drop_last else -(-remaining // self.global_batch)
        )

    def normalise(self, at: Position) -> Position:
        """Return `at`, or the start of the next epoch if this epoch has no batch left."""
        return at if self.steps_left(at) > 0 else Position(at.epoch + 1, 0)

    def draw(self, at: Position) -> Draw:
        """Return the samples of the step at position `at`. They depend only on `at`."""
        start = self.normalise(at)
        stop = min(start.sample + self.global_batch, self.size)
        indices = self.order.samples(start.epoch, start.sample, stop)
        return Draw(indices, start, self.normalise(Position(start.epoch, stop)))

    def state_dict(self, at: Position) -> dict[str, int | bool]:
        """Return position, dataset size, seed and shuffling as JSON values.

        The values do not depend on the number of ranks.
        """
        order = {"size": self.size, "seed": self.order.seed, "shuffle": self.order.shuffle}
        return order | {"epoch": at.epoch, "position": at.sample}

    def position(self, state: Mapping[str, object]) -> Position:
        """Return the position in `state`, which must be from the same dataset in the same order.

        The global batch may differ: the rest of the epoch then has the same samples in the same
        order, with another number of samples per step.
        """
        current = self.state_dict(Position())
        for name, same in (("size", "dataset"), ("seed", "seed"), ("shuffle", "shuffling")):
            if state.get(name) != current[name]:
                raise DataError(
                    f"the saved data position has {name} {state.get(name)}, but this dataset "
                    f"has {current[name]}: resume with the same {same}"
                )
        epoch, sample = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(sample, int) and epoch >= 0):
            raise DataError(f"the saved data position is damaged: epoch {epoch}, position {sample}")
        if not 0 <= sample <= self.size:
            raise DataError(f"the saved data position {sample} is outside {self.size} samples")
        return self.normalise(Position(epoch, sample))
