"""Check and Finding: a check examines hosts and reports findings about GPUs, links, NICs or ranks.

A check is a generator of findings. A check without findings has found no problem. A check that
cannot be decided on this machine raises `Skip(reason)`. If a value is unknown, the check is skipped
and does not report a fault.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tutti.machine.checks.cluster import Cluster, Skip
from tutti.machine.observation import Machine


@dataclass(frozen=True)
class Finding:
    """The report of a check about one GPU, link, NIC, rank, host or the whole world.

    Check.findings() sets `id`. It also sets `host` and `cure` if they are empty.
    """

    status: Literal["pass", "warn", "fail", "skip"]
    scope: str
    """machine, gpu:3, link:0-1, nic:eth0, rank:1, pair:0-1 or world."""
    observed: str
    expected: str = ""
    cure: str = ""
    commands: tuple[str, ...] = ()
    """Shell commands that --fix prints. They are never run."""
    host: str = ""
    """Empty if the finding is about all hosts."""
    id: str = ""

    def to_json(self) -> dict[str, Any]:
        """One row of `checks[]` in the JSON result."""
        return {"id": self.id, "host": self.host, **asdict(self), "commands": list(self.commands)}


Findings = Iterator[Finding]


def passed(observed: str, scope: str = "machine") -> Finding:
    """A finding without a problem; `observed` describes the state."""
    return Finding("pass", scope, observed)


def warn(
    scope: str, observed: str, expected: str, *commands: str, cure: str = "", host: str = ""
) -> Finding:
    """A finding about something that works, but is slower or less robust than it should be."""
    return Finding("warn", scope, observed, expected, cure, commands, host)


def fail(
    scope: str, observed: str, expected: str, *commands: str, cure: str = "", host: str = ""
) -> Finding:
    """A finding about something that does not work or is much slower than the hardware allows."""
    return Finding("fail", scope, observed, expected, cure, commands, host)


# --- checks --------------------------------------------------------------------------------------

Judge = Callable[[Cluster, int], Iterable[Finding]]

_DESCRIPTIONS = tomllib.loads(Path(__file__).with_name("check_descriptions.toml").read_text())


@dataclass(frozen=True)
class Check:
    """One check. `about`, `why` and `cure` are its description in the documentation."""

    id: str
    about: str
    why: str
    cure: str
    judge: Judge
    per_host: bool = True
    """Whether the check examines each host separately (True) or all hosts together (False)."""

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


def host_check(id: str, per_host: bool = True) -> Callable[[Judge], Check]:
    """Decorator for a check that examines one host and the ranks on it."""
    group, _, name = id.partition(".")
    return lambda judge: Check(id, **_DESCRIPTIONS[group][name], judge=judge, per_host=per_host)


def machine_check(id: str) -> Callable[[Callable[[Machine], Iterable[Finding]]], Check]:
    """Decorator for a check that examines one machine."""
    return lambda judge: host_check(id)(lambda cluster, host: judge(cluster.machines[host]))


def cluster_check(id: str) -> Callable[[Callable[[Cluster], Iterable[Finding]]], Check]:
    """Decorator for a check that compares hosts and ranks."""
    return lambda judge: host_check(id, per_host=False)(lambda cluster, host: judge(cluster))
