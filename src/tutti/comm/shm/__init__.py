"""Collectives between ranks of one host through shared memory: the c10d backend `shm`.

Importing this package imports neither torch nor the compiled core: names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.comm.shm.registration import (
        ShmOptions,
        available,
        native_group,
        register,
        set_where,
    )

__all__ = ["ShmOptions", "available", "native_group", "register", "set_where"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tutti.comm.shm' has no attribute {name!r}")
    return getattr(import_module("tutti.comm.shm.registration"), name)
