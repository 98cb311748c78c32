"""Data: sets of samples, which of them a step takes, how a batch is cut among ranks, loading.

This room imports no other. Importing it imports neither torch nor numpy: names are fetched when
they are used. (`tutti.data.split`, pure arithmetic, is used as a module: `split.even(10, 3)`.)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tutti.data.errors import DataError

if TYPE_CHECKING:
    from tutti.data.sampler import Draw, GlobalSampler, Position

_HOMES = {
    "Draw": "sampler",
    "GlobalSampler": "sampler",
    "Position": "sampler",
}

__all__ = [
    "DataError",
    "Draw",
    "GlobalSampler",
    "Position",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
