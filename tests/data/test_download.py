"""Downloads from a real server that disconnects, sends wrong data, or is not there."""

import fcntl
import hashlib
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import IO

import pytest

from tutti.data import DataError, cifar100_dataset, fashion_mnist_dataset, image_datasets
from tutti.data.download import Remote, _lock, ensure

CONTENT = bytes(range(256)) * 20_000  # 5 MB, several chunks
CURE = "put it there yourself"


class Server(ThreadingHTTPServer):
    """Serves CONTENT under any name, with ranges; records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.ranges = True
        self.break_after: list[int] = []  # bytes after which the next responses end
        self.status: int | None = None
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append((self.path, wanted))
        if server.status:
            return self.send_error(server.status)
        start = 0
        if wanted and server.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(server.content):
                return self.send_error(416)
            self.send_response(206)
            whole = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        else:
            self.send_response(200)
        body = server.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.break_after:
            body = body[: server.break_after.pop(0)]
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote(server: Server, content: bytes = CONTENT, algorithm: str = "md5") -> Remote:
    digest = hashlib.new(algorithm, content).hexdigest()
    return Remote("file.bin", f"{server.url}/file.bin", f"{algorithm}:{digest}")


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".download.lock")


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_file_is_downloaded_checked_and_named_once(
    server: Server, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        ensure([remote(server, algorithm=algorithm)], tmp_path / "new", cure=CURE)
    assert (tmp_path / "new" / "file.bin").read_bytes() == CONTENT
    assert files(tmp_path / "new") == ["file.bin"]
    assert server.requests == [("/file.bin", None)]
    assert capsys.readouterr().err.count("downloading ") == 1


def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.break_after = [1_000_003]
    ensure([remote(server)], tmp_path, cure=CURE)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.requests[1:] == [("/file.bin", "bytes=1000003-")]


def test_an_interrupted_download_is_resumed_by_the_next_run(server: Server, tmp_path: Path) -> None:
    server.break_after = [10, 20, 30]
    with pytest.raises(DataError, match=r"connection ended at 30 of .*; put it there yourself"):
        ensure([remote(server)], tmp_path, cure=CURE)
    assert files(tmp_path) == ["file.bin.part"]
    ensure([remote(server)], tmp_path, cure=CURE)
    assert server.requests[-1] == ("/file.bin", "bytes=60-")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.ranges, server.break_after = False, [1000]
    ensure([remote(server)], tmp_path, cure=CURE)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.requests) == 2  # the second answer was used, and not put after the first


def test_a_complete_partial_file_is_only_renamed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    ensure([remote(server)], tmp_path, cure=CURE)
    assert files(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("stale", [b"of another version", CONTENT + b"longer", CONTENT[:-1] + b"x"])
def test_a_partial_file_of_another_version_is_discarded(
    server: Server, tmp_path: Path, stale: bytes
) -> None:
    (tmp_path / "file.bin.part").write_bytes(stale)
    ensure([remote(server)], tmp_path, cure=CURE)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=r"has checksum md5:\w+, expected md5:\w+") as error:
        ensure([remote(server)], tmp_path, cure=CURE)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []
    assert len(server.requests) == 1


def test_a_server_error_is_reported_with_the_cure(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(DataError, match=r"cannot download http.*: Not Found; put it there"):
        ensure([remote(server)], tmp_path, cure=CURE)
    assert files(tmp_path) == []


def test_offline_names_the_files_the_directory_and_the_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as server:  # bound, never serving, and closed: no process listens there
        nowhere = server.url
    moved = [replace(file, url=nowhere) for file in image_datasets.FASHION_MNIST_FILES]
    monkeypatch.setattr(image_datasets, "FASHION_MNIST_FILES", moved)
    archive = replace(image_datasets.CIFAR100_ARCHIVE, url=nowhere)
    monkeypatch.setattr(image_datasets, "CIFAR100_ARCHIVE", archive)
    with pytest.raises(DataError) as error:
        fashion_mnist_dataset(tmp_path / "fm", download=True)
    message = str(error.value)
    assert "cannot download" in message
    assert "train-images-idx3-ubyte.gz" in message
    assert "t10k-labels-idx1-ubyte.gz" in message
    assert f"into {tmp_path / 'fm'} or use --dataset digits" in message
    assert "\n" not in message
    with pytest.raises(DataError, match=r"cifar-100-python\.tar\.gz into .* --dataset digits"):
        cifar100_dataset(tmp_path / "cifar", download=True)


def test_a_directory_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to .*/file/data"):
        ensure([remote(server)], tmp_path / "file" / "data", cure=CURE)


def test_an_unzipped_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"unzipped by hand")
    ensure([Remote("x.gz", f"{server.url}/x.gz", "md5:0")], tmp_path, cure=CURE)
    assert server.requests == []


def ensure_and_report(file: Remote, directory: Path, outcome: "multiprocessing.Queue[str]") -> None:
    try:
        ensure([file], directory, cure=CURE)
        outcome.put("complete" if (directory / file.name).read_bytes() == CONTENT else "wrong")
    except DataError as error:
        outcome.put(str(error))


def at_once(file: Remote, directory: Path, count: int) -> list[str]:
    """Return the results of `count` processes that download one file at the same time."""
    context = multiprocessing.get_context("fork")
    outcome: multiprocessing.Queue[str] = context.Queue()
    arguments = (file, directory, outcome)
    processes = [context.Process(target=ensure_and_report, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    results = [outcome.get() for _ in processes]
    for process in processes:
        process.join()
    return results


def test_concurrent_processes_download_once(server: Server, tmp_path: Path) -> None:
    assert at_once(remote(server), tmp_path, 4) == ["complete"] * 4
    assert server.requests == [("/file.bin", None)]


def wait_and_tell(
    file: Remote, directory: Path, outcome: "multiprocessing.Queue[str]", waits: Event
) -> None:
    """Like ensure_and_report, and sets an event before it waits for the lock."""
    flock = fcntl.flock

    def telling(lock: IO[bytes], how: int) -> None:
        if how == fcntl.LOCK_EX:
            waits.set()
        flock(lock, how)

    fcntl.flock = telling  # type: ignore[assignment]
    ensure_and_report(file, directory, outcome)


def test_a_process_that_waited_for_a_failed_download_fails_with_the_same_error(
    server: Server, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    outcome: multiprocessing.Queue[str] = context.Queue()
    waits = context.Event()
    # Given a process that holds the lock, fails and says so, while another waits
    with _lock(tmp_path / ".download.lock") as (log, _):
        arguments = (remote(server), tmp_path, outcome, waits)
        waiting = context.Process(target=wait_and_tell, args=arguments)
        waiting.start()
        waits.wait()
        log.write(b"no way out of here")
    # Then the one that waited does not try for itself
    assert outcome.get() == "no way out of here"
    waiting.join()
    assert server.requests == []
    # And a later run, which did not wait, does
    assert at_once(remote(server), tmp_path, 1) == ["complete"]


def test_the_lock_of_a_killed_process_is_released(server: Server, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    # Given a server that stops in the midst of the file, and a process killed while it waits
    release = threading.Event()

    class Stuck(Handler):
        def do_GET(self) -> None:
            self.server.requests.append((self.path, self.headers.get("Range")))
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:100_000])
            release.wait()

    server.RequestHandlerClass = Stuck
    outcome: multiprocessing.Queue[str] = context.Queue()
    victim = context.Process(target=ensure_and_report, args=(remote(server), tmp_path, outcome))
    victim.start()
    part = tmp_path / "file.bin.part"
    while not server.requests or not part.exists():
        threading.Event().wait(0.01)
    victim.kill()
    victim.join()
    release.set()
    # When the next one comes, then it needs no lock to be broken by hand
    server.RequestHandlerClass = Handler
    assert at_once(remote(server), tmp_path, 1) == ["complete"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
