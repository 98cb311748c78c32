"""ctypes bindings of the C core. The functions are documented in core/tutti_shm.h.

The constants (`native.F64`, `native.ALL_REDUCE`, `native.TIMEOUT`, ...) are the TUTTI_* enumerators
and integer macros of the C headers. This module parses the headers when it is imported. It also
reads the signatures of the functions from the headers.
"""

import ctypes
import re
from ctypes import POINTER, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.comm.shm.jit_build import FOLDER, BuildFailed, build_if_missing, core_library
from tutti.world.errors import RanksDiffer, UsageError

_HEADERS = ("tutti_shm.h", "ledger.h", "structures.h")
_C_TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "double": ctypes.c_double,
    "tutti_done": c_void_p,
    "int32_t": c_int32,
    "uint32_t": c_uint32,
    "uint64_t": c_uint64,
    "int64_t": ctypes.c_int64,
}


def _header(name: str) -> str:
    return re.sub(r"/\*.*?\*/", "", (FOLDER / "core" / name).read_text(), flags=re.DOTALL)


def _parse_headers() -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Read the C headers and return (values, enums).

    `values` has the value of each constant, keyed by its name without the prefix TUTTI_. `enums`
    has, for each enum, the lower-case names of its enumerators in order.
    """
    values: dict[str, int] = {}
    enums: dict[str, tuple[str, ...]] = {}
    for text in map(_header, _HEADERS):
        for name, value in re.findall(r"#define TUTTI_(\w+)\s+(-?\d+)\s*$", text, re.MULTILINE):
            values[name] = int(value)
        for enum, body in re.findall(r"enum\s*(\w*)\s*\{(.*?)\}", text, re.DOTALL):
            number = -1
            items = re.findall(r"TUTTI_(\w+)\s*(?:=\s*(-?\d+))?", body)
            for name, value in items:
                values[name] = number = int(value) if value else number + 1
            enums[enum] = tuple(name.lower() for name, _ in items)
    return values, enums


_CONSTANTS, _ENUMS = _parse_headers()
globals().update(_CONSTANTS)
DTYPES, REDUCTIONS = _ENUMS["tutti_dtype"], _ENUMS["tutti_reduce"]
KINDS, STATES = _ENUMS["tutti_kind"], _ENUMS["tutti_state"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> int:
        """Return the value of a constant of the C headers."""


class CoreMissing(UsageError):
    """The compiled core is missing and cannot be built. The message states how to fix this."""


class ShmError(RuntimeError):
    """An operation of the shm core failed. The message states the reason."""


class ShmTimeout(ShmError, TimeoutError):
    """Some ranks have not arrived in time. The message names these ranks and their locations."""


class PeerDied(ShmError):
    """A rank's process has died."""

    rank = -1  # the rank that died, or -1 if only the message names the rank


class PeerLeft(ShmError):
    """A rank closed the group or heap while other ranks were waiting for it."""

    rank = -1  # the rank that left, or -1 if only the message names the rank


class GroupClosed(ShmError):
    """This rank closed or aborted the group, or this process is a forked child of the rank."""


class ShmNoMemory(ShmError, MemoryError):
    """Shared memory could not be reserved. The message states the number of bytes needed."""


class ShmRanksDiffer(ShmError, RanksDiffer):
    """Ranks called different operations, sizes, dtypes or roots. The message names both calls."""


_ERRORS: dict[str, type[Exception]] = {
    "TIMEOUT": ShmTimeout,
    "PEER_DIED": PeerDied,
    "PEER_LEFT": PeerLeft,
    "MISMATCH": ShmRanksDiffer,
    "NO_MEMORY": ShmNoMemory,
    "SYSTEM": ShmError,
    "BAD_ARGUMENT": ValueError,
    "CLOSED": GroupClosed,
}
_ERROR_OF_CODE = {_CONSTANTS[name]: error for name, error in _ERRORS.items()}


class Operation(ctypes.Structure):
    """The C struct `tutti_operation`. The function `operation()` creates an instance."""

    # fmt: off
    _fields_ = (
        ("kind", c_uint32), ("dtype", c_uint32), ("reduce", c_uint32), ("root", c_int32),
        ("peer", c_int32), ("tag", c_uint32), ("in_parts", c_uint32), ("out_parts", c_uint32),
        ("ins", POINTER(c_void_p)), ("in_bytes", POINTER(c_uint64)),
        ("outs", POINTER(c_void_p)), ("out_bytes", POINTER(c_uint64)),
        ("where", c_char_p), ("source", POINTER(c_int32)),
    )
    # fmt: on


DoneCallback = ctypes.CFUNCTYPE(None, c_void_p, ctypes.c_int, c_char_p)


def _c_type(declared: str) -> object:
    """Return the ctypes type of a C declaration, such as `const char *` or `uint64_t count`."""
    name = declared.replace("*", " ").replace("const", " ").split()[0]
    if "*" in declared:
        return {"char": c_char_p, "tutti_operation": POINTER(Operation)}.get(name, c_void_p)
    return _C_TYPES[name]


@cache
def core_path() -> Path:
    """Return the path of the compiled core. Build the core if necessary."""
    try:
        return build_if_missing(core_library())[0]
    except BuildFailed as error:
        raise CoreMissing(f"the shm core is not built: {error}") from None


def _load(loader: type[ctypes.CDLL]) -> Any:
    path = core_path()
    try:
        library = loader(str(path))
        for text in map(_header, _HEADERS):
            declarations = re.findall(r"^([\w ]+[ *]+)(tutti_\w+)\(([^)]*)\);", text, re.MULTILINE)
            for result, name, arguments in declarations:
                function = getattr(library, name)
                function.restype = _c_type(result)
                if arguments != "void":
                    function.argtypes = [_c_type(argument) for argument in arguments.split(",")]
    except (OSError, AttributeError) as error:
        raise CoreMissing(f"{path} cannot be loaded ({error}). Delete it to rebuild it.") from error
    return library


@cache
def core() -> Any:
    """Return the loaded core library. Calls of its functions release the GIL."""
    return _load(ctypes.CDLL)


@cache
def core_holding_gil() -> Any:
    """Return the core for calls that cannot block. Calls hold the GIL, which saves 0.2 µs each."""
    return _load(ctypes.PyDLL)


def error_for(code: int, text: str | None = None) -> Exception:
    """Return the exception for an error code of the core.

    The default of `text` is the message of the last error in this thread.
    """
    if text is None:
        text = (core().tutti_error() or b"").decode(errors="replace")
    return _ERROR_OF_CODE.get(code, ShmError)(text)


def raise_for(code: int) -> None:
    """Raise the exception for a negative code that the core returned in this thread."""
    if code < 0:
        raise error_for(code)


def last_error() -> Exception:
    """Return the exception for the core function that returned NULL in this thread."""
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
    """Return an Operation made from lists of (address, bytes). It keeps its C arrays alive."""
    ins, outs = ins or [], outs or []
    result = Operation(kind, dtype, reduce, root, peer, tag, len(ins), len(outs))
    result.ins = (c_void_p * len(ins))(*(address for address, _ in ins))
    result.in_bytes = (c_uint64 * len(ins))(*(size for _, size in ins))
    result.outs = (c_void_p * len(outs))(*(address for address, _ in outs))
    result.out_bytes = (c_uint64 * len(outs))(*(size for _, size in outs))
    result.where = where.encode() if where else None
    return result
