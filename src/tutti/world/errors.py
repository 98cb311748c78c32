"""The errors that a person can cure: one line, with the numbers and what to do."""


class UsageError(Exception):
    """A mistake in a flag, a variable or the set-up: commands print its line and exit with 2."""

    told = False  # whether its line has been printed already


class RanksDiffer(Exception):
    """Ranks that should run the same thing do not; the message names the odd one out."""

    told = False
