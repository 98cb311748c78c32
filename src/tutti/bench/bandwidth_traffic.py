"""Traffic: messages that flow between ranks at the same time, and how fast each flow is.

A flow is (from, to). The receiver holds the clock: it starts when a first message has arrived and
stops after the last, so that neither who came late to the meeting nor what a sender's buffers took
in before counts. All kinds of traffic take turns, pass by pass: what disturbs the machine for a
moment costs each of them one sample, not one of them all its samples.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.bench.control import Control
from tutti.measure.timing import no_garbage_collection

PASSES = 5
# Messages under way at once: what a link carries is asked for, not how soon a rank wakes up.
_WINDOW = 4
_MOST_WINDOWS = 1000
_PERIOD = 8191  # a prime: no chunk that a backend cuts is a multiple of it
# Nothing is said for this long, and then where the measuring is.
_SILENCE_SECONDS = 2.0

Flow = tuple[int, int]


@dataclass
class Traffic:
    """Flows at the same time, each rank receiving one at most; and what was measured of them."""

    kind: str  # one way, both ways, one to all
    flows: tuple[Flow, ...]
    bytes: int  # of each message
    window: int = 1  # messages under way at once
    windows: int = 0  # that are timed in a pass
    # For each flow: seconds for one message in each pass, and bytes that were not what was sent.
    seconds: dict[Flow, list[float]] = field(default_factory=dict)
    wrong: dict[Flow, int] = field(default_factory=dict)

    def speeds(self, flow: Flow) -> list[float]:
        """GB/s of a flow in each pass, ascending."""
        return sorted(self.bytes / each / 1e9 for each in self.seconds.get(flow, ()))

    def together(self, flows: Sequence[Flow] | None = None) -> list[float]:
        """GB/s of all flows (or of these) as one, in each pass: the last to end counts."""
        taken = [self.seconds.get(flow, []) for flow in flows or self.flows]
        slowest = [max(each) for each in zip(*taken, strict=True)]
        return sorted(len(taken) * self.bytes / each / 1e9 for each in slowest)


def rounds_of_pairs(ranks: int) -> list[list[Flow]]:
    """All pairs (a < b) in rounds in which no rank is in two: a tournament's schedule."""
    players: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        met = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]  # the first stays, the others turn
    return rounds


class Meter:
    """Measures traffic over one process group. All ranks make the same calls."""

    def __init__(
        self, group: dist.ProcessGroup, control: Control, device: torch.device, budget: float
    ) -> None:
        self._group = group
        self._control = control
        self._device = device
        self._budget = budget  # seconds for each kind of traffic
        self._rank = control.rank
        self._sent = torch.empty(0, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)
        # NCCL wants every rank to have used the group before some of them exchange messages.
        dist.barrier(group)

    def run(
        self,
        all_traffic: Sequence[Traffic],
        tell: Callable[[str], None],
        passes: int = PASSES,
        after_pass: Callable[[], None] = lambda: None,
    ) -> bool:
        """Measure all, pass by pass; False when somebody asked to stop: less was measured then."""
        said = time.monotonic()
        for number in range(passes):
            for position, traffic in enumerate(all_traffic):
                if self._control.meet():
                    return False
                if time.monotonic() - said > _SILENCE_SECONDS:
                    where = f"{traffic.kind}, {position + 1} of {len(all_traffic)}"
                    tell(f"pass {number + 1} of {passes}: {where}")
                    said = time.monotonic()
                self._measure(traffic)
            after_pass()
        return True

    def _measure(self, traffic: Traffic) -> None:
        to = [b for a, b in traffic.flows if a == self._rank]
        sources = [a for a, b in traffic.flows if b == self._rank]
        source = sources[0] if sources else None
        self._make_room(traffic.bytes)
        if source is not None:
            self._received.zero_()  # nothing is right by chance
        self._control.meet()
        if not traffic.windows:
            seconds = self._agree(traffic, self._time(1, 1, to, source))
            slowest = max(float(seconds.max()), 1e-9)
            wanted = self._budget / PASSES / slowest
            # A slow link takes part with a message for each pass: all must not wait for it.
            traffic.window = min(_WINDOW, max(1, int(wanted)))
            traffic.windows = min(_MOST_WINDOWS, max(1, math.ceil(wanted / traffic.window)))
            self._control.meet()
        seconds = self._agree(traffic, self._time(traffic.windows, traffic.window, to, source))
        wrong = 0
        if source is not None:
            expected = pattern(source, traffic.bytes, self._device)
            wrong = int((self._received != expected).sum())
        found = self._agree(traffic, wrong).tolist()
        for flow, time_of_one, lost in zip(traffic.flows, seconds.tolist(), found, strict=True):
            traffic.seconds.setdefault(flow, []).append(time_of_one)
            traffic.wrong[flow] = traffic.wrong.get(flow, 0) + int(lost)

    def _make_room(self, size: int) -> None:
        if self._sent.numel() != size:
            # Freed before the next is allocated: both may be large.
            self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._sent = pattern(self._rank, size, self._device)
            self._received = torch.zeros_like(self._sent)

    def _agree(self, traffic: Traffic, value: float) -> Tensor:
        """The values of all flows, on all ranks: the receivers' count."""
        mine = [value if b == self._rank else 0.0 for _, b in traffic.flows]
        return self._control.largest_of(torch.tensor(mine, dtype=torch.float64))

    def _time(self, windows: int, window: int, to: Sequence[int], source: int | None) -> float:
        """Seconds for one message, of as many windows after a first one."""
        if not to and source is None:
            return 0.0
        if self._device.type == "cuda":
            return self._time_on_stream(windows, window, to, source)
        with no_garbage_collection():
            self._exchange(window, to, source)
            began = time.perf_counter()
            for _ in range(windows):
                self._exchange(window, to, source)
            return (time.perf_counter() - began) / windows / window

    def _time_on_stream(
        self, windows: int, window: int, to: Sequence[int], source: int | None
    ) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with no_garbage_collection():
            self._exchange(window, to, source)
            before.record()
            for _ in range(windows):
                self._exchange(window, to, source)
            after.record()
            after.synchronize()
        return float(before.elapsed_time(after)) / 1e3 / windows / window

    def _exchange(self, window: int, to: Sequence[int], source: int | None) -> None:
        """A window of messages to each peer, and from the source."""
        messages: list[tuple[Any, Tensor, int]] = [(dist.isend, self._sent, peer) for peer in to]
        if source is not None:
            messages.append((dist.irecv, self._received, source))
        messages *= window  # all with the same content: they may arrive into the same memory
        group = self._group
        if self._device.type == "cuda":
            # NCCL would deadlock on sends that wait for their receives: all go as one.
            as_one = [dist.P2POp(how, tensor, peer, group=group) for how, tensor, peer in messages]
            works: list[dist.Work | None] = [*dist.batch_isend_irecv(as_one)]
        else:
            works = [how(tensor, peer, group=group) for how, tensor, peer in messages]
        for work in works:
            if work is not None:
                work.wait()


def pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """What a rank sends: bytes without 0, others for each rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    tile = torch.randint(1, 256, (_PERIOD,), generator=generator, dtype=torch.uint8)
    return tile.to(device).repeat(-(-size // _PERIOD))[:size]
