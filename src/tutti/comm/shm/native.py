"""The C core as ctypes sees it: core/tutti_shm.h says what each function does.

`core()` releases the GIL during a call; `core_holding_gil()` is the same library without that,
about 0.2 µs cheaper, for calls that cannot block: load, store, atomics, small puts.
"""

import ctypes
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
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from tutti.world.errors import RanksDiffer, UsageError

ABI = 2

TIMEOUT, PEER_DIED, PEER_LEFT, MISMATCH, NO_MEMORY, SYSTEM, BAD_ARGUMENT, CLOSED = range(-1, -9, -1)

DTYPES = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool", "bytes")
F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL, BYTES = range(11)
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
(
    BARRIER,
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    SEND,
    RECV,
) = range(11)


class CoreMissing(UsageError):
    """The compiled core is not there, or is another version's."""


class ShmError(RuntimeError):
    """An operation of the shm core failed; the text says why."""


class ShmTimeout(ShmError, TimeoutError):
    """Some ranks have not arrived in time; the text names them and where they are."""


class PeerDied(ShmError):
    """A rank's process has died."""


class PeerLeft(ShmError):
    """A rank closed the group while others still waited for it."""


class GroupClosed(ShmError):
    """This rank closed or aborted the group, or is a forked child of the rank."""


class ShmNoMemory(ShmError, MemoryError):
    """Shared memory could not be reserved; the text says how many bytes were needed."""


class ShmRanksDiffer(ShmError, RanksDiffer):
    """Ranks called different operations, sizes, dtypes or roots; the text names both."""


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


def core_path() -> Path:
    """The file of the compiled core."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_core{suffix}")
        if path.exists():
            return path
    raise CoreMissing(
        f"the compiled core of the shm backend is not in {Path(__file__).parent}: install a C "
        "compiler (gcc or clang), then `pip install` this package again, or in a checkout run "
        "`python setup.py build_ext --inplace`."
    )


def _load(loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    path = core_path()
    try:
        library = loader(str(path))
        if (found := library.tutti_abi()) != ABI:
            raise CoreMissing(
                f"{path} has interface {found}, this package needs {ABI}: build it again."
            )
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise CoreMissing(f"{path} cannot be loaded: {error}. Build it again.") from error
    return library


@cache
def core() -> ctypes.CDLL:
    """The core, loaded once; calls release the GIL."""
    return _load(ctypes.CDLL)


@cache
def core_holding_gil() -> ctypes.CDLL:
    """The same core for calls that cannot block."""
    return _load(ctypes.PyDLL)


_ERRORS: dict[int, type[Exception]] = {
    TIMEOUT: ShmTimeout,
    PEER_DIED: PeerDied,
    PEER_LEFT: PeerLeft,
    MISMATCH: ShmRanksDiffer,
    NO_MEMORY: ShmNoMemory,
    SYSTEM: ShmError,
    BAD_ARGUMENT: ValueError,
    CLOSED: GroupClosed,
}


def error_for(code: int, text: str | None = None) -> Exception:
    """The exception that a code stands for; without a text, with the calling thread's last one."""
    if text is None:
        text = (core().tutti_error() or b"").decode(errors="replace")
    return _ERRORS.get(code, ShmError)(text)


def raise_for(code: int) -> None:
    """Raise what a negative code stands for. Call it from the thread that got the code."""
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
    dtype: int = BYTES,
    reduce: int = SUM,
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
