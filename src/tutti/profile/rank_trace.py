"""The trace of one rank, as what an explanation needs of it: intervals, steps, communications."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.profile.collective import Collective
from tutti.profile.intervals import Times


@dataclass
class Step:
    """A step of training: what the profiler calls ProfilerStep#N."""

    number: int
    start: float
    end: float
    gradients: tuple[float, float] | None = None  # the first one, and the end of backward

    def shift(self, seconds: float) -> None:
        self.start, self.end = self.start + seconds, self.end + seconds
        if self.gradients is not None:
            self.gradients = self.gradients[0] + seconds, self.gradients[1] + seconds


@dataclass
class RankTrace:
    """What one rank's trace says; seconds since `base_ns`, a Unix time."""

    path: Path
    rank: int
    world_size: int
    backend: str
    host: str
    base_ns: int
    on_device: bool
    steps: list[Step]
    compute: Times
    communication: Times
    input: Times
    other: Times  # covered by something that is none of these
    collectives: list[Collective]
    groups: dict[str, dict[str, Any]]
    memory_bytes: int | None  # the most that was allocated on the device
    host_memory_bytes: int | None  # the most that the process had
    device_bytes: int | None  # what its device has
    has_loader_workers: bool
    work: float  # a measure of what was computed, to compare ranks by; 0 if unknown
    about: dict[str, Any]  # what was captured beside the events
    notes: list[str] = field(default_factory=list)

    def shift(self, seconds: float) -> None:
        """Move everything to another clock."""
        for name in ("compute", "communication", "input", "other"):
            setattr(self, name, getattr(self, name).shifted(seconds))
        for step in self.steps:
            step.shift(seconds)
        for each in self.collectives:
            each.arrival += seconds
            each.start += seconds
            each.end += seconds
            each.returned += seconds
            if each.ready is not None:
                each.ready += seconds
