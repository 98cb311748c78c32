"""Collectives, groups of collectives, and the choice of path by size.

    from tutti import comm

    comm.all_reduce(gradient, "mean")
    with comm.group():
        for buffer in model.buffers():
            comm.broadcast(buffer)

Importing this package does not import torch: names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.comm.collective_errors import debug
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
    from tutti.comm.grouping import BlockAbandoned, Summary, group
    from tutti.comm.operation import (
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        Handle,
        Tag,
        parse_tag,
    )
    from tutti.comm.packing import all_reduce_coalesced, broadcast_coalesced
    from tutti.comm.path_selection import Explanation, explain
    from tutti.world.exchange import gather_json

__all__ = [
    "BlockAbandoned",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Explanation",
    "Handle",
    "Summary",
    "Tag",
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "debug",
    "explain",
    "gather",
    "gather_json",
    "group",
    "parse_tag",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

_MODULES = (
    *(
        "world.exchange",
        "comm.collectives",
        "comm.collective_errors",
        "comm.grouping",
        "comm.operation",
    ),
    *("comm.packing", "comm.path_selection"),
)


def __getattr__(name: str) -> object:
    for module in _MODULES if name in __all__ else ():
        value = getattr(import_module(f"tutti.{module}"), name, None)
        if value is not None:
            globals()[name] = value  # so that the next access does not call __getattr__
            return value
    raise AttributeError(f"module 'tutti.comm' has no attribute {name!r}")
