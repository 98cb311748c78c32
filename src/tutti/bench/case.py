"""A case is one thing to measure; a contender is somebody who can do it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.measure.bus_bandwidth import Operation


@dataclass(frozen=True)
class Case:
    """One operation at one size: the same for every contender that is compared."""

    operation: Operation
    count: int
    dtype: torch.dtype
    placement: str  # in or out
    rank: int
    ranks: int

    @property
    def bytes(self) -> int:
        """S, as nccl-tests defines it."""
        return self.operation.bytes(self.count, self.dtype.itemsize, self.ranks)

    @property
    def repeats_itself(self) -> bool:
        """Whether a second call gives the same result: in place, a sum is added up again."""
        return self.placement == "out" or not self.operation.reduces

    @property
    def all_shares(self) -> int:
        """The elements of all ranks' shares together."""
        return self.count * self.ranks


@dataclass(frozen=True)
class Prepared:
    """A case made ready: where to put what is sent, what to call, where the result is."""

    sent: Tensor
    received: Tensor
    call: Callable[[], Any]
    close: Callable[[], None] = lambda: None
    operations: int = 1  # how many a call makes; times are those of one


class Contender(Protocol):
    """Something that can be measured: a backend, or a path through one."""

    @property
    def name(self) -> str:
        """What the tables and the JSON call it."""

    @property
    def about(self) -> str:
        """Which form of it this is, and why; empty where there is but one."""

    def prepare(self, case: Case) -> Prepared:
        """Allocate buffers and make the call; raises Unsupported with the reason."""


class Buffers:
    """Ordinary tensors, used by every contender in turn: nobody has the luckier pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}

    def take(self, role: str, count: int, dtype: torch.dtype) -> Tensor:
        """The tensor of this role; a new one where another size or type is asked for."""
        held = self._held.get(role)
        if held is None or held.numel() != count or held.dtype != dtype:
            self._held.pop(role, None)  # freed before the next is allocated: both may be large
            held = self._held[role] = torch.zeros(count, dtype=dtype, device=self._device)
        return held
