"""Symmetric memory: tensors that every rank can read and write in place, on CPU and on GPU.

The main class is `Heap`. Names are imported on first use, so that importing this package does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.comm.shm.native import PeerDied, PeerLeft
    from tutti.comm.symmetric.heap import Heap, available
    from tutti.comm.symmetric.heap_collectives import (
        all_gather,
        all_reduce,
        all_reduce_staged,
        reduce_scatter,
    )
    from tutti.comm.symmetric.heap_rendezvous import Timeout
    from tutti.comm.symmetric.symmetric_tensor import Counters, SymmetricTensor

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

_MODULES = ("symmetric_tensor", "heap_rendezvous", "heap", "heap_collectives")


def __getattr__(name: str) -> object:
    for module in _MODULES if name in __all__ else ():
        value = getattr(import_module(f"{__name__}.{module}"), name, None)
        if value is not None:
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
