"""Nothing may leak: every test is checked for processes, shared memory and scratch it left."""

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

pytest_plugins = ["measured"]

# A process whose parent has died comes to us instead of to init, so that no leaked one is missed.
_PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

# A shell's background job ignores Ctrl-C, and so would all ranks, to whom the tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For torch's threads, here and in all ranks: those that wait sleep, and leave the cores to others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Properties are searched without a clock: how long an example takes says nothing of it.
settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")


@pytest.fixture(scope="session", autouse=True)
def scratch_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Temporary files of this session only: other sessions on this machine have theirs.
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _leavings()
    yield
    deadline = time.monotonic() + 5  # killed processes take a moment to be reaped
    while (left := _leavings() - before) and time.monotonic() < deadline:
        _bury_orphans()
        time.sleep(0.05)
    assert not left, f"the test left behind: {sorted(left)}"


def _bury_orphans() -> None:
    """Wait for dead processes that came to us when their parents died: nobody else will."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _leavings() -> set[str]:
    processes = {
        f"process {child.pid} {child.name()}"
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        if child.pid not in standing_processes()
    }
    # By name: other programs on this machine may use shared memory, too.
    shared = {str(path) for path in Path("/dev/shm").glob("*tutti*")}
    scratch = {str(path) for path in Path(tempfile.gettempdir()).glob("tutti-run-*")}
    return processes | shared | scratch
