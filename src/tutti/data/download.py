"""Files from the network: checked, resumed, whole or not there at all, and once per directory.

A file grows as `NAME.part` and gets its name only when its checksum is right, so a name in the
directory means a complete file. One process downloads under a lock while the others wait and then
find the files: no world has to exist, and ranks on several nodes may share the directory or not.
The kernel drops the lock of a process that dies.
"""

import fcntl
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tutti.data.errors import DataError

CHUNK = 1 << 20
TIMEOUT_S = 30.0  # of silence, not of the whole file
ATTEMPTS = 3  # each goes on where the one before broke off


@dataclass(frozen=True)
class Remote:
    """A published file: its name, where it is, and its checksum as `md5:…` or `sha256:…`."""

    name: str
    url: str
    checksum: str


def ensure(
    files: Sequence[Remote],
    directory: Path,
    *,
    cure: str,
    note: Callable[[str], None] | None = None,
) -> None:
    """Downloads those of `files` that `directory` lacks; `cure` is what to do instead."""
    if not _missing(files, directory):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / ".download.lock") as (log, waited):
            missing = _missing(files, directory)
            # The process that was waited for may have failed: failing with its reason at once is
            # better than for every rank of a node to wait for the same timeout in turn.
            failed = log.read().decode() if waited else ""
            if missing and failed:
                raise DataError(failed)
            log.truncate(0)
            try:
                for file in missing:
                    if note:
                        note(f"downloading {file.url} to {directory}")
                    _download(file, directory, cure)
            except DataError as error:
                log.write(str(error).encode())
                raise
    except OSError as error:
        raise DataError(f"cannot write to {directory}: {error.strerror}; {cure}") from error


def _missing(files: Sequence[Remote], directory: Path) -> list[Remote]:
    return [file for file in files if _present(directory, file.name) is None]


def _present(directory: Path, name: str) -> Path | None:
    """The file of that name, or its unzipped form, which is as good."""
    candidates = (directory / name.removesuffix(".gz"), directory / name)
    return next((path for path in candidates if path.is_file()), None)


@contextmanager
def _lock(path: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """The lock file, open and held, and whether another process had it first."""
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
            # By name and not by closing alone: a process forked meanwhile has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)


class _BrokenOffError(OSError):
    """The connection ended before the file did."""


def _download(file: Remote, directory: Path, cure: str) -> None:
    part = directory / f"{file.name}.part"
    seen = ""
    for attempt in range(1, ATTEMPTS + 1):
        resumed = part.exists() and part.stat().st_size > 0
        try:
            _continue(file.url, part)
        except (OSError, http.client.HTTPException) as error:
            # A server that cannot be reached or says no is asked once; a broken connection is not
            # the server's last word.
            final = isinstance(error, urllib.error.URLError) or attempt == ATTEMPTS
            if not final:
                continue
            reason = getattr(error, "reason", None) or error
            raise DataError(f"cannot download {file.url}: {reason}; {cure}") from error
        seen = _checksum(part, file.checksum.partition(":")[0])
        if seen == file.checksum:
            os.replace(part, directory / file.name)
            return
        part.unlink()
        # What was there before may have been another version of the file: once more from the
        # start. A file that came wrong in one piece is wrong at its source.
        if not resumed:
            break
    raise DataError(
        f"{file.url} has checksum {seen}, expected {file.checksum}, and was not kept; {cure}"
    )


def _continue(url: str, part: Path) -> None:
    """Appends to `part` what it still lacks of `url`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        # 416: nothing lies beyond what we have. The checksum says whether it is the file.
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return
        raise
    with response:
        # A server may ignore the range and send the whole file (200): then start over.
        resumes = response.status == http.client.PARTIAL_CONTENT
        length = response.headers.get("Content-Length")
        with open(part, "ab" if resumes else "wb") as out:
            start = out.tell()
            while chunk := response.read1(CHUNK):  # what has come, so that a break loses nothing
                out.write(chunk)
            got = out.tell() - start
            out.flush()
            os.fsync(out.fileno())  # before the name: a crash must not leave a short file under it
    if length is not None and got != int(length):
        raise _BrokenOffError(f"connection ended after {got} of {length} bytes, run again to go on")


def _checksum(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        # Against damage and mix-ups, as published; md5 is no proof against an attacker.
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def find(files: Sequence[Remote], directory: Path, *, cure: str) -> list[Path]:
    """Where `files` lie in `directory`, zipped or not; all must be there."""
    if not directory.is_dir():
        raise DataError(f"data directory {directory} does not exist; {cure}")
    found = []
    for file in files:
        path = _present(directory, file.name)
        if path is None:
            raise DataError(f"data directory {directory} has no {file.name}; {cure}")
        found.append(path)
    return found


def cure_for(files: Sequence[Remote], directory: Path, otherwise: str) -> str:
    """The end of an error line: where the files belong, and what works without them."""
    return f"put the files {', '.join(f.name for f in files)} into {directory} or use {otherwise}"
