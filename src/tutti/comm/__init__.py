"""Collectives, groups of collectives, and the choice of path by size.

    from tutti import comm

    comm.all_reduce(gradient, "mean")
    with comm.group():
        for buffer in model.buffers():
            comm.broadcast(buffer)

Importing this package does not import torch: names are fetched when used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.comm.agreement import debug
    from tutti.comm.collectives import (
        all_gather,
        all_gather_uneven,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from tutti.comm.errors import CollectiveError, CollectiveTimeout
    from tutti.comm.handle import Handle
    from tutti.comm.tags import Tag, parse_tag

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "Handle",
    "Tag",
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "debug",
    "gather",
    "parse_tag",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

_HOMES = {
    "CollectiveError": "tutti.comm.errors",
    "CollectiveTimeout": "tutti.comm.errors",
    "Handle": "tutti.comm.handle",
    "Tag": "tutti.comm.tags",
    "all_gather": "tutti.comm.collectives",
    "all_gather_uneven": "tutti.comm.collectives",
    "all_reduce": "tutti.comm.collectives",
    "all_to_all": "tutti.comm.collectives",
    "barrier": "tutti.comm.collectives",
    "broadcast": "tutti.comm.collectives",
    "debug": "tutti.comm.agreement",
    "gather": "tutti.comm.collectives",
    "parse_tag": "tutti.comm.tags",
    "recv": "tutti.comm.collectives",
    "reduce": "tutti.comm.collectives",
    "reduce_scatter": "tutti.comm.collectives",
    "scatter": "tutti.comm.collectives",
    "send": "tutti.comm.collectives",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti.comm' has no attribute {name!r}")
    # Kept, so that the next look finds it without coming here.
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
