"""Files that are whole on the disk or not there: written once, hashed, and synced.

And their counterpart: reading what somebody else may have made. A name that is a link or a pipe
is refused, JSON is parsed strictly, and every complaint is a `Damaged` that names the file.
"""

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 16 << 20  # hashed and written in turn, so that the block is still in the cache


class Damaged(Exception):
    """A file is not what was written; the message names the file and says what is wrong."""


@dataclass(frozen=True)
class Written:
    """What is on the disk now: enough to notice later that it has changed."""

    bytes: int
    sha256: str


def write_new(path: Path, parts: Iterable[bytes | memoryview]) -> Written:
    """Write a file that must not exist yet, down to the disk. Only its owner may read it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    digest, size = hashlib.sha256(), 0
    with open(os.open(path, flags, 0o600), "wb") as file:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _BLOCK_BYTES):
                block = view[start : start + _BLOCK_BYTES]
                digest.update(block)
                file.write(block)
                size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Bring a directory's names (new files, renames) down to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading, but no link (it may lead anywhere) and no pipe (it may block)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else _reason(error)
        raise Damaged(f"{path.name} {what}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is not a regular file")
    return open(descriptor, "rb")


def read_small(path: Path, limit: int) -> bytes:
    """A whole file, unless it is larger than any honest one."""
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise Damaged(f"{path.name} {_reason(error)}") from None
    if len(content) > limit:
        raise Damaged(f"{path.name} has more than {limit} bytes")
    return content


def check_file(path: Path, expected: Written) -> None:
    """Raise Damaged unless the file is byte for byte what was written."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.bytes:
                raise Damaged(f"{path.name} has {size} bytes, {expected.bytes} were written")
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{path.name} {_reason(error)}") from None
    if sha256 != expected.sha256:
        raise Damaged(f"{path.name} does not have the checksum that was written")


def parse_json(text: bytes, name: str) -> Any:
    """JSON from an untrusted file. A key that comes twice is an error, not a riddle."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "is missing"
    return f"cannot be read: {error.strerror}"
