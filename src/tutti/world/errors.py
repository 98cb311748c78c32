"""The errors that a person can cure: one line, with the numbers and what to do."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to say after "no such name": the nearest one, or which there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."


class UsageError(Exception):
    """A mistake in a flag, a variable or the set-up: commands print its line and exit with 2."""

    told = False  # whether its line has been printed already


class RanksDiffer(Exception):
    """Ranks that should run the same thing do not; the message names the odd one out."""

    told = False


# Ranks of a large job may start minutes apart (images to pull, file systems to mount).
START_TIMEOUT = 300.0
# Longer than any sane step or checkpoint; a rank that has died is noticed much sooner.
TIMEOUT = 600.0


def checked_seconds(name: str, value: float | str, example: float = 600) -> float:
    """The value as seconds above 0; `name` is the flag, argument or variable it came from.

    `example` is what an error suggests.
    """
    try:
        seconds = float(value)
    except ValueError:
        raise UsageError(f"{name} {value}: give seconds, such as {example:g}") from None
    if not 0 < seconds < 1e7:  # also refuses NaN
        raise UsageError(f"{name} {value}: give seconds above 0, such as {example:g}")
    return seconds
