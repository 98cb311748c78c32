"""Shared memory: limits are errors, huge pages are aligned, and nothing is left after closing."""

import contextlib
import os
import re
import resource
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_ranks import Group, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core
from worlds import run_command

MB = 1 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Yield a control group of 400 MB."""
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


def test_a_request_above_the_limit_of_the_container_is_an_error_and_not_an_oom_kill(
    small_group: Path,
) -> None:
    done = run_command([sys.executable, "-c", _IN_GROUP, small_group])

    assert done.returncode == 0, done.stderr
    refused, made = done.stdout.splitlines()
    assert refused.startswith(
        f"None shared memory for a heap needs {600 * MB} bytes, but this cont"
    )
    assert made == "True"


@pytest.mark.parametrize("size", [4096, 2 * MB - 1, 2 * MB, 5 * MB + 123])
def test_a_segment_is_contiguous_and_aligned_for_huge_pages(size: int) -> None:
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
    """Return bytes of address space that hold segments."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "tutti-shm:some" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def too_little_memory(g: Group) -> tuple[str, str]:
    with pytest.raises(native.ShmNoMemory) as host:
        if not core().tutti_segment_create(b"all", 1 << 50):
            raise native.last_error()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(native.ShmNoMemory) as limit:
        if not core().tutti_segment_create(b"more", 1 << 24):
            raise native.last_error()
    return str(host.value), str(limit.value)


def test_given_too_little_memory_then_the_error_names_the_bytes_needed() -> None:
    ((host, limit),) = results(too_little_memory, 1)
    assert re.search(r"needs 1125899906842624 bytes, but this host has only \d+ bytes", host)
    assert (
        "needs 16777216 bytes, but the limit on the size of a file (ulimit -f) is 1048576" in limit
    )


def leave_nothing(g: Group) -> None:
    def held() -> tuple[int, str]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), "\n".join(re.findall("/memfd:tutti.*", maps))

    before = held()
    for _ in range(20):
        handle = core().tutti_group_create(b"brief", 0, 1, 0, 1)
        x = np.zeros(10)
        Group(handle, 0, 1).submit(native.ALL_REDUCE, [x], [x], dtype=native.F64).wait()
        core().tutti_group_close(handle)
    assert held() == before


def test_given_a_closed_group_then_no_descriptor_mapping_or_thread_is_left() -> None:
    results(leave_nothing, 1)
