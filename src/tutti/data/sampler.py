"""Which samples a step takes: the next `global_batch` of the epoch's order, whatever the ranks.

The sampler knows nothing of ranks. A step is drawn globally and cut afterwards (split.py), so the
samples of a step are the same for 1 rank and for 512, and a position is a single number: how many
samples of the epoch have been taken by all ranks together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.data.errors import DataError
from tutti.data.order import Indices, Order


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come: `sample` samples of epoch `epoch` are taken, over all ranks."""

    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples of one step, and the positions before and after it."""

    indices: Indices
    start: Position
    after: Position


class GlobalSampler:
    """Draws the steps of a run from a data set of `size` samples.

    The order is a function of (seed, epoch). With `drop_last` an epoch ends where no full batch is
    left; without it, the last batch is shorter.
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
            raise DataError("the data set is empty: 0 samples")
        if global_batch < 1:
            raise DataError(f"a global batch of {global_batch} samples takes nothing: use >= 1")
        if drop_last and global_batch > size:
            raise DataError(
                f"the global batch of {global_batch} samples is larger than the data set of {size}:"
                f" use a batch of at most {size}, or keep the last, shorter batch"
            )
        self.size, self.global_batch, self.drop_last = size, global_batch, drop_last
        self.order = Order(size, seed, shuffle)

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return self.steps_left(Position())

    def steps_left(self, at: Position) -> int:
        """Steps from `at` to the end of its epoch."""
        rest = self.size - at.sample
        return rest // self.global_batch if self.drop_last else -(-rest // self.global_batch)

    def settle(self, at: Position) -> Position:
        """`at`, or the start of the next epoch where this one has no batch left."""
        return at if self.steps_left(at) > 0 else Position(at.epoch + 1, 0)

    def draw(self, at: Position) -> Draw:
        """The step at `at`. Nothing is remembered: the same position gives the same step."""
        start = self.settle(at)
        stop = min(start.sample + self.global_batch, self.size)
        indices = self.order.samples(start.epoch, start.sample, stop)
        return Draw(indices, start, self.settle(Position(start.epoch, stop)))

    def state_dict(self, at: Position) -> dict[str, int | bool]:
        """A position with what it means, small and fit for JSON. It holds nothing of ranks."""
        return {
            "size": self.size,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "epoch": at.epoch,
            "position": at.sample,
        }

    def position(self, state: Mapping[str, object]) -> Position:
        """The position in a state_dict, which must be of the same data in the same order.

        The global batch may be another: the rest of the epoch is then the same samples in the same
        order, in steps of another size.
        """
        mine = self.state_dict(Position())
        for name, cure in (
            ("size", "resume with the data set that the run was started with"),
            ("seed", "resume with the same seed"),
            ("shuffle", "resume with the same shuffling"),
        ):
            if state.get(name) != mine[name]:
                raise DataError(
                    f"the saved data position has {name} {state.get(name)}, "
                    f"this data set has {mine[name]}: {cure}"
                )
        epoch, sample = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(sample, int) and epoch >= 0):
            raise DataError(f"the saved data position is damaged: epoch {epoch}, position {sample}")
        if not 0 <= sample <= self.size:
            raise DataError(
                f"the saved data position {sample} is outside the data set of {self.size} samples"
            )
        return self.settle(Position(epoch, sample))
