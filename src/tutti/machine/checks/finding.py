"""What a check says: verdicts, and findings, which are verdicts with the name of check and host."""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skip"]
# Findings first: what hurts most on top.
ORDER: tuple[Status, ...] = ("fail", "warn", "pass", "skip")


class Skip(Exception):
    """Raised by a check that cannot judge here; its text is the reason."""


@dataclass(frozen=True)
class Verdict:
    """What a check says of one thing."""

    status: Status
    scope: str
    """machine, gpu:3, link:0-1, nic:eth0, rank:1, pair:0-1 or world."""
    observed: str
    expected: str = ""
    cure: str = ""
    """Empty: the cure of the check."""
    commands: tuple[str, ...] = ()
    """What `--fix` prints. Never run by us."""
    host: str = ""
    """Set by checks of a whole world, where one host is at fault."""


def fine(observed: str, scope: str = "machine") -> Verdict:
    """All is well, and this is what was seen."""
    return Verdict("pass", scope, observed)


def warn(
    scope: str, observed: str, expected: str, cure: str = "", *commands: str, host: str = ""
) -> Verdict:
    """It works, but slower or more fragile than it should."""
    return Verdict("warn", scope, observed, expected, cure, commands, host)


def fail(
    scope: str, observed: str, expected: str, cure: str = "", *commands: str, host: str = ""
) -> Verdict:
    """It will not work, or much slower than the hardware can."""
    return Verdict("fail", scope, observed, expected, cure, commands, host)


@dataclass(frozen=True)
class Finding:
    """A verdict, with the check that it comes from and the host that it is about."""

    id: str
    host: str
    """Empty where it is about all of them."""
    scope: str
    status: Status
    observed: str
    expected: str
    cure: str
    commands: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The keys of `checks[]`."""
        return {
            "id": self.id,
            "host": self.host,
            "scope": self.scope,
            "status": self.status,
            "observed": self.observed,
            "expected": self.expected,
            "cure": self.cure,
            "commands": list(self.commands),
        }
