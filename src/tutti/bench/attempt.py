"""Try what some ranks may not be able to do, and have all ranks know whether it worked."""

from collections.abc import Callable
from typing import TypeVar

from tutti.bench.unsupported import Unsupported
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

Result = TypeVar("Result")

__all__ = ["Unsupported", "try_on_all"]


def try_on_all(action: Callable[[], Result]) -> tuple[Result | None, str]:
    """Its result, or None and the reason where any rank could not do it. Collective."""
    result: Result | None = None
    reason: str | None = None
    try:
        result = action()
    except (Unsupported, UsageError) as error:
        reason = str(error)
    # What torch raises where a backend has no such operation, and what a wait raises for a peer.
    except (RuntimeError, TypeError, ValueError, TimeoutError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    reasons = [each for each in gather_json(reason) if each is not None]
    return (None, reasons[0]) if reasons else (result, "")
