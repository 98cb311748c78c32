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
