"""Point-to-point messages: the speed of concurrent flows, and all-reduce as a ring and as a tree.

A flow is (source rank, destination rank). The receiver measures the time from the arrival of the
first window of messages to the arrival of the last window. Neither a late start nor buffering at
the sender is included. All kinds of traffic are measured in interleaved passes, so a temporary
disturbance of the machine affects one sample of each kind instead of all samples of one kind.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.bench.collectives.cases import Backend, Buffers, CollectiveCase, PreparedCase
from tutti.bench.rank_control import RankControl
from tutti.measure.timing import time_total

PASSES = 5
# Messages in flight at the same time, so that the bandwidth of the link is measured and not the
# wake-up latency.
_WINDOW = 4
_MAX_WINDOWS = 1000
# The data repeats after this many bytes. 8191 is a prime, so no chunk size of a backend is a
# multiple of the period, and a chunk written to the wrong place is detected.
_PERIOD = 8191
_PROGRESS_SECONDS = 2.0

Flow = tuple[int, int]


@dataclass
class Traffic:
    """Flows that are active at the same time, at most one into each rank, and their samples."""

    kind: str  # one way, both ways, one to all
    flows: tuple[Flow, ...]
    bytes: int  # per message
    window: int = 1  # messages in flight
    windows: int = 0  # number of timed windows in each pass
    # Per flow: seconds per message in each pass, and the number of wrong bytes.
    seconds: dict[Flow, list[float]] = field(default_factory=dict)
    wrong: dict[Flow, int] = field(default_factory=dict)

    def speeds(self, flow: Flow) -> list[float]:
        """Return the GB/s of a flow in each pass, in ascending order."""
        return sorted(self.bytes / each / 1e9 for each in self.seconds.get(flow, ()))

    def total_speeds(self, flows: Sequence[Flow] | None = None) -> list[float]:
        """Return the total GB/s of all flows, or of `flows`, in each pass.

        The time of a pass is that of the slowest flow.
        """
        taken = [self.seconds.get(flow, []) for flow in flows or self.flows]
        slowest = [max(each) for each in zip(*taken, strict=True)]
        return sorted(len(taken) * self.bytes / each / 1e9 for each in slowest)


def disjoint_rounds(ranks: int) -> list[list[Flow]]:
    """Return all pairs (a < b) in rounds of disjoint pairs.

    This is the circle method for round-robin tournaments.
    """
    circle: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


class TrafficMeter:
    """Measures traffic over one process group. All ranks make the same calls."""

    def __init__(
        self, group: dist.ProcessGroup, control: RankControl, device: torch.device, budget: float
    ) -> None:
        self._group = group
        self._control = control
        self._device = device
        self._budget = budget  # seconds for each kind of traffic
        self._rank = control.rank
        self._sent = torch.empty(0, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)
        # NCCL requires one call by every rank of the group before any two ranks exchange messages.
        dist.barrier(group)

    def run(
        self,
        all_traffic: Sequence[Traffic],
        progress: Callable[[str], None],
        passes: int = PASSES,
        after_pass: Callable[[], None] = lambda: None,
    ) -> bool:
        """Measure all traffic in interleaved passes. Returns False if a rank received a signal."""
        printed = time.monotonic()
        for number in range(passes):
            for position, traffic in enumerate(all_traffic):
                if self._control.check_stop():
                    return False
                if time.monotonic() - printed > _PROGRESS_SECONDS:
                    where = f"{traffic.kind}, {position + 1} of {len(all_traffic)}"
                    progress(f"pass {number + 1} of {passes}: {where}")
                    printed = time.monotonic()
                self._measure(traffic)
            after_pass()
        return True

    def _measure(self, traffic: Traffic) -> None:
        to = [b for a, b in traffic.flows if a == self._rank]
        source = next((a for a, b in traffic.flows if b == self._rank), None)
        self._resize_buffers(traffic.bytes)
        if source is not None:
            self._received.zero_()  # stale data must not pass the check
        self._control.check_stop()
        if not traffic.windows:
            seconds = self._collect(traffic, self._time(1, 1, to, source))
            wanted = self._budget / PASSES / max(float(seconds.max()), 1e-9)
            # A very slow link is measured with one message per pass.
            traffic.window = min(_WINDOW, max(1, int(wanted)))
            traffic.windows = min(_MAX_WINDOWS, max(1, math.ceil(wanted / traffic.window)))
            self._control.check_stop()
        seconds = self._collect(traffic, self._time(traffic.windows, traffic.window, to, source))
        wrong = 0
        if source is not None:
            expected = data_pattern(source, traffic.bytes, self._device)
            wrong = int((self._received != expected).sum())
        wrongs = self._collect(traffic, wrong)
        for flow, each, lost in zip(traffic.flows, seconds.tolist(), wrongs.tolist(), strict=True):
            traffic.seconds.setdefault(flow, []).append(each)
            traffic.wrong[flow] = traffic.wrong.get(flow, 0) + int(lost)

    def _resize_buffers(self, size: int) -> None:
        if self._sent.numel() != size:
            # Free the old buffers first: both may be large.
            self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._sent = data_pattern(self._rank, size, self._device)
            self._received = torch.zeros_like(self._sent)

    def _collect(self, traffic: Traffic, value: float) -> Tensor:
        """Return the value that the receiver of each flow passed. The same on all ranks."""
        mine = [value if b == self._rank else 0.0 for _, b in traffic.flows]
        return self._control.max_of_tensor(torch.tensor(mine, dtype=torch.float64))

    def _time(self, windows: int, window: int, to: Sequence[int], source: int | None) -> float:
        """Return the seconds per message over `windows` windows, after one untimed window."""
        if not to and source is None:
            return 0.0
        exchange = partial(self._exchange_window, window, to, source)
        exchange()
        return time_total(exchange, windows, self._device) / windows / window

    def _exchange_window(self, window: int, to: Sequence[int], source: int | None) -> None:
        messages: list[tuple[Any, Tensor, int]] = [(dist.isend, self._sent, peer) for peer in to]
        if source is not None:
            messages.append((dist.irecv, self._received, source))
        # The messages of a window have the same content and can share one receive buffer.
        _exchange(messages * window, self._group)


def _exchange(messages: Sequence[tuple[Any, Tensor, int]], group: dist.ProcessGroup) -> None:
    """Post all (isend or irecv, tensor, peer) at once and wait. Empty tensors are skipped."""
    messages = [message for message in messages if message[1].numel()]
    if messages and messages[0][1].is_cuda:
        # NCCL sends that wait for their receives would deadlock in a ring, so post one batch.
        batch = [dist.P2POp(how, tensor, peer, group=group) for how, tensor, peer in messages]
        works: list[dist.Work | None] = [*dist.batch_isend_irecv(batch)]
    else:
        works = [how(tensor, peer, group=group) for how, tensor, peer in messages]
    for work in works:
        if work is not None:
            work.wait()


def data_pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """Return the bytes that a rank sends. They are never 0, and differ between ranks."""
    generator = torch.Generator().manual_seed(1 + rank)
    tile = torch.randint(1, 256, (_PERIOD,), generator=generator, dtype=torch.uint8)
    return tile.to(device).repeat(-(-size // _PERIOD))[:size]


# ---- All-reduce from messages ----


def point_to_point_all_reduce(
    backend: str, algorithm: str, group: dist.ProcessGroup, buffers: Buffers
) -> Backend:
    """Return an in-place all_reduce made of point-to-point messages, as a ring or as a tree.

    It is a baseline for the all_reduce of the backend.

    For n ranks, S bytes, α seconds per message and β seconds per byte:

        ring: 2 (n - 1) steps of S / n bytes: 2 (n - 1) α + 2 (n - 1) / n · S β
        tree: 2 ⌈log2 n⌉ steps of S bytes:    2 ⌈log2 n⌉ (α + S β)

    The tree is faster for small tensors on many ranks, and the ring is faster for large tensors. On
    two ranks, the ring sends two halves of the tensor in each direction at the same time. The tree
    sends the whole tensor to rank 0 and then back.
    """
    function = {"ring": ring_all_reduce, "tree": tree_all_reduce}[algorithm]

    def prepare(case: CollectiveCase) -> PreparedCase:
        tensor, scratch = (
            buffers.take(role, case.count, case.dtype) for role in ("received", "scratch")
        )
        return PreparedCase(tensor, tensor, partial(function, tensor, scratch, group))

    about = f"all_reduce as a {algorithm} of point-to-point messages, a baseline"
    return Backend(f"{backend} {algorithm}", about, prepare)


def ring_all_reduce(tensor: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over all ranks in place. `scratch` has the size of `tensor`.

    A reduce-scatter leaves one summed shard on every rank; an all-gather then distributes them.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards, scratches = tensor.tensor_split(ranks), scratch.tensor_split(ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        sent, received = (rank - step) % ranks, (rank - step - 1) % ranks
        send = (dist.isend, shards[sent], after)
        _exchange([send, (dist.irecv, scratches[received], before)], group)
        shards[received].add_(scratches[received])
    for step in range(ranks - 1):
        sent, received = (rank + 1 - step) % ranks, (rank - step) % ranks
        send = (dist.isend, shards[sent], after)
        _exchange([send, (dist.irecv, shards[received], before)], group)


def tree_all_reduce(tensor: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over all ranks in place: reduce to rank 0 in a binomial tree, then broadcast."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    distances = [1 << level for level in range((ranks - 1).bit_length())]
    for distance in distances:
        # Ranks that are multiples of 2 × distance receive from odd multiples of the distance.
        if rank % (2 * distance) == distance:
            _exchange([(dist.isend, tensor, rank - distance)], group)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            _exchange([(dist.irecv, scratch, rank + distance)], group)
            tensor.add_(scratch)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            _exchange([(dist.irecv, tensor, rank - distance)], group)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            _exchange([(dist.isend, tensor, rank + distance)], group)
