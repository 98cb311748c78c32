"""How long ranks wait for each other, in seconds."""

from tutti.world.errors import UsageError

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
