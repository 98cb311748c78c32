"""Collectives, blocks of collectives (`group`), and the choice of a transfer path (`explain`).

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
    from tutti.comm.collective_errors import debug as debug
    from tutti.comm.collectives import all_gather as all_gather
    from tutti.comm.collectives import all_gather_uneven as all_gather_uneven
    from tutti.comm.collectives import all_reduce as all_reduce
    from tutti.comm.collectives import all_reduce_coalesced as all_reduce_coalesced
    from tutti.comm.collectives import all_to_all as all_to_all
    from tutti.comm.collectives import barrier as barrier
    from tutti.comm.collectives import broadcast as broadcast
    from tutti.comm.collectives import broadcast_coalesced as broadcast_coalesced
    from tutti.comm.collectives import gather as gather
    from tutti.comm.collectives import recv as recv
    from tutti.comm.collectives import reduce as reduce
    from tutti.comm.collectives import reduce_scatter as reduce_scatter
    from tutti.comm.collectives import scatter as scatter
    from tutti.comm.collectives import send as send
    from tutti.comm.grouping import BlockAbandoned as BlockAbandoned
    from tutti.comm.grouping import Summary as Summary
    from tutti.comm.grouping import group as group
    from tutti.comm.operation import CollectiveError as CollectiveError
    from tutti.comm.operation import CollectiveMismatch as CollectiveMismatch
    from tutti.comm.operation import CollectiveTimeout as CollectiveTimeout
    from tutti.comm.operation import Handle as Handle
    from tutti.comm.operation import Tag as Tag
    from tutti.comm.operation import parse_tag as parse_tag
    from tutti.comm.path_selection import Explanation as Explanation
    from tutti.comm.path_selection import explain as explain
    from tutti.world.exchange import gather_json as gather_json

_COLLECTIVES = (
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
_ERRORS = ("CollectiveError", "CollectiveMismatch", "CollectiveTimeout")
_MODULES = {  # the module that defines each public name
    **dict.fromkeys(_COLLECTIVES, "tutti.comm.collectives"),
    **dict.fromkeys(("BlockAbandoned", "Summary", "group"), "tutti.comm.grouping"),
    **dict.fromkeys((*_ERRORS, "Handle", "Tag", "parse_tag"), "tutti.comm.operation"),
    **dict.fromkeys(("Explanation", "explain"), "tutti.comm.path_selection"),
    "debug": "tutti.comm.collective_errors",
    "gather_json": "tutti.world.exchange",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tutti.comm' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
