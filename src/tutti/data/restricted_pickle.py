"""Reads a pickle of plain data and byte arrays without executing code from the file.

A pickle is a program that may import any name and call it. This unpickler resolves only the few
names that an array of bytes needs, and resolves them to the stand-in classes below, which record
their arguments; any other name is an error. The pickle's values are checked before they are passed
to numpy. Everything else in the file can only be a dict, list, tuple, bytes, str or number, which
the unpickler creates itself.
"""

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tutti.data import DataError


def load_plain(content: bytes, path: Path) -> object:
    """The data in a pickle; `path` names the file in errors."""
    try:
        return _to_arrays(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except DataError as error:
        raise DataError(f"{path} is refused: {error}") from error
    except Exception as error:  # a damaged pickle makes the unpickler raise nearly anything
        raise DataError(f"{path} is a damaged pickle ({error!r}): download it again") from error


class _Dtype:
    """Stands in for numpy.dtype; accepts unsigned bytes only."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise DataError(f"an array of {code!r}, expected bytes (u1)")

    def __setstate__(self, _: object) -> None: ...


class _Array:
    """Stands in for numpy.ndarray and for the functions that rebuild an array."""

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.content: bytes | bytearray = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, dtype, fortran, self.content = state
        if not isinstance(dtype, _Dtype) or fortran:
            raise DataError("an array that is not of bytes in row-major order")

    @classmethod
    def from_buffer(cls, content: bytes, dtype: object, shape: tuple[int, ...], order: str) -> Any:
        array = cls()
        array.__setstate__((1, shape, dtype, order not in ("C", b"C"), content))
        return array

    def numpy(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        shape, content = self.shape, self.content
        if not isinstance(content, bytes | bytearray) or not all(type(n) is int for n in shape):
            raise DataError("an array without content or shape")
        if math.prod(shape) != len(content) or any(n < 0 for n in shape):
            raise DataError(f"an array of {shape} with {len(content)} bytes")
        return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Stands in for _codecs.encode, with which Python 3 writes bytes into old pickle protocols."""
    return text.encode("latin1")


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    # numpy 1 and numpy 2 name their modules differently.
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Array.from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _Array.from_buffer,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        allowed = ALLOWED.get((module, name))
        if allowed is None:
            raise DataError(
                f"its pickle imports {module}.{name}, which plain data does not need: "
                "do not trust this file, download the published one"
            )
        return allowed


def _to_arrays(value: object) -> object:
    """Replace stand-ins with arrays, at the top level and in a dict; they occur nowhere else."""
    if isinstance(value, dict):
        return {k: v.numpy() if isinstance(v, _Array) else v for k, v in value.items()}
    return value.numpy() if isinstance(value, _Array) else value
