"""A pair: two ways to the same result, and how near to each other the results must be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tutti.bench.unsupported import Unsupported

if TYPE_CHECKING:
    import torch

    from tutti.world.world import World

Value = TypeVar("Value")


def _nothing() -> None:
    """What there is to close where a side holds nothing but tensors."""


@dataclass(frozen=True)
class Pair:
    """Two functions without arguments that do the same work, on every rank.

    Each returns its result: a tensor, or lists, tuples and dicts of tensors and numbers. A call
    begins where the last one began, so that it can be made any number of times. On CUDA it may
    leave work on the current stream: the harness waits for it.
    """

    baseline: Callable[[], Any]
    optimized: Callable[[], Any]
    tolerance: float = 0.0
    """The largest difference, as a part of the largest value of a tensor; 0: equal to the bit."""
    reason: str = ""
    """Why the tolerance is not 0, or what else there is to say; printed under the row."""
    close: Callable[[], None] = _nothing
    """Called on all ranks at the end."""


@dataclass(frozen=True)
class Setting:
    """Where a pair is measured; every function that makes one gets it."""

    world: "World"
    quick: bool = False
    """Small workloads: to see that a pair works, not what it gains."""

    @property
    def device(self) -> "torch.device":
        """Where tensors are to be."""
        return self.world.device

    @property
    def on_gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.world.device.type == "cuda"

    def pick(self, full: Value, quick: Value) -> Value:
        """The first, or the second where things are to be quick."""
        return quick if self.quick else full

    def need(self, has: bool, reason: str) -> None:
        """Skip the pair on all ranks unless every rank has what it needs. Collective."""
        from tutti.world.exchange import gather_json

        if not all(gather_json(has)):
            raise Unsupported(reason)


Make = Callable[[Setting], Pair]
