"""The C core through ctypes; core/tutti_shm.h documents each function.

`core()` releases the GIL during a call. `core_holding_gil()` is the same library without that,
about 0.2 µs cheaper, for calls that cannot block: load, store, atomics, small puts.

Constants (`native.F64`, `native.ALL_REDUCE`, `native.TIMEOUT`, `native.FULL`, ...) are the TUTTI_*
enumerators and integer macros of the C headers, which are parsed when this module is imported.
"""

import ctypes
import re
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.comm.shm.jit_build import FOLDER, BuildFailed, built, core_library
from tutti.world.errors import RanksDiffer, UsageError

_HEADERS = ("tutti_shm.h", "ledger.h", "structures.h")


def _parse_headers() -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """All constants by name without TUTTI_, and the names of each enum in order, in lower case."""
    values: dict[str, int] = {}
    enums: dict[str, tuple[str, ...]] = {}
    for header in _HEADERS:
        text = re.sub(r"/\*.*?\*/", "", (FOLDER / "core" / header).read_text(), flags=re.DOTALL)
        for name, value in re.findall(r"#define TUTTI_(\w+)\s+(-?\d+)\s*$", text, re.MULTILINE):
            values[name] = int(value)
        for enum, body in re.findall(r"enum\s*(\w*)\s*\{(.*?)\}", text, re.DOTALL):
            names, number = [], -1
            for item in filter(None, map(str.strip, body.split(","))):
                name, _, given = item.removeprefix("TUTTI_").partition("=")
                number = int(given) if given else number + 1
                values[name.strip()] = number
                names.append(name.strip().lower())
            if enum:
                enums[enum] = tuple(names)
    return values, enums


_CONSTANTS, _ENUMS = _parse_headers()
globals().update(_CONSTANTS)
DTYPES, REDUCTIONS = _ENUMS["tutti_dtype"], _ENUMS["tutti_reduce"]
KINDS, STATES = _ENUMS["tutti_kind"], _ENUMS["tutti_state"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> int:
        """One of the constants."""


class CoreMissing(UsageError):
    """The compiled core is not there and cannot be built; the text says why and what to do."""


class ShmError(RuntimeError):
    """An operation of the shm core failed; the text says why."""


class ShmTimeout(ShmError, TimeoutError):
    """Some ranks have not arrived in time; the text names them and where they are."""


class PeerDied(ShmError):
    """A rank's process has died."""

    rank = -1  # which; -1 where only the text says it


class PeerLeft(ShmError):
    """A rank closed the group or heap while others still waited for it."""

    rank = -1  # which; -1 where only the text says it


class GroupClosed(ShmError):
    """This rank closed or aborted the group, or is a forked child of the rank."""


class ShmNoMemory(ShmError, MemoryError):
    """Shared memory could not be reserved; the text says how many bytes were needed."""


class ShmRanksDiffer(ShmError, RanksDiffer):
    """Ranks called different operations, sizes, dtypes or roots; the text names both."""


_ERRORS: dict[int, type[Exception]] = {
    _CONSTANTS["TIMEOUT"]: ShmTimeout,
    _CONSTANTS["PEER_DIED"]: PeerDied,
    _CONSTANTS["PEER_LEFT"]: PeerLeft,
    _CONSTANTS["MISMATCH"]: ShmRanksDiffer,
    _CONSTANTS["NO_MEMORY"]: ShmNoMemory,
    _CONSTANTS["SYSTEM"]: ShmError,
    _CONSTANTS["BAD_ARGUMENT"]: ValueError,
    _CONSTANTS["CLOSED"]: GroupClosed,
}


class Operation(ctypes.Structure):
    """`tutti_operation`; `operation()` fills one from lists."""

    _fields_ = (
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduce", c_uint32),
        ("root", c_int32),
        ("peer", c_int32),
        ("tag", c_uint32),
        ("in_parts", c_uint32),
        ("out_parts", c_uint32),
        ("ins", POINTER(c_void_p)),
        ("in_bytes", POINTER(c_uint64)),
        ("outs", POINTER(c_void_p)),
        ("out_bytes", POINTER(c_uint64)),
        ("where", c_char_p),
        ("source", POINTER(c_int32)),
    )


Done = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)

_P = c_void_p  # a segment, a group, a work or an address
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "tutti_error": (c_char_p, ()),
    "tutti_error_code": (c_int, ()),
    "tutti_abi": (c_int, ()),
    "tutti_vector_code": (c_char_p, ()),
    "tutti_segment_create": (_P, (c_char_p, c_uint64)),
    "tutti_segment_open": (_P, (c_int64, c_int, c_uint64)),
    "tutti_segment_base": (_P, (_P,)),
    "tutti_segment_bytes": (c_uint64, (_P,)),
    "tutti_segment_fd": (c_int, (_P,)),
    "tutti_segment_owner_lives": (c_int, (_P,)),
    "tutti_segment_close": (None, (_P,)),
    "tutti_group_create": (_P, (c_char_p, c_int, c_int, c_uint64, c_uint64)),
    "tutti_group_fd": (c_int, (_P,)),
    "tutti_group_bytes": (c_uint64, (_P,)),
    "tutti_group_connect": (c_int, (_P, c_int, c_int64, c_int, c_uint64)),
    "tutti_group_abort": (None, (_P,)),
    "tutti_group_close": (None, (_P,)),
    "tutti_group_add_block": (c_int, (_P, c_uint64, POINTER(c_void_p), c_uint64)),
    "tutti_group_remove_block": (c_int, (_P, c_uint64)),
    "tutti_export_alloc": (_P, (c_uint64,)),
    "tutti_export_free": (None, (_P,)),
    "tutti_run": (c_int, (_P, POINTER(Operation), c_double)),
    "tutti_submit": (_P, (_P, POINTER(Operation), c_double, _P, _P)),
    "tutti_work_is_done": (c_int, (_P,)),
    "tutti_work_source": (c_int32, (_P,)),
    "tutti_work_wait": (c_int, (_P, c_double)),
    "tutti_work_free": (None, (_P,)),
    "tutti_note_place": (None, (c_char_p,)),
    "tutti_put": (None, (_P, _P, c_uint64)),
    "tutti_put_signal": (None, (_P, _P, c_uint64, _P, c_uint64, c_int)),
    "tutti_wait_signal": (c_int, (_P, c_uint64, c_double, _P)),
    "tutti_load": (c_uint64, (_P,)),
    "tutti_store": (None, (_P, c_uint64)),
    "tutti_fetch_add": (c_uint64, (_P, c_uint64)),
    "tutti_compare_swap": (c_uint64, (_P, c_uint64, c_uint64)),
    "tutti_fence": (None, ()),
    "tutti_round_trip_ns": (c_double, (_P, c_int, c_uint32, c_double)),
    "tutti_reduce_into": (c_int, (_P, POINTER(c_void_p), c_uint32, c_uint64, c_uint32, c_uint32)),
}


@cache
def core_path() -> Path:
    """The file of the compiled core, which is built now where need be."""
    try:
        return built(core_library())[0]
    except BuildFailed as error:
        raise CoreMissing(f"the shm core is not built: {error}") from None


def _load(loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    path = core_path()
    try:
        library = loader(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise CoreMissing(
            f"{path} cannot be loaded ({error}): delete it, and it is rebuilt"
        ) from error
    return library


@cache
def core() -> ctypes.CDLL:
    """The core, loaded once; calls release the GIL."""
    return _load(ctypes.CDLL)


@cache
def core_holding_gil() -> ctypes.CDLL:
    """The same core for calls that cannot block."""
    return _load(ctypes.PyDLL)


def error_for(code: int, text: str | None = None) -> Exception:
    """The exception for a code; without a text, with the last error of the calling thread."""
    if text is None:
        text = (core().tutti_error() or b"").decode(errors="replace")
    return _ERRORS.get(code, ShmError)(text)


def raise_for(code: int) -> None:
    """Raise the exception for a negative code. Call it from the thread that got the code."""
    if code < 0:
        raise error_for(code)


def last_error() -> Exception:
    """The exception for a function that returned NULL in this thread."""
    return error_for(core().tutti_error_code())


def operation(
    kind: int,
    *,
    ins: list[tuple[int, int]] | None = None,
    outs: list[tuple[int, int]] | None = None,
    dtype: int = _CONSTANTS["BYTES"],
    reduce: int = _CONSTANTS["SUM"],
    root: int = -1,
    peer: int = -1,
    tag: int = 0,
    where: str = "",
) -> Operation:
    """An operation from lists of (address, bytes); it keeps its arrays alive."""
    ins, outs = ins or [], outs or []
    made = Operation(kind, dtype, reduce, root, peer, tag, len(ins), len(outs))
    made.ins = (c_void_p * len(ins))(*(address for address, _ in ins))
    made.in_bytes = (c_uint64 * len(ins))(*(size for _, size in ins))
    made.outs = (c_void_p * len(outs))(*(address for address, _ in outs))
    made.out_bytes = (c_uint64 * len(outs))(*(size for _, size in outs))
    made.where = where.encode() if where else None
    return made
