"""Download files once per directory, verify checksums, and resume after a broken connection.

A file is downloaded as `NAME.part` and renamed when its checksum is right. One process holds a file
lock and downloads; other processes wait for the lock and then find the files. The lock needs no
process group, and works whether or not the nodes share the directory.
"""

import fcntl
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from tutti.data import DataError

TIMEOUT_S = 30.0  # the longest wait for data, not for the whole file
ATTEMPTS = 3  # each attempt resumes where the previous attempt ended


@dataclass(frozen=True)
class Remote:
    """A published file: its name, URL, and checksum as `md5:…` or `sha256:…`."""

    name: str
    url: str
    checksum: str


def ensure(files: Sequence[Remote], directory: Path, *, cure: str) -> None:
    """Download the `files` that are missing in `directory`. Error messages end with `cure`."""

    def download() -> None:
        for file in _missing(files, directory):
            print(f"downloading {file.url} to {directory}", file=sys.stderr, flush=True)
            _download(file, directory, cure)

    if not _missing(files, directory):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = directory / ".download.lock"
        once_per_directory(lock, lambda: bool(_missing(files, directory)), download)
    except OSError as error:
        raise DataError(f"cannot write to {directory}: {error.strerror}; {cure}") from error


def once_per_directory(lock: Path, needed: Callable[[], bool], make: Callable[[], None]) -> None:
    """Call `make` if `needed()` is true, in one process at a time; other processes wait.

    If the process that held the lock failed, the waiting processes raise its error at once.
    Otherwise, all ranks of a node would run into the same error one after another.
    """
    with _lock(lock) as (log, waited):
        if not needed():
            return
        if failure := log.read().decode() if waited else "":
            raise DataError(failure)
        log.truncate(0)
        try:
            make()
        except DataError as error:
            log.write(str(error).encode())
            raise


def _missing(files: Sequence[Remote], directory: Path) -> list[Remote]:
    return [file for file in files if _present(directory, file.name) is None]


def _present(directory: Path, name: str) -> Path | None:
    """Return the path of the file, zipped or not, or None if neither exists."""
    candidates = (directory / name.removesuffix(".gz"), directory / name)
    return next((path for path in candidates if path.is_file()), None)


@contextmanager
def _lock(path: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """Lock a file. Yield the open file and whether another process held the lock before."""
    with open(path, "a+b", buffering=0) as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            yield file, waited
        finally:
            # Unlock explicitly: a process that was forked in the meantime has the file open, too,
            # so closing the file here would not release the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


def _download(file: Remote, directory: Path, cure: str) -> None:
    part = directory / f"{file.name}.part"
    algorithm, found = file.checksum.partition(":")[0], ""
    for attempt in range(1, ATTEMPTS + 1):
        resumed = part.exists() and part.stat().st_size > 0
        try:
            _resume(file.url, part)
        except (OSError, http.client.HTTPException) as error:
            # A refusal by the server is final; after a broken connection the download is resumed.
            if not isinstance(error, urllib.error.URLError) and attempt < ATTEMPTS:
                continue
            reason = getattr(error, "reason", None) or error
            raise DataError(f"cannot download {file.url}: {reason}; {cure}") from error
        with open(part, "rb") as content:
            # The published checksum detects damage and wrong versions; md5 does not protect against
            # an attacker.
            new_hash = partial(hashlib.new, algorithm, usedforsecurity=False)
            found = f"{algorithm}:{hashlib.file_digest(content, new_hash).hexdigest()}"
        if found == file.checksum:
            os.replace(part, directory / file.name)
            return
        part.unlink()
        # A resumed file may combine two versions of the file: download it again from the start. If
        # one attempt downloaded the whole file, the file on the server is wrong.
        if not resumed:
            break
    raise DataError(
        f"{file.url} has checksum {found}, expected {file.checksum}. The file was deleted; {cure}"
    )


def _resume(url: str, part: Path) -> None:
    """Append the rest of `url` to `part`."""
    size = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        # 416: the server has no more bytes. The checksum decides whether the file is complete.
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and size:
            return
        raise
    with response:
        # A server may ignore the range and send the whole file (status 200), which replaces `part`.
        resumes = response.status == http.client.PARTIAL_CONTENT
        length = response.headers.get("Content-Length")
        with open(part, "ab" if resumes else "wb") as out:
            start = out.tell()
            # read1 returns the bytes that have arrived, so a broken connection loses none.
            while chunk := response.read1(1 << 20):
                out.write(chunk)
            received = out.tell() - start
            out.flush()
            os.fsync(out.fileno())  # before the rename: a crash must not leave a short file
    if length is not None and received != int(length):
        raise ConnectionError(
            f"connection ended at {received} of {length} bytes: run again to resume"
        )


def published_files(files: Sequence[Remote], directory: Path, *, download: bool) -> list[Path]:
    """Return the paths of `files`, zipped or not. If `download`, fetch missing files first."""
    names = ", ".join(file.name for file in files)
    cure = f"put the files {names} into {directory} or use --dataset digits"
    if download:
        ensure(files, directory, cure=cure)
    if not directory.is_dir():
        raise DataError(f"data directory {directory} does not exist; {cure}")
    if missing := _missing(files, directory):
        raise DataError(f"data directory {directory} has no {missing[0].name}; {cure}")
    return [path for file in files if (path := _present(directory, file.name))]
