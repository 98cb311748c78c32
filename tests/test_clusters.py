"""Hosts and a Slurm cluster on one machine: they work, and everything is removed on exit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts import hosts_missing, network, two_hosts
from slurm_cluster import slurm_cluster, slurm_missing

needs_hosts = pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))
needs_slurm = pytest.mark.skipif(slurm_missing() is not None, reason=str(slurm_missing()))
pytestmark = pytest.mark.timeout(30)

SERVE_ONE_GREETING = """
import socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    peer, (address, _) = server.accept()
    with peer:
        peer.sendall(f"{socket.gethostname()} greets {address}".encode())
"""
PRINT_GREETING = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=10) as peer:
    print(peer.recv(100).decode())
"""
HOLD_HOSTS = """
import sys
from hosts import two_hosts
with two_hosts() as (a, b):
    a.popen(["sh", "-c", sys.argv[1]])
    print("up", flush=True)
    input()
"""
PRINT_PROCESSES = "import psutil; print([p.name() for p in psutil.process_iter()])"


def links() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def processes_that_mention(text: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the process has ended
            continue
        if text in command:
            found.append(command)
    return found


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_hosts
def test_two_hosts_reach_each_other_by_name() -> None:
    with two_hosts() as (a, b):
        for server, client in ((a, b), (b, a)):
            serving = server.popen([sys.executable, "-c", SERVE_ONE_GREETING])
            assert serving.stdout and serving.stdout.readline() == "listening\n"
            greeted = client.run([sys.executable, "-c", PRINT_GREETING, server.name], timeout=10)
            assert greeted.stdout == f"{server.name} greets {client.address}\n", greeted.stderr
            serving.communicate(timeout=10)
            assert serving.returncode == 0


@needs_hosts
def test_a_host_has_its_own_processes_links_and_shared_memory() -> None:
    with two_hosts() as (a, b):
        assert a.run(["hostname"]).stdout == "n1\n"
        assert a.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
        a.run(["touch", "/dev/shm/of-n1"])
        shell = a.popen(["sh", "-c", "echo up; sleep 1000"], stderr=None)
        assert shell.stdout
        with shell.stdout as lines:
            assert lines.readline() == "up\n"
        assert "of-n1" in a.run(["ls", "/dev/shm"]).stdout
        assert "of-n1" not in b.run(["ls", "/dev/shm"]).stdout
        assert "'sh'" in a.run([sys.executable, "-c", PRINT_PROCESSES]).stdout
        assert "'sh'" not in b.run([sys.executable, "-c", PRINT_PROCESSES]).stdout
        shell.terminate()
        assert shell.wait(10) == -signal.SIGTERM  # a signal reaches the command itself


@needs_hosts
def test_a_command_past_its_timeout_is_ended_and_its_output_kept() -> None:
    with two_hosts() as (a, _):
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            a.run(["sh", "-c", "echo begun; sleep 1000; echo done"], timeout=0.5)
        assert caught.value.output == "begun\n"


@needs_hosts
def test_a_host_cut_off_from_the_bridge_is_out_of_reach() -> None:
    connect = [sys.executable, "-c", "import socket; socket.create_connection(('n1', 1), 1)"]
    with network(2) as made:
        assert "ConnectionRefusedError" in made.hosts[1].run(connect).stderr
        made.hub.run(["ip", "link", "set", "n1", "down"])
        assert "ConnectionRefusedError" not in made.hosts[1].run(connect).stderr


@needs_hosts
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_of_the_hosts_is_left(error: type[BaseException] | None, tmp_path: Path) -> None:
    before = links()
    try:
        with two_hosts() as (a, b):
            sleep = ["sh", "-c", f"sleep 1000; : {tmp_path}"]
            # The first process has its own session, as a daemon has.
            a.popen(["setsid", "--fork", *sleep], stdout=None, stderr=None)
            b.popen(sleep, stdout=None, stderr=None)
            wait_until(lambda: len(processes_that_mention(str(tmp_path))) >= 2)
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt) as caught:
        assert type(caught) is error
    assert links() == before
    assert processes_that_mention(str(tmp_path)) == []
    with pytest.raises(RuntimeError, match="host n1 is off"):
        a.run(["true"])


@needs_hosts
def test_hosts_end_with_a_test_process_that_was_killed(tmp_path: Path) -> None:
    sleeper = f"sleep 1000; : {tmp_path}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", HOLD_HOSTS, sleeper]
    with subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout and owner.stdout.readline() == "up\n"
        wait_until(lambda: len(processes_that_mention(sleeper)) >= 2)  # including the owner itself
        owner.kill()
    wait_until(lambda: processes_that_mention(sleeper) == [])


@needs_slurm
def test_srun_starts_tasks_on_both_nodes() -> None:
    with slurm_cluster() as cluster:
        done = cluster.run(["srun", "-N2", "--ntasks-per-node=2", "hostname"])
        assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2"], cluster.logs()


@needs_slurm
def test_a_batch_job_runs_and_writes_its_output(tmp_path: Path) -> None:
    with slurm_cluster() as cluster:
        output = tmp_path / "job.out"
        submit = ["sbatch", "--parsable", "-N2", f"--output={output}", "--wrap"]
        good = cluster.run([*submit, "srun hostname"])
        assert cluster.wait_for_job(good.stdout.strip(), timeout=15) == "COMPLETED", cluster.logs()
        assert sorted(output.read_text().split()) == ["n1", "n2"]
        bad = cluster.run([*submit, "exit 3"])
        assert cluster.wait_for_job(bad.stdout.strip(), timeout=15) == "FAILED", cluster.logs()


@needs_slurm
def test_a_client_past_its_timeout_leaves_the_nodes_free() -> None:
    with slurm_cluster() as cluster:
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.run(["srun", "-N2", "--exclusive", "sleep", "1000"], timeout=1)
        done = cluster.run(["srun", "-N2", "--exclusive", "hostname"], timeout=15)
        assert sorted(done.stdout.split()) == ["n1", "n2"], cluster.logs()


@needs_slurm
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_of_a_cluster_is_left(error: type[BaseException] | None) -> None:
    before = links()
    try:
        with slurm_cluster() as cluster:
            assert cluster.folder.exists()
            assert processes_that_mention(str(cluster.folder))
            cluster.run(["sbatch", "-N2", "--output=/dev/null", "--wrap", "srun sleep 1000"])
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt) as caught:
        assert type(caught) is error
    assert links() == before
    assert processes_that_mention(str(cluster.folder)) == []
    assert not cluster.folder.exists()
