"""Liveness connections: their messages and their end; waiting for gloo's threads."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.world.liveness import Failure, Liveness, open_listener
from worlds import run_command, run_warm

HOSTS = ["a", "b", "c"]


@pytest.fixture
def ends() -> Iterator[list[Liveness]]:
    """Yield a hub and two members, in one process."""
    listener = open_listener("127.0.0.1")
    address = listener.getsockname()
    hub = Liveness(0, HOSTS, "start-1", lambda failure: None, listener=listener)
    members = [Liveness(r, HOSTS, "start-1", lambda failure: None, address=address) for r in (1, 2)]
    assert hub.wait_until_all_connected(5)
    yield [hub, *members]
    for end in [*members, hub]:
        end.leave()


def test_every_rank_receives_the_first_failure(ends: list[Liveness]) -> None:
    first = ends[2].report_failure(Failure(2, "c", "out of memory"))
    second = ends[1].report_failure(Failure(1, "b", "lost its peer"))
    assert first == second == Failure(2, "c", "out of memory")
    assert ends[0].wait(lambda: ends[0].first_failure == first, 5)


def test_leaving_is_not_a_failure(ends: list[Liveness]) -> None:
    ends[1].leave()
    assert ends[2].wait(lambda: {1} <= ends[2].finished_ranks & ends[2].disconnected_ranks, 5)
    assert ends[0].first_failure is None and ends[2].first_failure is None


def test_a_lost_connection_is_a_failure(ends: list[Liveness]) -> None:
    connection = next(each for each, peer in ends[1]._peers.items() if peer == 0)
    connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that was killed
    assert ends[2].wait(lambda: ends[2].first_failure is not None, 5)
    assert ends[2].first_failure is not None and ends[2].first_failure.rank == 1


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"5\n",
        b'{"failed": {"rank": 1, "host": "x", "summary": "y"}}\n',
        b'{"hello": 1, "start": "another world"}\n{"left": 2}\n',
        b"x" * 3_000_000,
    ],
)
def test_messages_of_other_processes_are_ignored(ends: list[Liveness], words: bytes) -> None:
    assert ends[0]._listener is not None
    with socket.create_connection(ends[0]._listener.getsockname(), timeout=5) as stranger:
        with contextlib.suppress(OSError):  # the hub may have disconnected already
            stranger.sendall(words)
        time.sleep(0.2)
    assert ends[0].first_failure is None and not ends[0].finished_ranks
    failure = ends[1].report_failure(Failure(1, "b", "a real one"))  # the connections still work
    assert ends[0].wait(lambda: ends[0].first_failure == failure, 5)


def test_a_forked_child_closes_the_connections(ends: list[Liveness]) -> None:
    before = count_sockets()
    child = os.fork()
    if child == 0:
        try:
            held = count_sockets()
        finally:
            os._exit(min(held, 100))
    _, status = os.waitpid(child, 0)
    # Hub and members share this process: 2 connections with 2 ends each, 3 pairs, 1 listener.
    assert before - os.waitstatus_to_exitcode(status) >= 11


def count_sockets() -> int:
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listdir itself had open
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith("socket:") for name in names)


# The switch interval keeps Python's lock in this thread, so a gloo thread that finishes an
# operation just as its tensor is dropped cannot release the tensor. Repeated until that happens.
PROGRAM = """
import sys, time, weakref
import torch, torch.distributed as dist
from tutti.world.liveness import wait_for_gloo_threads
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)

def held_after_an_operation():
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor, async_op=True)
    return weakref.ref(tensor)

end = time.monotonic() + 60
while (held := held_after_an_operation())() is None and time.monotonic() < end:
    pass
before = held() is not None
wait_for_gloo_threads()
print([before, held() is not None])
"""


def test_idle_gloo_threads_have_released_their_tensors(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_warm([tmp_path / "program.py"])

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.lower()) == [True, False]


def test_without_gloo_there_is_no_wait() -> None:
    program = (
        "import time; time.sleep = exit\n"
        "from tutti.world.liveness import wait_for_gloo_threads\n"
        "wait_for_gloo_threads()\n"
        "print('on')"
    )

    assert run_command([sys.executable, "-c", program]).stdout == "on\n"
