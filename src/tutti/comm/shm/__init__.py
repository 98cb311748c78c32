"""Collectives between ranks of one host through shared memory: the c10d backend `shm`.

Importing this package imports neither torch nor the compiled core.
"""

from tutti.comm.shm.registration import ShmOptions, available, native_group, register, set_where

__all__ = ["ShmOptions", "available", "native_group", "register", "set_where"]
