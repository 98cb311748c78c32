"""Point-to-point transfers: messages between ranks, all-reduce from messages, and GPU copies.

A flow is (source rank, destination rank). A window is a group of messages that are in flight at the
same time. The receiver measures the time from the arrival of the first window to the arrival of the
last window. This time includes neither a late start of the sender nor its buffering. A traffic
pattern is a set of flows that are active at the same time. Each pass measures every pattern once,
so a temporary disturbance of the machine affects one sample of each pattern instead of all samples
of one pattern.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.bench.bandwidth.link_verdicts import fraction_verdict
from tutti.bench.collectives.cases import Backend, Buffers, CollectiveCase, PreparedCase
from tutti.bench.rank_control import RankControl
from tutti.machine.hardware_catalogue import accelerator, figure, link
from tutti.measure.spread import relative_mad
from tutti.measure.timing import time_total
from tutti.measure.units import format_size
from tutti.world.rank_cases import Cases

PASSES = 5
# Number of messages in a window. A window of one message would measure the time to wake up a rank
# instead of the bandwidth of the link.
_WINDOW = 4
_MAX_WINDOWS = 1000
# The data repeats after this many bytes. 8191 is a prime, so no chunk size of a backend is a
# multiple of the period, and a chunk written to the wrong place is detected.
_PERIOD = 8191
_PROGRESS_SECONDS = 2.0

Flow = tuple[int, int]


@dataclass
class Traffic:
    """A traffic pattern: flows that are active at the same time, and their samples.

    At most one flow goes into each rank.
    """

    kind: str  # "one way", "both ways" or "one to all"
    flows: tuple[Flow, ...]
    bytes: int  # size of a message
    window: int = 1  # number of messages in flight
    windows: int = 0  # number of timed windows in each pass
    # {flow: seconds per message in each pass} and {flow: number of wrong bytes}
    seconds: dict[Flow, list[float]] = field(default_factory=dict)
    wrong: dict[Flow, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the case, such as `one way 0→1 of 16M`."""
        flows = ", ".join(f"{src}→{dst}" for src, dst in self.flows)
        return f"{self.kind} {flows} of {format_size(self.bytes)}"

    def speeds(self, flow: Flow) -> list[float]:
        """Return the speeds of a flow in each pass in GB/s, in ascending order."""
        return sorted(self.bytes / seconds / 1e9 for seconds in self.seconds.get(flow, ()))

    def total_speeds(self, flows: Sequence[Flow] | None = None) -> list[float]:
        """Return the total speed of several flows in each pass in GB/s, in ascending order.

        The total speed is the bytes of all flows divided by the time of the slowest flow.
        """
        samples = [self.seconds.get(flow, []) for flow in flows or self.flows]
        slowest = [max(times) for times in zip(*samples, strict=True)]
        return sorted(len(samples) * self.bytes / seconds / 1e9 for seconds in slowest)


def disjoint_rounds(ranks: int) -> list[list[Flow]]:
    """Return all pairs (a, b) with a < b, in rounds of disjoint pairs.

    The rounds are those of a round-robin tournament (circle method).
    """
    circle = [*range(ranks + ranks % 2)]  # if `ranks` is odd, one rank has no partner in a round
    half, rounds = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < ranks])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


class TrafficMeter:
    """Measures traffic patterns over one process group. All ranks must make the same calls."""

    def __init__(
        self, group: dist.ProcessGroup, control: RankControl, device: torch.device, budget: float
    ) -> None:
        self._group = group
        self._control = control
        self._device = device
        self._budget = budget  # seconds for each traffic pattern
        self._rank = control.rank
        self._sent = torch.empty(0, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)
        # NCCL requires one collective of the whole group before two ranks exchange messages.
        dist.barrier(group)

    def run(
        self,
        all_traffic: Sequence[Traffic],
        progress: Callable[[str], None],
        after_pass: Callable[[], None] = lambda: None,
        passes: int = PASSES,
        cases: Cases | None = None,
    ) -> bool:
        """Measure all traffic patterns once per pass. Return False if a rank got a stop signal."""
        cases = cases or Cases(None)
        printed = time.monotonic()
        for number in range(passes):
            for position, traffic in enumerate(all_traffic):
                if self._control.check_stop():
                    return False
                if time.monotonic() - printed > _PROGRESS_SECONDS:
                    where = f"{traffic.kind}, {position + 1} of {len(all_traffic)}"
                    progress(f"pass {number + 1} of {passes}: {where}")
                    printed = time.monotonic()
                with cases.running(traffic.name, self._rank):
                    self._measure(traffic)
            after_pass()
        return True

    def _measure(self, traffic: Traffic) -> None:
        to = [dst for src, dst in traffic.flows if src == self._rank]
        source = next((src for src, dst in traffic.flows if dst == self._rank), None)
        if self._sent.numel() != traffic.bytes:
            # Free the old buffers first, because the memory may be too small for both.
            self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._sent = data_pattern(self._rank, traffic.bytes, self._device)
            self._received = torch.zeros_like(self._sent)
        if source is not None:
            self._received.zero_()  # data of an earlier pass must not pass the check
        self._control.check_stop()
        if not traffic.windows:
            estimates = self._collect(traffic, self._time(1, 1, to, source))
            messages = self._budget / PASSES / max(*estimates, 1e-9)
            # A very slow link is measured with one message per pass.
            traffic.window = min(_WINDOW, max(1, int(messages)))
            traffic.windows = min(_MAX_WINDOWS, max(1, math.ceil(messages / traffic.window)))
            self._control.check_stop()
        times = self._collect(traffic, self._time(traffic.windows, traffic.window, to, source))
        wrong_bytes = 0
        if source is not None:
            expected = data_pattern(source, traffic.bytes, self._device)
            wrong_bytes = int((self._received != expected).sum())
        counts = self._collect(traffic, wrong_bytes)
        for flow, seconds, wrong in zip(traffic.flows, times, counts, strict=True):
            traffic.seconds.setdefault(flow, []).append(seconds)
            traffic.wrong[flow] = traffic.wrong.get(flow, 0) + int(wrong)

    def _collect(self, traffic: Traffic, value: float) -> list[float]:
        """Return, for each flow, the `value` of its receiver. All ranks return the same list."""
        received = [value if dst == self._rank else 0.0 for _, dst in traffic.flows]
        return self._control.max_over_ranks(received)

    def _time(self, windows: int, window: int, to: Sequence[int], source: int | None) -> float:
        """Exchange one untimed window, then `windows` windows. Return the seconds per message."""
        if not to and source is None:
            return 0.0
        exchange = partial(self._exchange_window, window, to, source)
        exchange()
        return time_total(exchange, windows, self._device) / windows / window

    def _exchange_window(self, window: int, to: Sequence[int], source: int | None) -> None:
        messages: list[tuple[Any, Tensor, int]] = [(dist.isend, self._sent, peer) for peer in to]
        if source is not None:
            messages.append((dist.irecv, self._received, source))
        # All messages of a window have the same content, so they can share one receive buffer.
        _exchange(messages * window, self._group)


def _exchange(messages: Sequence[tuple[Any, Tensor, int]], group: dist.ProcessGroup) -> None:
    """Post all messages (isend or irecv, tensor, peer), then wait for all. Skip empty tensors."""
    messages = [message for message in messages if message[1].numel()]
    if messages and messages[0][1].is_cuda:
        # Post one batch. A separate NCCL send waits for the peer's receive, so a ring of separate
        # sends would deadlock.
        batch = [dist.P2POp(post, tensor, peer, group=group) for post, tensor, peer in messages]
        works: list[dist.Work | None] = [*dist.batch_isend_irecv(batch)]
    else:
        works = [post(tensor, peer, group=group) for post, tensor, peer in messages]
    for work in works:
        if work is not None:
            work.wait()


def data_pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """Return the bytes that a rank sends. No byte is 0, and the bytes differ between ranks."""
    generator = torch.Generator().manual_seed(1 + rank)
    tile = torch.randint(1, 256, (_PERIOD,), generator=generator, dtype=torch.uint8)
    return tile.to(device).repeat(-(-size // _PERIOD))[:size]


# ---- All-reduce from point-to-point messages ----


def point_to_point_all_reduce(
    backend: str, algorithm: str, group: dist.ProcessGroup, buffers: Buffers
) -> Backend:
    """Return a backend with an in-place ring or tree all_reduce from point-to-point messages.

    It is a baseline for the native all_reduce of `backend`. With n ranks, S bytes, α seconds per
    message and β seconds per byte, an all_reduce takes this many seconds:

        ring: 2 (n - 1) steps of S / n bytes: 2 (n - 1) α + 2 (n - 1) / n · S β
        tree: 2 ⌈log2 n⌉ steps of S bytes:    2 ⌈log2 n⌉ (α + S β)

    The tree is faster for small tensors on many ranks, and the ring is faster for large tensors. On
    two ranks, each step of the ring sends half of the tensor in both directions at the same time.
    The tree sends the whole tensor to rank 0, and then back.
    """
    function = {"ring": ring_all_reduce, "tree": tree_all_reduce}[algorithm]

    def prepare(case: CollectiveCase) -> PreparedCase:
        tensor = buffers.take("received", case.count, case.dtype)
        scratch = buffers.take("scratch", case.count, case.dtype)
        return PreparedCase(tensor, tensor, partial(function, tensor, scratch, group))

    about = f"baseline: {algorithm} all_reduce from point-to-point messages"
    return Backend(f"{backend} {algorithm}", about, prepare)


def ring_all_reduce(tensor: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over all ranks in place, with a reduce-scatter and an all-gather of shards."""
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
        # Odd multiples of `distance` send to the rank that is lower by `distance`.
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


# ---- Copies between host and GPU, inside a GPU, and between the GPUs of one process ----

# Number of copies between the two CUDA events of a sample, as in nvbandwidth. The host launches
# copies while the GPU runs earlier copies, so the launch time is hidden.
_COPIES = 16


@dataclass
class Copy:
    """One kind of copy between two tensors of the same size.

    `speeds` counts each copied byte once. A copy inside a GPU reads and writes each byte, so the
    used memory bandwidth is twice the value in `speeds`.
    """

    kind: str
    source: Tensor
    target: Tensor
    speeds: list[float] = field(default_factory=list)  # in GB/s, one speed per pass
    wrong: int = 0

    @property
    def device(self) -> torch.device:
        """The GPU whose stream runs the copy."""
        return (self.target if self.target.is_cuda else self.source).device

    def time(self, keep_sample: bool = True) -> None:
        """Measure the speed of the copy and check its result."""
        self.target.zero_()  # data of an earlier copy must not pass the check
        copy = partial(self.target.copy_, self.source, non_blocking=True)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            seconds = time_total(copy, _COPIES, self.device) / _COPIES
        self.wrong += int((self.target.to(self.device) != self.source.to(self.device)).sum())
        if keep_sample:
            self.speeds.append(self.source.numel() / seconds / 1e9)


def host_copies(device: torch.device, size: int) -> list[Copy]:
    """Return the copies between host memory and the device, and inside the device."""
    pageable = data_pattern(0, size, torch.device("cpu"))
    on_device = data_pattern(1, size, device)
    pinned = pageable.clone().pin_memory()
    to_pinned, to_pageable = torch.zeros_like(pageable).pin_memory(), torch.zeros_like(pageable)
    to_device = torch.zeros_like(on_device)
    return [
        Copy("host to device, pinned", pinned, to_device),
        Copy("host to device, pageable", pageable, to_device),
        Copy("device to host, pinned", on_device, to_pinned),
        Copy("device to host, pageable", on_device, to_pageable),
        Copy("inside the device", on_device, to_device),
    ]


def peer_copies(size: int) -> list[Copy]:
    """Return the copies from every GPU that this process sees to every other GPU."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    sources = {device: data_pattern(device.index, size, device) for device in devices}
    targets = {device: torch.zeros_like(sources[device]) for device in devices}
    copies = []
    for a, b in permutations(devices, 2):
        way = "peer" if torch.cuda.can_device_access_peer(a, b) else "by way of the host"
        copies.append(Copy(f"{a} to {b}, {way}", sources[a], targets[b]))
    return copies


def run_copies(copies: Sequence[Copy], stop: Callable[[], bool]) -> bool:
    """Time every copy once per pass. Return False if `stop()` returned True."""
    for copy in copies:
        copy.time(keep_sample=False)  # the first call also maps the pages of the tensors
    for _ in range(PASSES):
        for copy in copies:
            if stop():
                return False
            copy.time()
    return True


def copy_row(copy: Copy, rank: int) -> dict[str, Any]:
    """Return the row of a copy for tables and JSON."""
    name, size = torch.cuda.get_device_name(copy.device), copy.source.numel()
    expected_gbs, expected_source = _published_copy(name, copy.kind, size)
    verdict = fraction_verdict(max(copy.speeds), expected_gbs) if expected_gbs else "unknown"
    return {
        "rank": rank,
        "device": str(copy.device),
        "name": name,
        "kind": copy.kind,
        "bytes": size,
        "gbs": round(median(copy.speeds), 3),
        "spread": round(relative_mad(copy.speeds), 4),
        "wrong": copy.wrong,
        "verdict": verdict,
        "expected_gbs": expected_gbs,
        "expected_source": expected_source,
    }


def _published_copy(name: str, kind: str, size: int) -> tuple[float | None, str | None]:
    """Return (GB/s, source) from the catalogue, or (None, None).

    The catalogue has figures for copies to and from pinned memory only.
    """
    direction, _, memory = kind.partition(", ")
    if memory == "pinned":
        if (published := figure(name, direction, size)) is not None:
            return published.gbs, published.source
        known = accelerator(name)
        host_link = link(known.host_link) if known is not None else None
        if host_link is not None and host_link.achieved_gbs is not None and size >= 64 << 20:
            return host_link.achieved_gbs, f"{host_link.name}: {host_link.source}"
    return None, None
