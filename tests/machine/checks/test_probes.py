"""Probes: clock offsets, ports and GPU copies; no fault of a peer or a driver can hang them."""

import socket
import sys
import time
from collections.abc import Iterator

import pytest

from tutti.machine.checks.cluster import GpuCopy
from tutti.machine.checks.probe_devices import copy_between_gpus, parse_copies, run_with_timeout
from tutti.machine.checks.probe_network import Endpoint, ProbeClient, ProbeServer, connection_error

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    running = ProbeServer("127.0.0.1")
    yield running
    running.close()


@pytest.mark.parametrize("ahead", [0.0, 2.5, -3600.0])
def test_a_clock_offset_is_measured_to_half_the_round_trip(ahead: float) -> None:
    server = ProbeServer("127.0.0.1", clock=lambda: time.time() + ahead)
    try:
        with ProbeClient(server.endpoint) as client:
            client.hello()
            offset, round_trip = client.clock_offset()
    finally:
        server.close()
    assert abs(offset - ahead) <= round_trip / 2 + 1e-5  # plus the resolution of the clock


def test_both_directions_of_a_link_are_measured(server: ProbeServer) -> None:
    with ProbeClient(server.endpoint) as client:
        client.hello()
        assert client.rate("receive") > 0 and client.rate("send") > 0
        client.hello()  # the connection can still be used


def test_a_closed_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = connection_error(Endpoint("127.0.0.1", port, "token"))
    assert error is not None and "refused" in error and str(port) in error


def test_a_server_with_another_token_is_reported_as_another_program(server: ProbeServer) -> None:
    other = Endpoint("127.0.0.1", server.endpoint.port, "token of another world")
    error = connection_error(other)
    assert error is not None and "another program" in error
    assert connection_error(server.endpoint) is None


def test_invalid_requests_do_not_stop_the_server(server: ProbeServer) -> None:
    for invalid in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * 4096, b'{"kind": 3}\n'):
        with socket.create_connection(("127.0.0.1", server.endpoint.port), 5) as client:
            client.sendall(invalid)
    assert connection_error(server.endpoint) is None


HANGS = """
import sys, time
print('{"src": 0, "dst": 1}'); print('{"src": 0, "dst": 1, "status": "ok", "gbs": 20.0}')
print('{"src": 1, "dst": 0}'); sys.stdout.flush()
time.sleep(3600)
"""


def test_a_copy_that_hangs_is_killed_and_reported() -> None:
    copies = copy_between_gpus([sys.executable, "-c", HANGS], seconds=1.5)
    assert copies == (GpuCopy(0, 1, "ok", 20.0), GpuCopy(1, 0, "hung"))


def test_a_copy_that_crashes_is_reported_with_the_exit_code() -> None:
    lines = ['{"src": 0, "dst": 1}', "a library's warning", '{"src": ']
    (copy,) = parse_copies(lines, -11)
    assert (copy.src, copy.dst, copy.status) == (0, 1, "error") and "-11" in copy.message


HAS_A_CHILD = """
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_child_processes_are_killed_at_the_timeout_too() -> None:
    (pid,), code = run_with_timeout([sys.executable, "-c", HAS_A_CHILD], 1.5)
    assert code is None
    deadline = time.monotonic() + 5
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
