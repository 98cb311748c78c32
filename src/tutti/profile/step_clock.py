"""How long steps take: the host's clock, or events of the device, which nobody waits for.

Like capture.py, this file imports torch and the standard library alone.
"""

import time

import torch


class StepClock:
    """Seconds between `begin` and `end`, pair by pair, known at the end of all."""

    def __init__(self) -> None:
        self._on_host: list[tuple[float, float]] = []
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began: float | torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def begin(self, device: torch.device | None) -> None:
        """A step begins, on a GPU or, without one, on the host."""
        self._device = device
        self._began = time.perf_counter() if device is None else _event(device)

    def end(self) -> None:
        """It ends; nothing is counted if none began."""
        if isinstance(self._began, float):
            self._on_host.append((self._began, time.perf_counter()))
        elif self._began is not None and self._device is not None:
            self._on_device.append((self._began, _event(self._device)))
        self._began = None

    def seconds(self) -> list[float]:
        """All of them, in order. Waits for the device."""
        if self._on_device:
            self._on_device[-1][1].synchronize()
        on_device = [began.elapsed_time(ended) / 1e3 for began, ended in self._on_device]
        return on_device + [ended - began for began, ended in self._on_host]


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
