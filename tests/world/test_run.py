"""tutti run: arguments, output, log files, exit codes, wrong usage."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worlds import TUTTI, clean_environment, run_command, run_tutti, start_warm


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "print('warning', file=sys.stderr)\n"
    )
    return path


def test_every_rank_gets_the_arguments_of_the_script(script: Path) -> None:
    done = run_command([*TUTTI, "run", "-n", 2, script, "--ranks", "7", "a b; $(id)"])
    assert done.returncode == 0
    arguments = "['--ranks', '7', 'a b; $(id)']"
    assert set(done.stdout.splitlines()) == {
        f"[rank 0] rank 0 of 2 {arguments}",
        f"[rank 1] rank 1 of 2 {arguments}",
    }
    assert done.stderr.count("warning") == 2


def test_show_first_shows_only_rank_0_unchanged(script: Path) -> None:
    done = run_tutti("run", "-n", 3, "--show", "first", script)
    assert done.stdout == "rank 0 of 3 []\n"
    assert done.stderr == "warning\n"


def test_each_rank_has_a_log_file(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "deep" / "logs"
    run_tutti("run", "-n", 2, "--log-dir", logs, "--show", "first", script)
    assert sorted(path.name for path in logs.iterdir()) == ["rank0.log", "rank1.log"]
    assert set((logs / "rank1.log").read_text().splitlines()) == {"rank 1 of 2 []", "warning"}


@pytest.mark.parametrize("tutti", [TUTTI, [str(Path(sys.executable).with_name("tutti"))]])
def test_a_module_in_the_current_directory_can_be_run(tutti: list[str], tmp_path: Path) -> None:
    if len(tutti) == 1 and not Path(tutti[0]).exists():
        pytest.skip("the console script is not installed")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("print('hello from a module')\n")
    done = run_command([*tutti, "run", "-n", 1, "-m", "package.module"], cwd=tmp_path)
    assert done.stdout == "hello from a module\n", done.stderr


def test_an_executable_can_be_run(tmp_path: Path) -> None:
    script = tmp_path / "hello.sh"
    script.write_text("#!/bin/sh\necho rank $RANK\n")
    script.chmod(0o755)
    done = run_command([*TUTTI, "run", "-n2", script])
    assert set(done.stdout.splitlines()) == {"[rank 0] rank 0", "[rank 1] rank 1"}


def test_output_is_forwarded_as_bytes(tmp_path: Path) -> None:
    script = tmp_path / "greek.py"
    script.write_text("import sys\nsys.stdout.buffer.write('λ 50%\\r'.encode())\n")
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    run = [*TUTTI, "run", "-n", 1, "--log-dir", tmp_path, script]
    assert run_command(run, env=ascii_only).stdout == "λ 50%\n"


def test_a_run_under_nohup_ignores_sighup(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(1)\nprint('done')\n")
    with start("nohup", *TUTTI, "run", "-n", 1, "--log-dir", tmp_path, script) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.send_signal(signal.SIGHUP)
        assert launcher.communicate(timeout=20)[0] == "done\n"


def test_ranks_have_the_variables_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "env.py"
    script.write_text(
        "import os\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR'.split()\n"
        "print([os.environ[name] for name in names], 'SLURM_STEP_ID' in os.environ)\n"
    )
    outer = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "1"}
    done = run_tutti("run", "-n", 1, script, env=outer)
    assert done.stdout == "['0', '0', '1', '1', '0', '127.0.0.1'] False\n"


def test_child_processes_that_a_rank_left_running_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, flush=True)\n"
    )
    done = run_tutti("run", "-n", 1, script, timeout=30)
    pid = int(done.stdout)
    time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_user_signals_are_forwarded_to_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    with start_warm(["-m", "tutti", "run", "-n", 2, script]) as launcher:
        assert launcher.stdout is not None
        ready = {launcher.stdout.readline(), launcher.stdout.readline()}
        assert ready == {"[rank 0] ready\n", "[rank 1] ready\n"}
        launcher.send_signal(signal.SIGUSR1)
        rest, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 0
    assert rest.count("saved") == 2


def test_a_closed_output_pipe_does_not_end_the_run(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = [*TUTTI, "run", "-n", "2", "--log-dir", str(logs), str(script)]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            command, env=clean_environment(), stdout=closed, stderr=subprocess.PIPE, timeout=30
        )
    assert b"Traceback" not in done.stderr
    assert "rank 1 of 2 []" in (logs / "rank1.log").read_text()


def test_ctrl_c_prints_no_traceback_of_ranks_that_still_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import slow\n")
    with start(*TUTTI, "run", "-n", 4, script) as launcher:
        assert launcher.stdout is not None
        for _ in range(4):
            assert launcher.stdout.readline().endswith("importing\n")
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signal.SIGINT
    assert errors == "tutti run: stopped by SIGINT: all 4 ranks have ended\n"


def test_another_traceback_after_ctrl_c_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\n"
        "def fail(*_): raise ValueError('could not save')\n"
        "signal.signal(signal.SIGINT, fail)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with start(*TUTTI, "run", "-n", 2, script) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline()[9:] for _ in range(2)] == ["ready\n"] * 2
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=20)
    assert errors.count("ValueError: could not save") == 2


def test_a_rank_that_ended_before_the_failed_rank_is_named(tmp_path: Path) -> None:
    """Without tutti.init, a rank that ends early is only seen by `tutti run`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os._exit(0)\n"
        "time.sleep(1)\n"
        "raise SystemExit(5)\n"
    )
    done = run_tutti("run", "-n", 2, script)
    assert done.returncode == 5
    assert "failed with exit code 5 (rank 1 had ended before, with exit code 0)" in done.stderr
    assert "stopped because" not in done.stderr


@pytest.mark.parametrize("shown", ["first", "all"])
def test_the_error_of_a_hidden_rank_is_shown(tmp_path: Path, shown: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, tutti\n"
        "with tutti.init() as world:\n"
        "    time.sleep(0.5 * (world.rank == 0))\n"
        "    raise tutti.UsageError('use --less')\n"
    )
    done = run_tutti("run", "-n", 2, "--show", shown, script)
    assert done.returncode == 2
    assert "rank 1" in done.stderr and "use --less" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "SCRIPT"], "--ranks must be at least 1, got 0"),
        (["-n", "100000", "SCRIPT"], "--ranks must be at most "),
        (["-n", "2", "/no/such/script.py"], "'/no/such/script.py' does not exist"),
        (["-n", "2", "-m", "no.such.module"], "-m no.such.module: no is neither"),
        (["-n", "2", "/tmp"], "'/tmp' is a directory"),
        (["--timeout", "0", "SCRIPT"], "--timeout must be seconds above 0"),
        (["--start-timeout", "nan", "SCRIPT"], "--start-timeout must be seconds above 0"),
        (["-n", "2"], "tutti run needs a script"),
        (["-n", "two", "SCRIPT"], "-n/--ranks 'two' is not a number"),
        (["--rank", "2", "SCRIPT"], "no flag --rank: did you mean --ranks?"),
        (["--show", "some", "SCRIPT"], "--show must be one of all, first, got 'some'"),
        (["--ranks-per-gpu", "2", "SCRIPT"], "no GPU is visible"),
        (["--log-dir", "/proc/nowhere", "SCRIPT"], "--log-dir /proc/nowhere"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(
    script: Path, arguments: list[str], message: str
) -> None:
    words = [str(script) if word == "SCRIPT" else word for word in arguments]
    done = run_tutti("run", *words)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
