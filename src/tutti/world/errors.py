"""Errors that a user can correct, with one-line messages, and default timeouts."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

# Seconds for all ranks to start. The ranks of a large job may start minutes apart, because nodes
# pull container images and mount file systems.
START_TIMEOUT = 300.0
# Seconds after which a collective fails. No step and no checkpoint should take longer. liveness.py
# detects the death of a rank sooner.
TIMEOUT = 600.0


class UsageError(Exception):
    """A wrong flag, variable or setup. Commands print the message as one line and exit with 2."""

    printed = False  # whether the message has been printed


class RanksDiffer(Exception):
    """Versions, recipe or parameters differ between ranks. The message names a differing rank."""

    printed = False


class OutOfMemory(Exception):
    """A rank is out of memory.

    The first line of the message names the cause. Further lines name flags that would
    make the run fit into memory.
    """

    printed = False

    def __init__(self, text: str, report: dict[str, Any]) -> None:
        super().__init__(text)
        self.report = report  # the content of `out_of_memory` in summary.json


EXPLAINED_ERRORS = (UsageError, RanksDiffer, OutOfMemory)
"""Errors whose message is printed without a traceback. The exit code is 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a "no such name" message: the closest known name, or all known names."""
    names = list(known)
    close = closest_name(name, names)
    return f"choose from {', '.join(names)}." if close is None else f"did you mean {close}?"


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if no name is similar.

    Initials also match: for `learning-rate`, the known name `lr` is returned.
    """
    names = list(known)
    initials = "".join(word[:1] for word in re.split("[-_]", name.lower()))
    if len(initials) > 1 and initials in names:
        return initials
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)


def checked_seconds(name: str, value: float | str, example: float = 600) -> float:
    """Return `value` as a number of seconds. Raise UsageError unless it is above 0.

    `name` is the flag, argument or environment variable that the error message names.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < 1e7:  # also refuses NaN
        raise UsageError(f"{name} must be seconds above 0, such as {example:g}, got {value}")
    return seconds
