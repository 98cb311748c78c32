"""The patient: the hosts to judge, the ranks on them, and what live probes found out."""

from dataclasses import dataclass, field
from typing import Literal

from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.observation import Machine


@dataclass(frozen=True)
class Seat:
    """A rank, and the machine as that rank sees it: variables and limits are each process' own."""

    rank: int
    host: int
    """Which of the patient's machines it is on."""
    machine: Machine
    gpu: str | None = None
    """The id of the GPU it would use."""


@dataclass(frozen=True)
class Call:
    """One host called another on a port like those that gloo and NCCL choose."""

    src: int
    dst: int
    error: str | None
    """None: the right process answered."""


@dataclass(frozen=True)
class Offset:
    """How far a host's clock is ahead of the first host's, in seconds; sure to ± round_trip / 2."""

    host: int
    seconds: float
    round_trip: float


@dataclass(frozen=True)
class Rate:
    """A speed that was measured: the best of several attempts, for noise only ever slows down."""

    name: str
    """rank:0, gpu:3, or 0-1 for what rank 0 sent to rank 1."""
    host: int
    kind: str
    """Only rates of one kind are compared."""
    value: float
    ok: bool = True
    """Whether the work gave the same result every time."""
    error: str = ""
    """Why it could not be measured."""


@dataclass(frozen=True)
class Copy:
    """A pattern copied from one GPU to another, and compared there."""

    src: int
    dst: int
    status: Literal["ok", "corrupt", "hung", "error"]
    gbs: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Probes:
    """What live probes found. None: not probed, and `reasons` says why."""

    calls: tuple[Call, ...] | None = None
    offsets: tuple[Offset, ...] | None = None
    compute: tuple[Rate, ...] | None = None
    """FLOP/s."""
    bandwidth: tuple[Rate, ...] | None = None
    """Bytes per second, read and written."""
    links: tuple[Rate, ...] | None = None
    """Bytes per second, one way."""
    copies: tuple[tuple[Copy, ...] | None, ...] | None = None
    """For each host; None for a host without two GPUs."""
    results: tuple[str, ...] | None = None
    """For each rank, what was wrong with a collective's result; "" for nothing."""
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Patient:
    """Everything that checks look at."""

    machines: tuple[Machine, ...]
    """One per host."""
    seats: tuple[Seat, ...] = ()
    """The ranks of a live world; () where machines alone are judged."""
    probes: Probes = field(default_factory=Probes)

    def ranks_on(self, host: int) -> int:
        """How many ranks run on a host; 0 where no world was started."""
        return sum(seat.host == host for seat in self.seats)

    def cpus_on(self, host: int) -> int:
        """How many CPUs the ranks on a host may use together: mpirun gives each its own."""
        seen = [seat.machine for seat in self.seats if seat.host == host] or [self.machines[host]]
        return len({cpu for each in seen for cpu in parse_cpu_list(each.cpus.allowed)})

    @property
    def alone(self) -> bool:
        """Whether a world was started and is all on one host: nothing need be reached beyond."""
        return bool(self.seats) and len(self.machines) == 1
