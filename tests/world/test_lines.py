"""The lines between ranks: who is heard, who is believed, and what closes them."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from tutti.world.liveness import Failure, Liveness, open_listener

HOSTS = ["a", "b", "c"]


@pytest.fixture
def ends() -> Iterator[list[Liveness]]:
    """A hub and two members, in one process."""
    listener = open_listener("127.0.0.1")
    address = listener.getsockname()
    hub = Liveness.hub(listener, HOSTS, "start-1", lambda failure: None)
    members = [Liveness.member(r, address, HOSTS, "start-1", lambda failure: None) for r in (1, 2)]
    assert hub.all_have_called(5)
    yield [hub, *members]
    for end in [*members, hub]:
        end.leave()


def test_the_first_failure_is_what_everybody_hears(ends: list[Liveness]) -> None:
    first = ends[2].fail(Failure(2, "c", "out of memory"))
    second = ends[1].fail(Failure(1, "b", "lost its peer"))
    assert first == second == Failure(2, "c", "out of memory")
    assert ends[0].wait(lambda: ends[0].first == first, 5)


def test_who_leaves_on_purpose_has_not_failed(ends: list[Liveness]) -> None:
    ends[1].leave()
    assert ends[2].wait(lambda: {1} <= ends[2].left & ends[2].gone, 5)
    assert ends[0].first is None and ends[2].first is None


def test_a_line_that_breaks_is_a_death(ends: list[Liveness]) -> None:
    hub_line = next(line for line, peer in ends[1]._peers.items() if peer.rank == 0)
    hub_line.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that was killed
    assert ends[2].wait(lambda: ends[2].first is not None, 5)
    assert ends[2].first is not None and ends[2].first.rank == 1


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
def test_strangers_are_not_believed_and_do_no_harm(ends: list[Liveness], words: bytes) -> None:
    assert ends[0]._listener is not None
    with socket.create_connection(ends[0]._listener.getsockname(), timeout=5) as stranger:
        with contextlib.suppress(OSError):  # it may be hung up on already
            stranger.sendall(words)
        time.sleep(0.2)
    assert ends[0].first is None and not ends[0].left
    told = ends[1].fail(Failure(1, "b", "a real one"))  # and the lines still work
    assert ends[0].wait(lambda: ends[0].first == told, 5)


def test_a_forked_helper_does_not_hold_the_line(ends: list[Liveness]) -> None:
    before = count_sockets()
    child = os.fork()
    if child == 0:
        try:
            held = count_sockets()
        finally:
            os._exit(min(held, 100))
    _, status = os.waitpid(child, 0)
    # Hub and members share this process: 2 lines with 2 ends each, 3 pairs, and the listener.
    assert before - os.waitstatus_to_exitcode(status) >= 11


def count_sockets() -> int:
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listdir itself had open
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith("socket:") for name in names)
