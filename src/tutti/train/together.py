"""Do something that may fail on some ranks only, and fail on all of them alike."""

from collections.abc import Callable
from typing import TypeVar

from tutti.data import DataError
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

Result = TypeVar("Result")


def together(make: Callable[[], Result]) -> Result:
    """Run `make` on every rank; where it finds a user's mistake on any, all raise that mistake."""
    mistake: str | None = None
    result: Result | None = None
    try:
        result = make()
    except (DataError, UsageError) as error:
        mistake = str(error)
    told = [(rank, said) for rank, said in enumerate(gather_json(mistake)) if said is not None]
    if told:
        rank, said = told[0]
        where = "" if len(told) > 1 or rank == 0 else f" (on rank {rank})"
        raise UsageError(f"{said}{where}")
    return result  # type: ignore[return-value]
