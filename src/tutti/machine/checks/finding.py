"""Check and Finding: what a check looks at, and what it reports about one GPU, link, NIC or rank.

A check is a generator of findings. No finding means that no problem was found, `raise Skip(reason)`
that the check cannot decide here. An unknown value is a reason to skip, never a fault.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from tutti.machine.checks.cluster import Cluster
from tutti.machine.gpus import Accelerator
from tutti.machine.observation import Machine


class Skip(Exception):
    """A check cannot decide on this machine; the message is the reason."""


@dataclass(frozen=True)
class Finding:
    """What a check reports about one thing. Check.findings() sets `id`, and `host` and `cure` if
    they are empty.
    """

    status: Literal["pass", "warn", "fail", "skip"]
    scope: str
    """machine, gpu:3, link:0-1, nic:eth0, rank:1, pair:0-1 or world."""
    observed: str
    expected: str = ""
    cure: str = ""
    commands: tuple[str, ...] = ()
    """Printed by --fix, never run."""
    host: str = ""
    """Empty if the finding is about all hosts."""
    id: str = ""

    def to_json(self) -> dict[str, Any]:
        """The keys of `checks[]`."""
        names = ("id", "host", "scope", "status", "observed", "expected", "cure")
        values = {name: getattr(self, name) for name in names}
        return {**values, "commands": list(self.commands)}


Findings = Iterator[Finding]


def passed(observed: str, scope: str = "machine") -> Finding:
    """No problem; `observed` is what was seen."""
    return Finding("pass", scope, observed)


def warn(
    scope: str, observed: str, expected: str, *commands: str, cure: str = "", host: str = ""
) -> Finding:
    """It works, but is slower or less robust than it should be."""
    return Finding("warn", scope, observed, expected, cure, commands, host)


def fail(
    scope: str, observed: str, expected: str, *commands: str, cure: str = "", host: str = ""
) -> Finding:
    """It does not work, or is much slower than the hardware."""
    return Finding("fail", scope, observed, expected, cure, commands, host)


# --- checks --------------------------------------------------------------------------------------

Judge = Callable[[Cluster, int], Iterable[Finding]]


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

    def findings(self, cluster: Cluster) -> Findings:
        """Run the check. An exception in a check is reported as skipped; other checks still run."""
        scope = "machine" if self.per_host else "world"
        hosts = [machine.host for machine in cluster.machines] if self.per_host else [""]
        for index, host in enumerate(hosts):
            try:
                found = list(self.judge(cluster, index))
            except Skip as reason:
                found = [Finding("skip", scope, str(reason))]
            except Exception as error:
                reason_text = f"the check itself failed: {type(error).__name__}: {error}"
                found = [Finding("skip", scope, reason_text)]
            for each in found or [passed("no problem found", scope)]:
                cure = each.cure or (self.cure if each.status in ("warn", "fail") else "")
                yield replace(each, id=self.id, host=each.host or host, cure=cure)


def machine_check(
    id: str, about: str, why: str, cure: str
) -> Callable[[Callable[[Machine], Iterable[Finding]]], Check]:
    """Decorator: a check that looks at one machine."""
    return lambda judge: Check(id, about, why, cure, lambda c, host: judge(c.machines[host]))


def host_check(id: str, about: str, why: str, cure: str) -> Callable[[Judge], Check]:
    """Decorator: a check that looks at one host and at the ranks on it."""
    return lambda judge: Check(id, about, why, cure, judge)


def cluster_check(
    id: str, about: str, why: str, cure: str
) -> Callable[[Callable[[Cluster], Iterable[Finding]]], Check]:
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
