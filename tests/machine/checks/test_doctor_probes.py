"""Live probes: what they say of clocks, ports and copies, and that nothing can hang them."""

import socket
import sys
import time

import pytest

from tutti.machine.checks.cluster import GpuCopy
from tutti.machine.checks.probe_devices import copy_between_gpus, parse_copies, run_with_timeout
from tutti.machine.checks.probe_network import (
    Endpoint,
    ProbeClient,
    ProbeServer,
    connection_error,
)

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("ahead", [0.0, 2.5, -3600.0])
def test_a_clock_that_is_off_is_measured_over_a_connection(ahead: float) -> None:
    service = ProbeServer("127.0.0.1", clock=lambda: time.time() + ahead)
    try:
        with ProbeClient(service.endpoint) as caller:
            caller.hello()
            offset, round_trip = caller.clock_offset()
    finally:
        service.close()
    # Cristian's estimate is sure to half the round trip; plus the clock's own grain.
    assert abs(offset - ahead) <= round_trip / 2 + 1e-5


def test_both_ways_of_a_link_are_measured() -> None:
    service = ProbeServer("127.0.0.1")
    try:
        with ProbeClient(service.endpoint) as caller:
            caller.hello()
            assert caller.send_rate() > 0 and caller.receive_rate() > 0
            caller.hello()  # and the two are still in step
    finally:
        service.close()


def test_a_closed_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    said = connection_error(Endpoint("127.0.0.1", port, "token"))
    assert said is not None and "refused" in said and str(port) in said


def test_a_stranger_at_the_port_is_not_taken_for_a_rank() -> None:
    service = ProbeServer("127.0.0.1")
    try:
        other = Endpoint("127.0.0.1", service.endpoint.port, "another world's token")
        said = connection_error(other)
        assert said is not None and "another program" in said
        assert connection_error(service.endpoint) is None
    finally:
        service.close()


def test_garbage_does_not_end_the_service() -> None:
    service = ProbeServer("127.0.0.1")
    try:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * 4096, b'{"kind": 3}\n'):
            with socket.create_connection(("127.0.0.1", service.endpoint.port), 5) as stranger:
                stranger.sendall(garbage)
        assert connection_error(service.endpoint) is None
    finally:
        service.close()


HANGS = """
import sys, time
print('{"src": 0, "dst": 1}'); print('{"src": 0, "dst": 1, "status": "ok", "gbs": 20.0}')
print('{"src": 1, "dst": 0}'); sys.stdout.flush()
time.sleep(3600)
"""


def test_a_copy_that_hangs_is_killed_and_named() -> None:
    copies = copy_between_gpus([sys.executable, "-c", HANGS], seconds=1.5)
    assert copies == (GpuCopy(0, 1, "ok", 20.0), GpuCopy(1, 0, "hung"))


def test_a_copy_that_crashes_is_named() -> None:
    lines = ['{"src": 0, "dst": 1}', "a library's warning", '{"src": ']
    (copy,) = parse_copies(lines, -11)
    assert (copy.src, copy.dst, copy.status) == (0, 1, "error") and "-11" in copy.message


HAS_A_HELPER = """
import subprocess, time
helper = subprocess.Popen(["sleep", "600"])
print(helper.pid, flush=True)
time.sleep(600)
"""


def test_helpers_of_a_watched_process_end_with_it() -> None:
    (pid,), code = run_with_timeout([sys.executable, "-c", HAS_A_HELPER], 1.5)
    assert code is None
    deadline = time.monotonic() + 5
    while _alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
