"""A test marked `measured` runs alone: no other test process of this working tree runs a test then.

`make test` runs tests in several processes. Each takes a lock for the time of one test: a shared
lock, or for a measured test the only one.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Locks on what is in the working tree anyway leave no file behind.
_ENTRANCE = os.open(__file__, os.O_RDONLY)
_MACHINE = os.open(Path(__file__).parent, os.O_RDONLY)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the timeout of a test begins after the wait
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    alone = item.get_closest_marker("measured") is not None
    fcntl.flock(_ENTRANCE, fcntl.LOCK_EX)  # a test that waits to be alone keeps later tests out
    fcntl.flock(_MACHINE, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    fcntl.flock(_ENTRANCE, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        fcntl.flock(_MACHINE, fcntl.LOCK_UN)
