"""The compiled half of the structures: signatures of `shm/core/structures.h` for ctypes."""

import ctypes
from functools import cache
from typing import Any

import torch

from tutti.comm.shm import native

FULL, OVERTAKEN, VERSION_SHIFT = native.FULL, native.OVERTAKEN, native.VERSION_SHIFT
BUSY = native.BUSY  # and less: BUSY - rank of the writer that holds the value

# tutti_dtype of those that can be added in place.
ADDABLE = {
    torch.float64: native.F64,
    torch.float32: native.F32,
    torch.int64: native.I64,
    torch.int32: native.I32,
}

_pointer, _u64, _i64 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
_u32, _int = ctypes.c_uint32, ctypes.c_int

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tutti_rows_create": (_pointer, [_pointer, _u32, _u32, _u64, _u64, _u64, _u32]),
    "tutti_rows_free": (None, [_pointer]),
    "tutti_rows_gather": (_i64, [_pointer, _pointer, _u64, _pointer]),
    "tutti_rows_scatter": (_i64, [_pointer, _pointer, _u64, _pointer]),
    "tutti_rows_scatter_add": (_i64, [_pointer, _pointer, _u64, _pointer, _u32]),
    "tutti_cell_bytes": (_u64, [_u64]),
    "tutti_rows_lookup": (_i64, [_pointer, _u64, _pointer]),
    "tutti_rows_lookup_many": (_i64, [_pointer, _pointer, _u64, _pointer, _pointer]),
    "tutti_rows_publish": (_i64, [_pointer, _u64, _pointer]),
    "tutti_rows_state": (_pointer, [_pointer, _u64]),
    "tutti_rows_lookups": (_u64, [_pointer]),
    "tutti_rows_retries": (_u64, [_pointer]),
    "tutti_rows_declare_dead": (None, [_pointer, _u32]),
    "tutti_map_shard_bytes": (_u64, [_u64, _u64]),
    "tutti_map_create": (_pointer, [_pointer, _u32, _u32, _u64, _u64]),
    "tutti_map_free": (None, [_pointer]),
    "tutti_map_owner": (_u32, [_pointer, _u64]),
    "tutti_map_get": (_int, [_pointer, _u64, _pointer]),
    "tutti_map_has": (_int, [_pointer, _u64]),
    "tutti_map_get_many": (_u64, [_pointer, _pointer, _u64, _pointer, _pointer]),
    "tutti_map_put": (_int, [_pointer, _u64, _pointer]),
    "tutti_map_add": (_int, [_pointer, _u64, _pointer, _u32]),
    "tutti_map_delete": (_int, [_pointer, _u64]),
    "tutti_map_put_many": (_u64, [_pointer, _pointer, _u64, _pointer, ctypes.c_int32, _pointer]),
    "tutti_map_live": (_u64, [_pointer, _u32]),
    "tutti_map_claimed": (_u64, [_pointer, _u32]),
    "tutti_map_limit": (_u64, [_pointer]),
    "tutti_map_collect": (_u64, [_pointer, _u64, _pointer, _pointer]),
    "tutti_map_compact": (_int, [_pointer]),
    "tutti_map_gets": (_u64, [_pointer]),
    "tutti_map_hits": (_u64, [_pointer]),
    "tutti_map_retries": (_u64, [_pointer]),
    "tutti_map_declare_dead": (None, [_pointer, _u32]),
    "tutti_slot_begin": (None, [_pointer]),
    "tutti_slot_write": (None, [_pointer, _pointer, _u64]),
    "tutti_slot_end": (_u64, [_pointer]),
    "tutti_slot_copy": (_int, [_pointer, _pointer, _u64, _pointer, _u64]),
    "tutti_await_word": (_u64, [_pointer, _u64, ctypes.c_double]),
}


@cache
def core() -> Any:
    """The core, letting other Python threads run meanwhile: for copies and waits."""
    return _declared(native.core())


@cache
def quick() -> Any:
    """The core, keeping the interpreter's lock: for calls of less than a microsecond."""
    return _declared(native.core_holding_gil())


def pointers(addresses: list[int]) -> Any:
    """A C array of addresses."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _declared(core: Any) -> Any:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments
    return core
