"""Control: the first page of every rank's segment, on which the ranks of a heap meet.

Each word there has one writer, the owner of the page. It is stored with release and loaded with
acquire, so whoever sees that a rank has come sees all that it wrote before.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

from tutti.comm.shm import native
from tutti.comm.symmetric.errors import PeerDied, PeerLeft, Timeout
from tutti.comm.symmetric.memory import CHANNELS
from tutti.world.errors import UsageError

LINE = 64  # bytes of a cache line: words with different readers lie on different lines
CONTROL_BYTES = 4096
_TEXT = 512  # bytes of a text that ranks exchange

# The first line belongs to shm_segments, which keeps its token there.
_LEFT = LINE
_BARRIERS = 2 * LINE  # one line per channel
_EXCHANGE = _BARRIERS + CHANNELS * LINE  # the barrier under exchange()
_PROGRESS = _EXCHANGE + LINE  # how far this rank is in a collective
_TEXTS = _PROGRESS + LINE  # two texts, used in turn
assert _TEXTS + 2 * _TEXT <= CONTROL_BYTES

# A wait returns to Python this often: for Ctrl-C, and to look whether the peers still live.
_SLICE = 0.1


class Control:
    """The pages of all ranks as one rank sees them."""

    def __init__(self, rank: int, segments: list[Any]) -> None:
        core = native.core()
        self._rank = rank
        self._peers = [peer for peer in range(len(segments)) if peer != rank]
        self._segments = segments
        self._pages = [int(core.tutti_segment_base(segment)) for segment in segments]
        self._alive: Callable[[Any], int] = core.tutti_segment_owner_lives
        self._wait: Callable[[int, int, float, Any], int] = core.tutti_wait_signal
        self._load: Callable[[int], int] = native.core_holding_gil().tutti_load
        self._store: Callable[[int, int], None] = native.core_holding_gil().tutti_store
        self._meetings = [0] * CONTROL_BYTES  # by the line that they use
        self._exchanges = 0
        self._broken: str | None = None

    def barrier(self, channel: int, timeout: float) -> None:
        """Wait until all ranks are here."""
        self._meet(_BARRIERS + LINE * channel, timeout, "a barrier")

    def exchange(self, text: str, timeout: float, what: str) -> list[str]:
        """Every rank's short text, in rank order."""
        # Two places in turn: who writes to one again has passed the meeting in between, to which
        # all came after they had read it.
        at = _TEXTS + _TEXT * (self._exchanges % 2)
        self._exchanges += 1
        encoded = text.encode()[: _TEXT - 1] + b"\0"
        ctypes.memmove(self._pages[self._rank] + at, encoded, len(encoded))
        self._meet(_EXCHANGE, timeout, what)
        return [ctypes.string_at(page + at).decode(errors="replace") for page in self._pages]

    def progress(self, rank: int) -> int:
        """The address of the word in which a rank tells how far it has come in a collective."""
        return self._pages[rank] + _PROGRESS

    def leave(self) -> None:
        """Tell whoever still waits for this rank that it will not come."""
        self._store(self._pages[self._rank] + _LEFT, 1)

    def wait_for_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        """Wait for any word; `source` is the rank whose end also ends the wait, None: each."""
        watched = None if source is None else self._segments[source]
        first = _SLICE if timeout > _SLICE else timeout
        if first <= 0 or self._wait(address, at_least, first, watched) != 0:
            whom = self._peers if source is None else [source]
            self._wait_on(address, at_least, whom, timeout, f"{what} to reach {at_least}")

    def wait_for_peer(self, peer: int, address: int, value: int, timeout: float, what: str) -> None:
        """Wait until a word that only `peer` writes has come so far, in something collective."""
        first = _SLICE if timeout > _SLICE else timeout
        if self._wait(address, value, first, self._segments[peer]) == 0:
            return
        try:
            # Whoever of all ranks has died, this meeting will not take place.
            self._wait_on(address, value, self._peers, timeout, f"rank {peer} in {what}")
        except BaseException as error:
            self.fall_out_of_step(error)
            raise

    def gone(self, waiting_for: str, watched: Sequence[int] | None = None) -> Exception | None:
        """The error for the first rank that has died or left, if there is one."""
        ranks = self._peers if watched is None else watched
        dead = [peer for peer in ranks if not self._alive(self._segments[peer])]
        left = [peer for peer in ranks if self._load(self._pages[peer] + _LEFT)]
        # Death first: who has left may have done so because of it.
        for peer in dead:
            if peer not in left:
                return PeerDied(peer, waiting_for)
        return PeerLeft(left[0], waiting_for) if left else None

    def fall_out_of_step(self, error: BaseException) -> None:
        """Remember that ranks no longer agree on how often they met: nothing collective follows."""
        self._broken = f"{type(error).__name__}: {error}"

    @property
    def in_step(self) -> bool:
        """Whether all meetings so far took place."""
        return self._broken is None

    def check(self) -> None:
        """Refuse what is collective after a meeting has failed."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is out of step since an earlier error ({self._broken}): close it and "
                "make another"
            )

    def _meet(self, line: int, timeout: float, what: str) -> None:
        """Tell that this rank has come once more, wait until each peer has."""
        self.check()
        self._meetings[line] = count = self._meetings[line] + 1
        self._store(self._pages[self._rank] + line, count)
        for peer in self._peers:
            self.wait_for_peer(peer, self._pages[peer] + line, count, timeout, what)

    def _wait_on(
        self, address: int, value: int, watched: Sequence[int], timeout: float, what: str
    ) -> None:
        """The slow part of a wait: in slices, looking between them whether the peers still live."""
        deadline = time.monotonic() + timeout - min(timeout, _SLICE)
        while True:
            gone = self.gone(what, watched)
            if gone is not None and self._load(address) < value:
                raise gone
            remaining = min(deadline - time.monotonic(), _SLICE)  # 0 would mean for ever
            if remaining <= 0:
                now = self._load(address)
                if now >= value:
                    return
                raise Timeout(
                    f"rank {self._rank} waited {timeout:g} s for {what}; its value is {now}"
                )
            if self._wait(address, value, remaining, None) == 0:
                return
