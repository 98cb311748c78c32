"""Every test is checked for leaked processes, shared memory and temporary folders."""

import contextlib
import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from worlds import standing_processes

pytest_plugins = ["alone", "measured"]

# Orphaned processes become children of this process, not of init, so that leaks are found.
_PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

# A background job of a shell ignores SIGINT, and its child processes inherit that. Tests send
# SIGINT to ranks, so the default handler is restored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Waiting threads of torch, here and in all ranks, sleep instead of spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Without these, output that is no terminal has its full width. pytest-xdist sets them.
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)

# Examples of property tests have no deadline, because no test judges a time.
settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")


@pytest.fixture(scope="session", autouse=True)
def temporary_folder_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    # A temporary folder per session: several test sessions may run on one machine.
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(autouse=True)
def check_for_leaks() -> Iterator[None]:
    before = _resources()
    yield
    deadline = time.monotonic() + 5  # killed processes take a moment to be reaped
    while (left := _resources() - before) and time.monotonic() < deadline:
        _reap_orphans()
        time.sleep(0.05)
    assert not left, f"the test left behind: {sorted(left)}"


def _reap_orphans() -> None:
    """Reap ended processes whose parents ended before them."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _resources() -> set[str]:
    processes = {
        f"process {child.pid} {child.name()}"
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        if child.pid not in standing_processes()
    }
    # Only names with tutti: other programs use shared memory, too.
    # The records of a job that has failed stay for `tutti why`, but only the newest ones.
    shared_memory = {
        str(path)
        for path in Path("/dev/shm").glob("*tutti*")
        if not path.name.startswith("tutti-observe-")
    }
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob("tutti-run-*")}
    return processes | shared_memory | folders
