"""Nothing may leak: every test is checked for processes, shared memory and scratch it left."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _leavings()
    yield
    deadline = time.monotonic() + 5  # killed processes take a moment to be reaped
    while (left := _leavings() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"the test left behind: {sorted(left)}"


def _leavings() -> set[str]:
    processes = {
        f"process {child.pid} {child.name()}"
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    }
    shared = {str(path) for path in Path("/dev/shm").iterdir()}
    scratch = {str(path) for path in Path(tempfile.gettempdir()).glob("tutti-run-*")}
    return processes | shared | scratch
