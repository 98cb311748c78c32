"""Copies between host and GPU, inside a GPU, and between the GPUs of one process.

One sample is the mean of 16 copies between two CUDA events. Every pass takes one sample of each
kind of copy. A copy inside a GPU reads and writes each byte, but `gbs` counts each copied byte
once, so `gbs` is half of the memory traffic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tutti.bench.bandwidth.link_verdicts import fraction_verdict
from tutti.bench.bandwidth.point_to_point import PASSES, data_pattern
from tutti.machine.hardware_catalogue import accelerator, figure, link
from tutti.measure.spread import relative_mad
from tutti.measure.timing import time_total

# Copies between two events, the same number as in nvbandwidth. With several copies in the queue,
# the time that the host needs to launch a copy is hidden.
_COPIES = 16


@dataclass
class Copy:
    """One kind of copy between two tensors of the same size."""

    kind: str
    source: Tensor
    target: Tensor
    speeds: list[float] = field(default_factory=list)  # GB/s, one per pass
    wrong: int = 0

    @property
    def device(self) -> torch.device:
        """The GPU whose stream runs the copy."""
        return (self.target if self.target.is_cuda else self.source).device

    def time(self, keep_sample: bool = True) -> None:
        """Time the copy and check its result.

        The first call passes `keep_sample=False`, because it also maps the pages of the tensors.
        """
        self.target.zero_()  # stale data must not pass the check
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
    """Return the copies from every GPU visible to this process to every other visible GPU."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    sources = {device: data_pattern(device.index, size, device) for device in devices}
    targets = {device: torch.zeros_like(sources[device]) for device in devices}
    copies = []
    for a, b in permutations(devices, 2):
        way = "peer" if torch.cuda.can_device_access_peer(a, b) else "by way of the host"
        copies.append(Copy(f"{a} to {b}, {way}", sources[a], targets[b]))
    return copies


def run_copies(copies: Sequence[Copy], stop: Callable[[], bool]) -> bool:
    """Time all copies in interleaved passes. Returns False if `stop()` became true."""
    for copy in copies:
        copy.time(keep_sample=False)
    for _ in range(PASSES):
        for copy in copies:
            if stop():
                return False
            copy.time()
    return True


def copy_row(copy: Copy, rank: int) -> dict[str, Any]:
    """Return the row of a copy for tables and JSON.

    The verdict is "unknown" if the catalogue has no figure for this copy.
    """
    name, size = torch.cuda.get_device_name(copy.device), copy.source.numel()
    expected_gbs, expected_source = expected_copy(name, copy.kind, size) or (None, None)
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


def expected_copy(name: str, kind: str, size: int) -> tuple[float, str] | None:
    """Return (GB/s, source) from the catalogue, or None if the catalogue has no figure.

    The catalogue has figures for copies to and from pinned memory only.
    """
    direction, _, memory = kind.partition(", ")
    if memory != "pinned":
        return None
    published = figure(name, direction, size)
    if published is not None:
        return published.gbs, published.source
    known = accelerator(name)
    host_link = link(known.host_link) if known is not None else None
    if host_link is None or host_link.achieved_gbs is None or size < 64 << 20:
        return None
    return host_link.achieved_gbs, f"{host_link.name}: {host_link.source}"
