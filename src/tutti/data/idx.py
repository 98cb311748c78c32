"""IDX, the format of MNIST and its relatives: a header of big-endian numbers, then the values.

byte 0, 1   zero
byte 2      type of the values; 0x08 is unsigned byte, the only one that these data sets use
byte 3      number of dims
then        one uint32 per dim, then the values, last dim fastest
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti.data.errors import DataError

UNSIGNED_BYTE = 0x08
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes with `dims` dims, gzipped or not."""
    content = _read(path)
    expected = bytes([0, 0, UNSIGNED_BYTE, dims])
    if content[:4] != expected:
        raise DataError(
            f"{path} is no IDX file of {dims}-dim bytes: its magic is 0x{content[:4].hex() or '-'},"
            f" expected 0x{expected.hex()}: put the published file there"
        )
    header = 4 + 4 * dims
    if len(content) < header:
        raise DataError(
            f"{path} is truncated: {len(content)} bytes, its header alone takes {header}: "
            "fetch it again"
        )
    shape = struct.unpack(f">{dims}I", content[4:header])
    announced, held = math.prod(shape), len(content) - header
    if held != announced:
        verdict = "is truncated" if held < announced else "is too long"
        raise DataError(
            f"{path} {verdict}: its header announces {' × '.join(map(str, shape))} = {announced} "
            f"bytes, it holds {held}: fetch it again"
        )
    # A copy, as the bytes of a file are read-only and torch wants memory that it may write.
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        # By content and not by name: both `x` and `x.gz` are found zipped and unzipped in practice.
        return gzip.decompress(content) if content[:2] == GZIP_MAGIC else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
