"""One rank's part of a step: first which samples it is, then the samples."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tutti.data.sampler import Position


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a step; `inputs, targets = batch` unpacks it.

    A rank may get no sample at the ragged end of an epoch: then the tensors have length 0, and it
    must still take part in the step's collectives.
    """

    inputs: Tensor
    targets: Tensor
    global_count: int  # samples of this step over all ranks: what the loss is divided by
    start: Position
    after: Position

    def __iter__(self) -> Iterator[Tensor]:
        yield self.inputs
        yield self.targets

    @property
    def count(self) -> int:
        """Samples of this step on this rank."""
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class Part:
    """Which samples this rank takes in a step, before they are fetched."""

    indices: Tensor
    global_count: int
    start: Position
    after: Position
