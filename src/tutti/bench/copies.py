"""Copies between a host and its GPU, inside a GPU, and from one GPU to another of one process.

Timed with events on the stream: 16 copies between two events, a sample for each pass, all kinds in
turns. A copy inside a GPU reads and writes each byte: gbs counts the bytes copied, half of what the
memory moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tutti.bench.bandwidth_traffic import PASSES, pattern
from tutti.bench.verdict import part_verdict
from tutti.machine.hardware_catalogue import accelerator, figure, link
from tutti.measure.spread import relative_mad
from tutti.measure.timing import no_garbage_collection

_COPIES = 16  # between two events, as nvbandwidth: what the host needs to start them is hidden
HOST_KINDS = (
    *("host to device, pinned", "host to device, pageable"),
    *("device to host, pinned", "device to host, pageable", "inside the device"),
)


@dataclass
class Copy:
    """One way to copy; both tensors are of the same size."""

    kind: str
    source: Tensor
    target: Tensor
    speeds: list[float] = field(default_factory=list)  # GB/s, one for each pass
    wrong: int = 0

    @property
    def device(self) -> torch.device:
        """The GPU whose stream carries the copy."""
        return (self.target if self.target.is_cuda else self.source).device

    def time(self, samples: bool = True) -> None:
        """One more sample, and a check of what arrived; without, to touch pages and meet peers."""
        self.target.zero_()  # nothing is right by chance
        with torch.cuda.device(self.device), no_garbage_collection():
            torch.cuda.synchronize()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            for _ in range(_COPIES):
                self.target.copy_(self.source, non_blocking=True)
            after.record()
            after.synchronize()
        self.wrong += int((self.target.to(self.device) != self.source.to(self.device)).sum())
        if samples:
            seconds = float(before.elapsed_time(after)) / 1e3 / _COPIES
            self.speeds.append(self.source.numel() / seconds / 1e9)


def host_copies(device: torch.device, size: int) -> list[Copy]:
    """Between this host's memory and the device, and inside the device."""
    here = pattern(0, size, torch.device("cpu"))
    there = pattern(1, size, device)
    pinned = here.clone().pin_memory()
    into_pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
    into_pageable = torch.zeros(size, dtype=torch.uint8)
    on_device = torch.zeros_like(there)
    ways = (
        (pinned, on_device), (here, on_device), (there, into_pinned), (there, into_pageable),
        (there, on_device),
    )  # fmt: skip
    return [Copy(kind, *way) for kind, way in zip(HOST_KINDS, ways, strict=True)]


def peer_copies(size: int) -> list[Copy]:
    """From every GPU that this process sees to every other; none where it sees one."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    tensors = {device: pattern(device.index, size, device) for device in devices}
    targets = {device: torch.zeros_like(tensors[device]) for device in devices}
    return [
        Copy(f"{a} to {b}, {_way(a, b)}", tensors[a], targets[b])
        for a in devices
        for b in devices
        if a != b
    ]


def run_copies(copies: Sequence[Copy], stop: Callable[[], bool]) -> bool:
    """Take turns, pass by pass; False when asked to stop."""
    for copy in copies:
        copy.time(samples=False)
    for _ in range(PASSES):
        for copy in copies:
            if stop():
                return False
            copy.time()
    return True


def copy_row(copy: Copy, rank: int) -> dict[str, Any]:
    """For tables and JSON, with a verdict where the catalogue knows the device."""
    name, size = torch.cuda.get_device_name(copy.device), copy.source.numel()
    expected = expected_copy(name, copy.kind, size)
    return {
        "rank": rank,
        "device": str(copy.device),
        "name": name,
        "kind": copy.kind,
        "bytes": size,
        "gbs": round(median(copy.speeds), 3),
        "spread": round(relative_mad(copy.speeds), 4),
        "wrong": copy.wrong,
        "verdict": "unknown" if expected is None else part_verdict(max(copy.speeds), expected[0]),
        "expected_gbs": None if expected is None else expected[0],
        "expected_source": None if expected is None else expected[1],
    }


def expected_copy(name: str, kind: str, size: int) -> tuple[float, str] | None:
    """GB/s that the catalogue has for a copy between pinned memory and the device; else None."""
    way, _, memory = kind.partition(", ")
    if memory != "pinned":
        return None
    published = figure(name, way, size)
    if published is not None:
        return published.gbs, published.source
    known = accelerator(name)
    host_link = link(known.host_link) if known is not None else None
    if host_link is None or host_link.achieved_gbs is None or size < 64 << 20:
        return None
    return host_link.achieved_gbs, f"{host_link.name}: {host_link.source}"


def _way(a: torch.device, b: torch.device) -> str:
    return "peer" if torch.cuda.can_device_access_peer(a, b) else "by way of the host"
