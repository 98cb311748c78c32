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
    from tutti.comm.conditions import (
        all_ranks,
        any_rank,
        gather_compute_reduce,
        gather_compute_scatter,
        overlapped,
        when_all,
        when_any,
    )
    from tutti.comm.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout
    from tutti.comm.grouping import BlockAbandoned, Summary, group
    from tutti.comm.handle import Handle
    from tutti.comm.packing import all_reduce_coalesced, broadcast_coalesced
    from tutti.comm.pools import BufferPool, PinnedPool
    from tutti.comm.routes import Explanation, explain
    from tutti.comm.tags import Tag, parse_tag
    from tutti.world.exchange import gather_json

__all__ = [
    "BlockAbandoned",
    "BufferPool",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Explanation",
    "Handle",
    "PinnedPool",
    "Summary",
    "Tag",
    "all_gather",
    "all_gather_uneven",
    "all_ranks",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "any_rank",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "debug",
    "explain",
    "gather",
    "gather_compute_reduce",
    "gather_compute_scatter",
    "gather_json",
    "group",
    "overlapped",
    "parse_tag",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "when_all",
    "when_any",
]

_HOMES = {
    "BlockAbandoned": "tutti.comm.grouping",
    "BufferPool": "tutti.comm.pools",
    "CollectiveError": "tutti.comm.errors",
    "CollectiveMismatch": "tutti.comm.errors",
    "CollectiveTimeout": "tutti.comm.errors",
    "Explanation": "tutti.comm.routes",
    "Handle": "tutti.comm.handle",
    "PinnedPool": "tutti.comm.pools",
    "Summary": "tutti.comm.grouping",
    "Tag": "tutti.comm.tags",
    "all_gather": "tutti.comm.collectives",
    "all_gather_uneven": "tutti.comm.collectives",
    "all_ranks": "tutti.comm.conditions",
    "all_reduce": "tutti.comm.collectives",
    "all_reduce_coalesced": "tutti.comm.packing",
    "all_to_all": "tutti.comm.collectives",
    "any_rank": "tutti.comm.conditions",
    "barrier": "tutti.comm.collectives",
    "broadcast": "tutti.comm.collectives",
    "broadcast_coalesced": "tutti.comm.packing",
    "debug": "tutti.comm.agreement",
    "explain": "tutti.comm.routes",
    "gather": "tutti.comm.collectives",
    "gather_compute_reduce": "tutti.comm.conditions",
    "gather_compute_scatter": "tutti.comm.conditions",
    "gather_json": "tutti.world.exchange",
    "group": "tutti.comm.grouping",
    "overlapped": "tutti.comm.conditions",
    "parse_tag": "tutti.comm.tags",
    "recv": "tutti.comm.collectives",
    "reduce": "tutti.comm.collectives",
    "reduce_scatter": "tutti.comm.collectives",
    "scatter": "tutti.comm.collectives",
    "send": "tutti.comm.collectives",
    "when_all": "tutti.comm.conditions",
    "when_any": "tutti.comm.conditions",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti.comm' has no attribute {name!r}")
    # Kept, so that the next look finds it without coming here.
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
