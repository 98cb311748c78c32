"""The list of all checks, the function that runs them, and the report as text."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from tutti.machine.checks import (
    cpu_memory_limits,
    gpu_clocks,
    gpu_health,
    nccl_environment,
    network_interfaces,
    nvlink_pcie,
    outliers,
    rank_agreement,
    rdma,
    software_versions,
)
from tutti.machine.checks.cluster import Cluster
from tutti.machine.checks.finding import Check, Finding

_MODULES = (
    *(nccl_environment, software_versions, cpu_memory_limits, gpu_health, nvlink_pcie),
    *(gpu_clocks, network_interfaces, rdma, rank_agreement, outliers),
)
CHECKS = tuple(
    each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)
)
_STATUS_ORDER = ("fail", "warn", "pass", "skip")


def run_checks(cluster: Cluster, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks and return their findings sorted by status: fail, warn, pass, skip.

    Findings with the same status are in the order of the checks.
    """
    found = [finding for check in checks for finding in check.findings(cluster)]
    return sorted(found, key=lambda finding: _STATUS_ORDER.index(finding.status))


# --- text ----------------------------------------------------------------------------------------

_ID_WIDTH, _SCOPE_WIDTH, _INDENT = 19, 18, 6


def report(findings: Sequence[Finding], show_all: bool, width: int = 80) -> Iterator[str]:
    """The lines of the report, wrapped at `width` columns; the last lines are a summary.

    The report lists failures and warnings; with `show_all`, it lists all findings.
    """
    several_hosts = len({each.host for each in findings} - {""}) > 1
    shown = [each for each in findings if show_all or each.status in ("warn", "fail")]
    if shown:
        yield f"{'':4}  {'check':<{_ID_WIDTH}} {'scope':<{_SCOPE_WIDTH}} observed"
    for finding in shown:
        yield from _finding_lines(finding, several_hosts, width)
    yield from textwrap.wrap(_summary(findings), width, subsequent_indent="  ")


def _finding_lines(finding: Finding, several_hosts: bool, width: int) -> Iterator[str]:
    status = finding.status.upper() if finding.status in ("warn", "fail") else finding.status
    scope = finding.scope
    if several_hosts and finding.host:
        scope = finding.host if scope == "machine" else f"{finding.host} {scope}"
    head = f"{status:<4}  {finding.id:<{_ID_WIDTH}} {scope:<{_SCOPE_WIDTH}} "
    # If the scope is so long that no space is left on its line, the text starts on the next line.
    starts_here = width - len(head) > 20
    indent = " " * (len(head) if starts_here else _INDENT)
    lines = [indent + line for line in _wrap(finding.observed, width - len(indent))]
    if starts_here:
        lines[0] = f"{head}{lines[0].lstrip()}"
    else:
        yield head.rstrip()
    yield from lines
    for label, text in (("expected", finding.expected), ("cure", finding.cure)):
        for number, line in enumerate(_wrap(text, width - _INDENT - 10) if text else ()):
            yield f"{'':{_INDENT}}{label if number == 0 else '':<9} {line}"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False) or [""]


def _summary(findings: Sequence[Finding]) -> str:
    """The number of checks with each status.

    Counts checks, not findings: a check that fails for one of eight GPUs counts as one failure.
    Example: `63 checks: 1 failed (rdma.rate), 2 warnings (…), 39 passed, 21 skipped (12 × no GPU)`.
    """
    worst: dict[str, Finding] = {}
    for finding in findings:  # sorted by status: the first finding of a check is its worst
        worst.setdefault(finding.id, finding)
    ids: dict[str, list[str]] = {status: [] for status in _STATUS_ORDER}
    for finding in worst.values():
        ids[finding.status].append(finding.id)
    parts = []
    if ids["fail"]:
        parts.append(f"{len(ids['fail'])} failed ({', '.join(ids['fail'])})")
    if ids["warn"]:
        plural = "s" * (len(ids["warn"]) > 1)
        parts.append(f"{len(ids['warn'])} warning{plural} ({', '.join(ids['warn'])})")
    parts.append(f"{len(ids['pass'])} passed")
    if ids["skip"]:
        reasons = Counter(each.observed for each in worst.values() if each.status == "skip")
        text = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(4))
        more = "; …" if len(reasons) > 4 else ""
        parts.append(f"{len(ids['skip'])} skipped ({text}{more})")
    return f"{len(worst)} checks: {', '.join(parts)}"


def fix_commands(findings: Sequence[Finding]) -> Iterator[str]:
    """Shell commands that cure the findings. A comment above the commands describes each finding.

    A command that cures several findings is listed once.
    """
    printed: set[str] = set()
    for finding in findings:
        if finding.status not in ("warn", "fail"):
            continue
        commands = [each for each in finding.commands if each not in printed]
        printed.update(commands)
        host = f" on {finding.host}" if finding.host else ""
        yield f"# {finding.id}, {finding.scope}{host}: {finding.observed}"
        yield from commands or [f"#   {finding.cure}"]
