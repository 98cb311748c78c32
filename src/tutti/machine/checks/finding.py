"""Check and Finding: what a check looks at, and what it reports about one GPU, link, NIC or rank.

A check is a generator of verdicts. No verdict means that no problem was found, `raise Skip(reason)`
that the check cannot decide here. An unknown value is a reason to skip, never a fault.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tutti.machine.checks.cluster import Cluster
from tutti.machine.gpus import Accelerator
from tutti.machine.observation import Machine

Status = Literal["pass", "warn", "fail", "skip"]


class Skip(Exception):
    """A check cannot decide on this machine; the message is the reason."""


@dataclass(frozen=True)
class Verdict:
    """What a check says about one thing."""

    status: Status
    scope: str
    """machine, gpu:3, link:0-1, nic:eth0, rank:1, pair:0-1 or world."""
    observed: str
    expected: str = ""
    cure: str = ""
    """Empty: the cure of the check."""
    commands: tuple[str, ...] = ()
    """Printed by --fix, never run."""
    host: str = ""
    """Set by checks of a whole cluster if one host is at fault."""


Verdicts = Iterator[Verdict]


def passed(observed: str, scope: str = "machine") -> Verdict:
    """No problem; `observed` is what was seen."""
    return Verdict("pass", scope, observed)


def warn(
    scope: str, observed: str, expected: str, *commands: str, cure: str = "", host: str = ""
) -> Verdict:
    """It works, but is slower or less robust than it should be."""
    return Verdict("warn", scope, observed, expected, cure, commands, host)


def fail(
    scope: str, observed: str, expected: str, *commands: str, cure: str = "", host: str = ""
) -> Verdict:
    """It does not work, or is much slower than the hardware."""
    return Verdict("fail", scope, observed, expected, cure, commands, host)


@dataclass(frozen=True)
class Finding:
    """A verdict with the id of its check and its host."""

    id: str
    host: str
    """Empty if the finding is about all hosts."""
    scope: str
    status: Status
    observed: str
    expected: str
    cure: str
    commands: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The keys of `checks[]`."""
        return {**vars(self), "commands": list(self.commands)}


# --- checks --------------------------------------------------------------------------------------

Judge = Callable[[Cluster, int], Iterable[Verdict]]


@dataclass(frozen=True)
class Check:
    """One check. `about`, `why` and `cure` are its row in the documentation."""

    id: str
    about: str
    why: str
    cure: str
    judge: Judge
    per_host: bool = True
    """Whether it looks at each host alone, or at all hosts at once."""

    def findings(self, cluster: Cluster) -> Iterator[Finding]:
        """Run the check. An exception in a check is reported as skipped; other checks still run."""
        scope = "machine" if self.per_host else "world"
        for host in range(len(cluster.machines)) if self.per_host else (0,):
            try:
                verdicts = list(self.judge(cluster, host))
            except Skip as reason:
                verdicts = [Verdict("skip", scope, str(reason))]
            except Exception as error:
                reason_text = f"the check itself failed: {type(error).__name__}: {error}"
                verdicts = [Verdict("skip", scope, reason_text)]
            for verdict in verdicts or [Verdict("pass", scope, "no problem found")]:
                needs_cure = verdict.status in ("warn", "fail")
                yield Finding(
                    id=self.id,
                    host=verdict.host or (cluster.machines[host].host if self.per_host else ""),
                    scope=verdict.scope,
                    status=verdict.status,
                    observed=verdict.observed,
                    expected=verdict.expected,
                    cure=verdict.cure or (self.cure if needs_cure else ""),
                    commands=verdict.commands,
                )


def machine_check(
    id: str, about: str, why: str, cure: str
) -> Callable[[Callable[[Machine], Iterable[Verdict]]], Check]:
    """Decorator: a check that looks at one machine."""
    return lambda judge: Check(id, about, why, cure, lambda c, host: judge(c.machines[host]))


def host_check(id: str, about: str, why: str, cure: str) -> Callable[[Judge], Check]:
    """Decorator: a check that looks at one host and at the ranks on it."""
    return lambda judge: Check(id, about, why, cure, judge)


def cluster_check(
    id: str, about: str, why: str, cure: str
) -> Callable[[Callable[[Cluster], Iterable[Verdict]]], Check]:
    """Decorator: a check that compares hosts and ranks."""
    return lambda judge: Check(id, about, why, cure, lambda c, host: judge(c), per_host=False)


# --- reading a machine ---------------------------------------------------------------------------

Value = TypeVar("Value")


def known(machine: Machine, path: str, value: Value | None) -> Value:
    """The value; skips with the recorded reason if it is unknown."""
    if value is None:
        raise Skip(machine.why(path) or f"{path} is unknown")
    return value


def gpus_of(machine: Machine) -> tuple[Accelerator, ...]:
    """The GPUs; skips if there are none."""
    if not machine.accelerators:
        on_bus = any(each.kind == "gpu" for each in machine.pci)
        raise Skip("the driver reports no GPU" if on_bus else "no GPU")
    return machine.accelerators


def read_gpus(
    machine: Machine, path: str, read: Callable[[Accelerator], Value | None]
) -> list[tuple[Accelerator, Value]]:
    """A value of each GPU that has it; skips if no GPU has it."""
    gpus = gpus_of(machine)
    found = [(gpu, value) for gpu in gpus if (value := read(gpu)) is not None]
    if not found:
        raise Skip(machine.why(f"accelerators[0].{path}") or f"the driver does not report {path}")
    return found


def has_rdma(machine: Machine) -> bool:
    """Whether any RDMA port is active."""
    return any(port.state == "ACTIVE" for port in machine.rdma)


def is_virtual(machine: Machine) -> bool:
    """Whether the machine is known to be a virtual machine."""
    return machine.virtualisation not in (None, "none")


def parse_version(text: str) -> tuple[int, ...]:
    """2.13.0+cu130 → (2, 13, 0)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = "".join(c for c in part if c.isdecimal())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
