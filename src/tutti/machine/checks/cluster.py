"""Cluster: the input of all checks, which is the hosts, their ranks and the results of probes."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.gpus import Accelerator
from tutti.machine.recording import Machine

Value = TypeVar("Value")

KNOWN_ERRORS = tomllib.loads(Path(__file__).with_name("known_errors.toml").read_text())


class Skip(Exception):
    """Raised by a check that cannot be decided on this machine. The message states the reason."""


@dataclass(frozen=True)
class RankObservation:
    """A rank, and its host as observed by the process of the rank.

    Environment variables and limits may differ between the processes of one host.
    """

    rank: int
    host: int
    """Index of the rank's host in Cluster.machines."""
    machine: Machine
    gpu: str | None = None
    """The UUID of the GPU that the rank would use in training; None if the rank uses no GPU."""


@dataclass(frozen=True)
class Connection:
    """An attempt to connect from host `src` to a port of host `dst`.

    The kernel of host `dst` assigns the port.
    """

    src: int
    dst: int
    error: str | None
    """The error, or None if the expected process answered."""


@dataclass(frozen=True)
class ClockOffset:
    """The number of seconds by which the clock of a host is ahead of the clock of host 0.

    The error of `seconds` is at most half of `round_trip`. Both values are in seconds.
    """

    host: int
    seconds: float
    round_trip: float


@dataclass(frozen=True)
class MeasuredRate:
    """The best speed of several attempts. Other load on the machine can only reduce a speed."""

    name: str
    """What was measured: "rank:0", "gpu:3", or "0-1" for the link from rank 0 to rank 1."""
    host: int
    kind: str
    """Only rates of the same kind are compared."""
    value: float
    reproducible: bool = True
    """Whether every attempt computed the same bits."""
    error: str = ""
    """The reason why the rate could not be measured; "" if it was measured."""


@dataclass(frozen=True)
class GpuCopy:
    """The result of a copy of a data pattern from GPU `src` to GPU `dst`."""

    src: int
    dst: int
    status: Literal["ok", "corrupt", "hung", "error"]
    gbs: float | None = None
    message: str = ""


STOPPED = "stopped because another rank failed"


@dataclass(frozen=True)
class NcclRank:
    """The result of the NCCL probe on one rank."""

    rank: int
    host: int
    stage: str
    """The last stage that the rank began: "process", "init", "all_reduce", "all_to_all", "destroy"
    or "done"."""
    error: str = ""
    """The reason why the rank did not finish; STOPPED if another rank failed; "" if it finished."""
    init_s: float | None = None
    log: Sequence[str] = ()
    """The warnings and connections in NCCL's log, as returned by nccl_topology.select_lines()."""
    topology: str = ""
    """The content of NCCL_TOPO_DUMP_FILE. Only the first rank of a host writes the file."""
    graphs: str = ""
    """The content of NCCL_GRAPH_DUMP_FILE. Only the first rank of a host writes the file."""


@dataclass(frozen=True)
class ProbeResults:
    """The results of all probes.

    A field is None if its probe did not run. `skipped` may contain the reason, with the name of the
    field as key.
    """

    connections: tuple[Connection, ...] | None = None
    clock_offsets: tuple[ClockOffset, ...] | None = None
    compute: tuple[MeasuredRate, ...] | None = None
    """Rates in FLOP/s."""
    bandwidth: tuple[MeasuredRate, ...] | None = None
    """Rates in bytes read plus bytes written per second."""
    links: tuple[MeasuredRate, ...] | None = None
    """Rates in bytes per second in one direction."""
    copies: tuple[tuple[GpuCopy, ...] | None, ...] | None = None
    """The copies between the GPUs of each host; None for a host with fewer than two GPUs."""
    all_reduce: tuple[str, ...] | None = None
    """The error of an all_reduce on each rank; "" if the result was exact."""
    nccl: tuple[NcclRank, ...] | None = None
    """The results of the NCCL probe on all ranks."""
    skipped: dict[str, str] = field(default_factory=dict)

    def require(self, name: str, result: Value | None) -> Value:
        """Return `result`, the result of the probe `name`. Raises Skip if the probe did not run."""
        if result is None:
            between_hosts = name in ("connections", "clock_offsets")
            default = "needs a world on several hosts" if between_hosts else "only with --active"
            raise Skip(self.skipped.get(name, default))
        return result


PROBES = tuple(name for name in ProbeResults.__dataclass_fields__ if name != "skipped")


@dataclass(frozen=True)
class Cluster:
    """The input of all checks."""

    machines: tuple[Machine, ...]
    """The machines, one per host."""
    ranks: tuple[RankObservation, ...] = ()
    """All ranks; () if no world was started."""
    probes: ProbeResults = field(default_factory=ProbeResults)

    def ranks_on(self, host: int) -> int:
        """Return the number of ranks on a host, or 0 if no world was started."""
        return sum(rank.host == host for rank in self.ranks)

    def cpus_on(self, host: int) -> int:
        """Return the number of CPUs that the ranks of a host may use together.

        The affinity masks of the ranks may differ. For example, mpirun can bind each rank to
        different CPUs.
        """
        machines = [rank.machine for rank in self.ranks if rank.host == host]
        masks = [machine.cpus.allowed for machine in machines or [self.machines[host]]]
        return len({cpu for mask in masks for cpu in parse_cpu_list(mask)})

    @property
    def on_one_host(self) -> bool:
        """Whether a world was started and all its ranks are on one host."""
        return bool(self.ranks) and len(self.machines) == 1


def require_known(machine: Machine, path: str, value: Value | None) -> Value:
    """Return `value`. If `value` is None (unknown), raise Skip with the recorded reason."""
    if value is None:
        raise Skip(machine.reason_unknown(path) or f"{path} is unknown")
    return value


def require_gpus(machine: Machine) -> tuple[Accelerator, ...]:
    """Return the GPUs of a machine. Raises Skip if there are none."""
    if not machine.accelerators:
        on_bus = any(device.kind == "gpu" for device in machine.pci)
        raise Skip("the driver reports no GPU" if on_bus else "no GPU")
    return machine.accelerators


def read_gpus(machine: Machine, path: str) -> list[tuple[Accelerator, Any]]:
    """Return (GPU, value of the attribute `path`) for each GPU with a known value.

    Raises Skip if the value is unknown for all GPUs.
    """
    read = attrgetter(path)
    found = [(gpu, read(gpu)) for gpu in require_gpus(machine) if read(gpu) is not None]
    if not found:
        reason = machine.reason_unknown(f"accelerators[0].{path}")
        raise Skip(reason or f"the driver does not report {path}")
    return found


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for "2.13.0+cu130", () for "unknown"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
