"""Symmetric memory: tensors that every rank can read and write in place, on CPU and on GPU.

See `Heap`. Names are fetched when used, so that importing this imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.comm.symmetric.availability import available
    from tutti.comm.symmetric.collectives import all_gather, all_reduce, reduce_scatter
    from tutti.comm.symmetric.counters import Counters
    from tutti.comm.symmetric.errors import PeerDied, PeerLeft, Timeout
    from tutti.comm.symmetric.heap import Heap
    from tutti.comm.symmetric.staged_all_reduce import all_reduce_staged
    from tutti.comm.symmetric.tensor import SymmetricTensor

__all__ = [
    "Counters",
    "Heap",
    "PeerDied",
    "PeerLeft",
    "SymmetricTensor",
    "Timeout",
    "all_gather",
    "all_reduce",
    "all_reduce_staged",
    "available",
    "reduce_scatter",
]

_HOMES = {
    "Counters": "counters",
    "Heap": "heap",
    "PeerDied": "errors",
    "PeerLeft": "errors",
    "SymmetricTensor": "tensor",
    "Timeout": "errors",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_reduce_staged": "staged_all_reduce",
    "available": "availability",
    "reduce_scatter": "collectives",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
