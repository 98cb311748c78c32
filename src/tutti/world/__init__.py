"""Who am I (rank, device, node), how was I started, start and stop, errors that name the cure."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.world.consistency import check_same
    from tutti.world.errors import RanksDiffer, UsageError
    from tutti.world.start import init
    from tutti.world.world import World

__all__ = ["RanksDiffer", "UsageError", "World", "check_same", "init"]

_HOMES = {
    "RanksDiffer": "tutti.world.errors",
    "UsageError": "tutti.world.errors",
    "World": "tutti.world.world",
    "check_same": "tutti.world.consistency",
    "init": "tutti.world.start",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti.world' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
