"""The report as text: findings first, then how many checks passed and why others were skipped."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from tutti.machine.checks.finding import Finding

_ID, _SCOPE = 19, 18


def report(findings: Sequence[Finding], show_all: bool, width: int = 80) -> Iterator[str]:
    """Line by line, in `width` columns."""
    several = len({each.host for each in findings} - {""}) > 1
    shown = [each for each in findings if show_all or each.status in ("warn", "fail")]
    if shown:
        yield f"{'':4}  {'check':<{_ID}} {'scope':<{_SCOPE}} observed"
    for finding in shown:
        yield from _lines(finding, several, width)
    yield from textwrap.wrap(_summary(findings), width, subsequent_indent="  ")


def _lines(finding: Finding, several: bool, width: int) -> Iterator[str]:
    mark = finding.status if finding.status not in ("warn", "fail") else finding.status.upper()
    scope = finding.scope
    if several and finding.host:
        scope = finding.host if scope == "machine" else f"{finding.host} {scope}"
    head = f"{mark:<4}  {finding.id:<{_ID}} {scope:<{_SCOPE}} "
    margin = 4 + 2
    room = width - len(head)
    first, *rest = _wrap(finding.observed, room) if room > 20 else ("", finding.observed)
    yield f"{head}{first}".rstrip()
    indent = " " * (len(head) if room > 20 else margin)
    for line in _wrap(" ".join(rest), width - len(indent)) if rest else ():
        yield f"{indent}{line}"
    for word, text in (("expected", finding.expected), ("cure", finding.cure)):
        for number, line in enumerate(_wrap(text, width - margin - 10) if text else ()):
            yield f"{'':{margin}}{word if number == 0 else '':<9} {line}"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False) or [""]


def _summary(findings: Sequence[Finding]) -> str:
    """By check, not by finding: a check with one bad GPU of eight has not passed."""
    worst: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    for finding in findings:  # the worst come first
        if finding.id not in worst:
            worst[finding.id] = finding.status
            if finding.status == "skip":
                reasons[finding.observed] += 1
    counts = Counter(worst.values())
    parts = [f"{counts['fail']} failed", f"{counts['warn']} with a warning"]
    parts = [part for part in parts if not part.startswith("0 ")]
    parts.append(f"{counts['pass']} passed")
    if counts["skip"]:
        told = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common(4))
        more = "; …" if len(reasons) > 4 else ""
        parts.append(f"{counts['skip']} skipped ({told}{more})")
    return ", ".join(parts)


def fixes(findings: Sequence[Finding]) -> Iterator[str]:
    """The commands that would cure what was found, each once, under what they cure."""
    said: set[str] = set()
    for finding in findings:
        commands = [each for each in finding.commands if each not in said]
        if finding.status not in ("warn", "fail") or not (commands or finding.cure):
            continue
        said.update(commands)
        host = f" on {finding.host}" if finding.host else ""
        yield f"# {finding.id}, {finding.scope}{host}: {finding.observed}"
        if not commands:
            yield f"#   {finding.cure}"
        yield from commands
