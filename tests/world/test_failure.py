"""One rank fails: all ranks end, the message names the rank, no process remains."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hosts import hosts_missing, two_hosts
from tutti.world.failure import first_error
from tutti.world.launchers import free_port
from warm import WarmProcess
from worlds import clean_environment, run_command, run_tutti, start_warm

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, tutti
what, who = sys.argv[1], int(sys.argv[2])
with tutti.init() as world:
    x = torch.ones(1_000_000)
    for step in range(1_000_000):
        if step == 20 and world.rank == who:
            if what == "raise":
                raise ValueError("the loss is a teapot")
            if what == "memory":
                raise MemoryError("no more")
            if what == "leave":
                sys.exit(0)
            if what == "code":
                import atexit
                atexit.register(time.sleep, 60)  # other ranks end first, and this rank is stopped
                sys.exit(7)
            if what == "segfault":
                import ctypes
                ctypes.string_at(0)
        if step == 20 and what == "stuck" and world.rank != who:
            time.sleep(1000)
        if step == 20 and what == "stuck":
            os.kill(os.getpid(), 9)
        if step == 20 and what == "alone":
            while True:
                time.sleep(0.1)
                if world.rank == who:
                    raise ValueError("nobody is in a collective\\nsecond line")
        if step == 20:
            print(f"running {os.getpid()}", flush=True)
        dist.all_reduce(x)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def world_of_four(program: Path) -> Iterator[WarmProcess]:
    """Yield four ranks that are all in the middle of all-reduces of 4 MB."""
    with start_warm(
        ["-m", "tutti", "run", "-n", "4", program, "nothing", "0"],
        env={"TMPDIR": str(program.parent)},  # a killed one cannot tidy up
    ) as launcher:
        assert launcher.stdout is not None
        try:
            pids = {}
            while len(pids) < 4:
                words = launcher.stdout.readline().split()  # [rank N] running PID
                assert words, "the world ended before it began"
                pids[int(words[1].rstrip("]"))] = int(words[3])
            launcher.pids = pids  # type: ignore[attr-defined]
            yield launcher
        finally:
            launcher.kill()


def all_gone(pids: dict[int, int], within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids.values()):
            return True
        time.sleep(0.02)
    return False


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_an_all_reduce_ends_all_four(
    world_of_four: WarmProcess, victim: int
) -> None:
    pids = world_of_four.pids  # type: ignore[attr-defined]
    os.kill(pids[victim], signal.SIGKILL)
    _, errors = world_of_four.communicate(timeout=10)
    assert all_gone(pids, within=0.1)
    assert world_of_four.returncode == 128 + signal.SIGKILL
    assert f"rank {victim} on {os.uname().nodename} was killed by SIGKILL" in errors
    assert "the other 3 were stopped because of it" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_reach_every_rank(
    world_of_four: WarmProcess, number: signal.Signals
) -> None:
    world_of_four.send_signal(number)
    _, errors = world_of_four.communicate(timeout=15)
    assert world_of_four.returncode == 128 + number
    assert f"stopped by {number.name}: all 4 ranks have ended" in errors
    assert all_gone(world_of_four.pids, within=0.1)  # type: ignore[attr-defined]
    assert "Traceback" not in errors


def test_a_killed_launcher_leaves_no_orphans(world_of_four: WarmProcess) -> None:
    world_of_four.kill()
    world_of_four.communicate(timeout=10)
    assert all_gone(world_of_four.pids, within=5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_is_printed_once_and_the_other_ranks_name_its_rank(
    program: Path, who: int
) -> None:
    done = run_tutti("run", "-n", 3, program, "raise", who)
    host = os.uname().nodename
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert f"rank {who} on {host} failed: ValueError: the loss is a teapot" in done.stderr
    for other in {0, 1, 2} - {who}:
        assert f"rank {other} on {host} stopped: rank {who} on {host} failed first" in done.stderr


def test_a_failure_outside_of_any_collective_is_printed_once_and_ends_all(program: Path) -> None:
    done = run_tutti("run", "-n", 2, program, "alone", 1)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "ValueError: nobody is in a collective …; the other 1 was stopped" in done.stderr


def test_a_rank_whose_output_is_hidden_still_shows_its_traceback(program: Path) -> None:
    done = run_tutti("run", "-n", 2, "--show", "first", program, "memory", 1)
    assert done.stderr.count("MemoryError: no more") >= 2  # the summary and the traceback
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert 'raise MemoryError("no more")' in done.stderr


def test_commands_print_the_error_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Rank 0, the only one whose output is shown, fails with the same error a second later."""
    (tmp_path / "program.py").write_text(
        "import time, tutti\n"
        "with tutti.init() as world:\n"
        "    time.sleep(world.rank == 0)\n"
        "    raise ValueError('the loss is a teapot')\n"
    )
    launch = (
        "import sys; from tutti.world.launch import LocalWorld; "
        "command = [sys.executable, 'program.py']; "
        "sys.exit(LocalWorld(command, 2, 'cpu', show='first', reported_codes=(1, 2)).run())"
    )
    done = run_command([sys.executable, "-c", launch], cwd=tmp_path)
    assert done.returncode == 1
    assert f"rank 1 on {os.uname().nodename} failed" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "raise ValueError('the loss is a teapot')" in done.stderr


def test_a_rank_that_ends_early_with_exit_code_zero_is_a_failure(program: Path) -> None:
    done = run_tutti("run", "-n", 3, program, "leave", 1)
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "while other ranks still communicated with it" in done.stderr


def test_the_exit_code_is_that_of_the_first_failure(program: Path) -> None:
    assert run_tutti("run", "-n", 2, program, "code", 1).returncode == 7


def test_a_segmentation_fault_is_named(program: Path) -> None:
    done = run_tutti("run", "-n", 2, program, "segfault", 0)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 0" in done.stderr and "was killed by SIGSEGV" in done.stderr


def test_ranks_stuck_outside_a_collective_end_without_any_launcher(
    program: Path,
) -> None:
    # Three plain processes with the four variables: no launcher would kill them.
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start_warm([program, "stuck", "1"], env=common | {"RANK": str(rank)}) for rank in range(3)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1]
    assert "rank 1" in errors[0] and "died without reporting an error" in errors[0]
    assert "rank 1" in errors[2] and "failed first" in errors[2]


def test_a_dead_rank_on_another_host_is_named(tmp_path: Path) -> None:
    if hosts_missing() is not None:
        pytest.skip(str(hosts_missing()))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}
    with two_hosts() as hosts:
        ranks = [
            host.popen(
                [sys.executable, str(program), "stuck", "1"],
                env=clean_environment() | common | {"RANK": str(rank)},
            )
            for rank, host in enumerate(hosts)
        ]
        _, errors = ranks[0].communicate(timeout=60)
        ranks[1].communicate(timeout=60)
    assert ranks[0].returncode == 1
    assert "rank 0 on n1 stopped: rank 1 on n2 failed first: it died" in errors


def test_a_script_may_destroy_the_process_group_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch.distributed as dist, tutti\n"
        "world = tutti.init()\n"
        "dist.destroy_process_group()\n"
        "time.sleep(2 * (world.rank == 0))  # rank 0 is still busy when the other has ended\n"
    )
    done = run_tutti("run", "-n", 2, script)
    assert done.returncode == 0 and done.stderr == ""


def test_the_first_error_in_the_output_is_not_that_of_a_rank_that_lost_its_peer() -> None:
    """The lines of two ranks alternate, and the rank that lost its peer comes first."""
    lost = "[rank 0] [rank0]: "
    failed = "[rank 1] [rank1]: "
    lines = [
        "[rank 0] step 1",
        f"{lost}Traceback (most recent call last):",
        f"{failed}Traceback (most recent call last):",
        f"{lost}RuntimeError: Connection closed by peer [127.0.0.1]:22153",
        f"{failed}ValueError: a message",
        f"{failed}of two lines",
        "tutti run: rank 1 on host failed with exit code 1",
    ]
    assert first_error(lines) == [lines[2], lines[4], lines[5]]
    assert first_error(lines[:2] + lines[3:4]) == [lines[1], lines[3]]
    assert first_error(["[rank 0] step 1"]) == []
