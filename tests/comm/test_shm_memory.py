"""Where shared memory comes from: a container's limit is an error, large pages have their place."""

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.comm.shm.native import core
from worlds import run_command

MB = 1 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 400 MB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, limit = Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
            break
        if controllers == "" and Path(f"/sys/fs/cgroup{path}/memory.current").exists():
            parent, limit = Path(f"/sys/fs/cgroup{path}"), "memory.max"
            break
    else:
        pytest.skip("no control group of memory")
    made = parent / f"tutti-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        try:
            made.mkdir()
            stack.callback(made.rmdir)
            (made / limit).write_text(str(400 * MB))
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        yield made


_IN_GROUP = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
from tutti.comm.shm.native import core
print(core().tutti_segment_create(b"a heap", 600 << 20), core().tutti_error().decode())
print(bool(core().tutti_segment_create(b"a heap", 100 << 20)))
"""


def test_more_than_the_container_has_is_an_error_and_not_a_kill(small_group: Path) -> None:
    done = run_command([sys.executable, "-c", _IN_GROUP, small_group])

    assert done.returncode == 0, done.stderr
    refused, made = done.stdout.splitlines()
    assert refused.startswith(
        f"None shared memory for a heap needs {600 * MB} bytes, and this cont"
    )
    assert made == "True"


@pytest.mark.parametrize("size", [4096, 2 * MB - 1, 2 * MB, 5 * MB + 123])
def test_a_segment_is_whole_and_lies_where_large_pages_can(size: int) -> None:
    before = _mapped()
    segment = core().tutti_segment_create(b"some", size)
    base = core().tutti_segment_base(segment)

    assert _mapped() - before == -(-size // os.sysconf("SC_PAGESIZE")) * os.sysconf("SC_PAGESIZE")
    if size >= 2 * MB:
        assert base % (2 * MB) == 0
    core().tutti_store(base, 1)
    core().tutti_store(base + size // 8 * 8 - 8, 2)
    core().tutti_segment_close(segment)
    assert _mapped() == before


def _mapped() -> int:
    """Bytes of address space that hold segments."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "tutti-shm:some" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)
