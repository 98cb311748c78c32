"""Exceptions whose message is printed without a traceback, and the default timeouts."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

# Seconds for all ranks to start. The ranks of a large job may start minutes apart, because nodes
# pull container images and mount file systems.
START_TIMEOUT = 300.0
# Seconds after which a collective fails, longer than any expected step or checkpoint. If a rank
# dies, liveness.py detects this at once, without a wait for this timeout.
TIMEOUT = 600.0
# Seconds without progress after which tutti run and tutti train explain what the ranks wait for.
HANG_AFTER = 60.0


def name_ranks(ranks: list[int]) -> str:
    """Return a list of ranks as text, such as `rank 3` or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class UsageError(Exception):
    """A mistake that the user can correct, such as a wrong flag or environment variable.

    Commands print the message as one line and exit with code 2.
    """

    printed = False  # whether the message has been printed


class RanksDiffer(Exception):
    """Versions, recipe, dataset or parameters differ between ranks. The message names a rank."""

    printed = False


class OutOfMemory(Exception):
    """A rank is out of memory.

    The first line of the message names the cause. The other lines name flags with which the run
    would fit into memory.
    """

    printed = False

    def __init__(self, text: str, report: dict[str, Any]) -> None:
        super().__init__(text)
        self.report = report  # the content of `out_of_memory` in summary.json


EXPLAINED_ERRORS = (UsageError, RanksDiffer, OutOfMemory)
"""Errors whose message is printed without a traceback. The exit code is 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint of an "unknown name" message: the closest known name, or all known names."""
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
    """Return `value` as a number of seconds. Raise UsageError unless it is above 0 and below 1e7.

    `name` is the flag, argument or environment variable. The error message contains it.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < 1e7:  # also refuses NaN
        raise UsageError(f"{name} must be seconds above 0, such as {example:g}, got {value}")
    return seconds
