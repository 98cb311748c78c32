"""Check and Finding: a check examines hosts and yields findings. report() formats findings as text.

A check is a generator function. If it yields no finding, it has found no problem. If it cannot be
decided on this machine, for example because a value is unknown, it raises `Skip(reason)`.
"""

import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tutti.machine.checks.cluster import Cluster, Skip
from tutti.machine.recording import Machine

PROBLEMS = ("fail", "warn")
STATUS_ORDER = (*PROBLEMS, "pass", "skip")


@dataclass(frozen=True)
class Finding:
    """The result of a check for one GPU, link, NIC, rank or host, or for the whole world.

    Check.findings() sets `id`. If `host` is empty, it sets `host` to the checked host. If
    `expected`, `cure` or `commands` of a warning or failure is empty, it uses the value of the
    Check.
    """

    status: Literal["pass", "warn", "fail", "skip"]
    scope: str
    """One of "machine" and "world", or a part such as "gpu:3", "link:0-1", "nic:eth0", "rank:1" or
    "pair:0-1"."""
    observed: str
    expected: str = ""
    cure: str = ""
    commands: tuple[str, ...] = ()
    """Shell commands that --fix prints. tutti never runs them."""
    host: str = ""
    """The name of the host; "" if the finding is about all hosts."""
    id: str = ""


Findings = Iterator[Finding]


def passed(observed: str, scope: str = "machine") -> Finding:
    """Return a finding without a problem. It is ignored if the check also finds a problem."""
    return Finding("pass", scope, observed)


def _problem(
    status: Literal["warn", "fail"],
    scope: str,
    observed: str,
    expected: str = "",
    *commands: str,
    cure: str = "",
    host: str = "",
) -> Finding:
    return Finding(status, scope, observed, expected, cure, commands, host)


warn = partial(_problem, "warn")
"""A finding about a part that works, but is slower or less robust than it should be."""
fail = partial(_problem, "fail")
"""A finding about a part that does not work, or is much slower than the hardware allows."""


# --- checks --------------------------------------------------------------------------------------

CheckFunction = Callable[[Cluster, int], Iterable[Finding]]

_DESCRIPTIONS = tomllib.loads(Path(__file__).with_name("check_descriptions.toml").read_text())


@dataclass(frozen=True)
class Check:
    """One check and its entry in check_descriptions.toml."""

    id: str
    about: str
    why: str
    cure: str
    function: CheckFunction
    per_host: bool = True
    """Whether the check examines each host separately (True) or all hosts together (False)."""
    expected: str = ""
    commands: Sequence[str] = ()

    def findings(self, cluster: Cluster) -> Findings:
        """Run the check and yield its findings. If it raises an exception, the status is "skip"."""
        scope = "machine" if self.per_host else "world"
        hosts = [machine.host for machine in cluster.machines] if self.per_host else [""]
        for index, host in enumerate(hosts):
            try:
                found = list(self.function(cluster, index)) or [passed("no problem found", scope)]
            except Skip as reason:
                found = [Finding("skip", scope, str(reason))]
            except Exception as error:
                message = f"the check itself failed with {type(error).__name__}: {error}"
                found = [Finding("skip", scope, message)]
            problems = [finding for finding in found if finding.status in PROBLEMS]
            for finding in problems or found:
                changes: dict[str, Any] = {"id": self.id, "host": finding.host or host}
                if problems:
                    name = finding.scope.partition(":")[2]
                    commands = tuple(command.format(name=name) for command in self.commands)
                    changes["commands"] = finding.commands or commands
                    changes["expected"] = finding.expected or self.expected
                    changes["cure"] = finding.cure or self.cure
                yield replace(finding, **changes)


def host_check(id: str, per_host: bool = True) -> Callable[[CheckFunction], Check]:
    """Return a decorator for a check that examines one host and its ranks."""
    group, _, name = id.partition(".")
    description = _DESCRIPTIONS[group][name]
    return lambda function: Check(id, **description, function=function, per_host=per_host)


def machine_check(id: str) -> Callable[[Callable[[Machine], Iterable[Finding]]], Check]:
    """Return a decorator for a check that examines one machine."""
    return lambda function: host_check(id)(lambda cluster, host: function(cluster.machines[host]))


def cluster_check(id: str) -> Callable[[Callable[[Cluster], Iterable[Finding]]], Check]:
    """Return a decorator for a check that compares hosts and ranks."""
    return lambda function: host_check(id, per_host=False)(lambda cluster, host: function(cluster))


# --- text ----------------------------------------------------------------------------------------

_ID_WIDTH, _SCOPE_WIDTH, _INDENT = 19, 18, 6


def report(findings: Sequence[Finding], show_all: bool, width: int = 80) -> Iterator[str]:
    """Yield the lines of the report, wrapped at `width` columns. The last lines are a summary.

    The report lists failures and warnings. With `show_all`, it lists all findings.
    """
    several_hosts = len({finding.host for finding in findings} - {""}) > 1
    shown = [finding for finding in findings if show_all or finding.status in PROBLEMS]
    if shown:
        yield f"{'':4}  {'check':<{_ID_WIDTH}} {'scope':<{_SCOPE_WIDTH}} observed"
    for finding in shown:
        status = finding.status.upper() if finding.status in PROBLEMS else finding.status
        scope = finding.scope
        if several_hosts and finding.host:
            scope = finding.host if scope == "machine" else f"{finding.host} {scope}"
        head = f"{status:<4}  {finding.id:<{_ID_WIDTH}} {scope:<{_SCOPE_WIDTH}} "
        if width - len(head) > 20:
            yield from _wrap(head, finding.observed, width)
        else:  # after a long scope, the text starts on the next line
            yield head.rstrip()
            yield from _wrap(" " * _INDENT, finding.observed, width)
        for label, text in (("expected", finding.expected), ("cure", finding.cure)):
            if text:
                yield from _wrap(f"{'':{_INDENT}}{label:<9} ", text, width)
    yield from textwrap.wrap(_summary(findings), width, subsequent_indent="  ")


def _wrap(head: str, text: str, width: int) -> list[str]:
    """Return `head` and the wrapped lines of `text`, indented by the width of `head`."""
    lines = textwrap.wrap(text, max(width - len(head), 20), break_on_hyphens=False)
    indent = " " * len(head)
    return [(indent if number else head) + line for number, line in enumerate(lines or [""])]


def _summary(findings: Sequence[Finding]) -> str:
    """Return a line with the number of checks per status.

    The line counts checks, not findings. A check that fails for several GPUs counts as one failure.
    Example: `63 checks: 1 failed (rdma.rate), 2 warnings (…), 39 passed, 21 skipped (12 × no GPU)`.
    """
    worst: dict[str, Finding] = {}
    for finding in findings:  # sorted by status, so the first finding of a check is its worst
        worst.setdefault(finding.id, finding)
    failed, warned, good, skipped = (
        [finding for finding in worst.values() if finding.status == status]
        for status in STATUS_ORDER
    )
    parts = []
    for group, word in ((failed, "failed"), (warned, "warning" + "s" * (len(warned) > 1))):
        if group:
            parts.append(f"{len(group)} {word} ({', '.join(finding.id for finding in group)})")
    parts.append(f"{len(good)} passed")
    if skipped:
        reasons = Counter(finding.observed for finding in skipped)
        text = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(4))
        parts.append(f"{len(skipped)} skipped ({text}{'; …' * (len(reasons) > 4)})")
    return f"{len(worst)} checks: {', '.join(parts)}"


def fix_commands(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield, for each finding, a comment that describes it and the shell commands that cure it.

    A command that cures several findings is listed once.
    """
    printed: set[str] = set()
    for finding in findings:
        if finding.status in PROBLEMS:
            commands = [command for command in finding.commands if command not in printed]
            printed.update(commands)
            host = f" on {finding.host}" if finding.host else ""
            yield f"# {finding.id}, {finding.scope}{host}: {finding.observed}"
            yield from commands or [f"#   {finding.cure}"]
