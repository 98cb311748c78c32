"""Memory: what a heap asks of the backend that holds its bytes."""

from collections.abc import Callable
from typing import Literal, NoReturn, Protocol

import torch

from tutti.world.errors import UsageError

Algorithm = Literal["auto", "one_shot", "two_shot", "ring"]
CHANNELS = 16  # barriers of different channels do not meet


class Memory(Protocol):
    """One block of the same size on every rank; `offset` is in bytes, the same place on all."""

    backend: str
    reason: str
    device: torch.device
    bytes: int
    alignment: int
    signals: int

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A rank's bytes as a tensor, without a copy."""

    def address(self, rank: int, offset: int) -> int:
        """Where this process sees a rank's byte."""

    def put(self, to: int, offset: int, source: torch.Tensor, bytes: int) -> None: ...
    def get(self, source: int, offset: int, out: torch.Tensor, bytes: int) -> None: ...
    def put_signal(
        self,
        to: int,
        offset: int,
        source: torch.Tensor,
        bytes: int,
        slot: int,
        value: int,
        add: int,
    ) -> None: ...

    # 64-bit words by their address in this process.
    def signal_address(self, rank: int, slot: int) -> int: ...
    def load(self, address: int, /) -> int: ...
    def store(self, address: int, value: int, /) -> None: ...
    def add(self, address: int, value: int, /) -> object: ...
    def fetch_add(self, address: int, value: int, /) -> int: ...
    def compare_swap(self, address: int, expected: int, desired: int, /) -> int: ...
    def wait_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        """Wait until the word is `at_least` so much; `source`: whose death ends it, None: all."""

    def fence(self) -> None: ...
    def quiet(self) -> None: ...
    def barrier(self, channel: int, timeout: float) -> None: ...

    @property
    def in_step(self) -> bool:
        """Whether all meetings so far took place: only then can another one follow."""

    def agree(self, call: str, timeout: float) -> None:
        """Return when all ranks make the same call; raise RanksDiffer when they do not."""

    def all_reduce(
        self,
        local: torch.Tensor,
        offset: int,
        op: str,
        algorithm: Algorithm,
        out: torch.Tensor,
        out_offset: int | None,
        timeout: float,
    ) -> None:
        """`out` is `local` itself, another tensor of the heap (at `out_offset`), or any tensor."""

    def sum_in_place(self, local: torch.Tensor) -> Callable[[], object] | None:
        """The usual all_reduce of a tensor with everything decided beforehand, if there is one."""

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str, timeout: float
    ) -> None:
        """Reduce an ordinary `tensor` in place, through `buffer` of the same shape at `offset`."""

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None: ...
    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None: ...

    def stats(self) -> dict[str, int]: ...
    def close(self) -> None:
        """Leave: peers that still wait for this rank are told so. Not collective."""


class Gone:
    """Stands where a closed heap or a freed tensor had its memory, so that checks cost nothing."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._what)
