"""Forked ranks get the same environment as new interpreters, and end in the same way."""

import json
from pathlib import Path

import pytest

from worlds import TUTTI, run_command, run_tutti, run_warm

SHOW = """
import json, os, signal, sys, threading, torch
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]  # the last one is of listdir
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "leads its group": os.getpgid(0) == os.getpid(),
    "in the launcher's session": os.getsid(0) == os.getppid(),
    "files": fds,
    "input": sys.stdin.read(),
    "signals": {n.name: str(signal.getsignal(n)).split(" at ")[0] for n in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": [torch.get_num_threads(), threading.active_count()],
}))
"""
OF_THIS_WORLD = ("MASTER_PORT", "TUTTI_RUN_ID", "TUTTI_REPORT", "TUTTI_OBSERVE_PID")


def test_a_forked_rank_has_the_environment_of_a_new_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    words = ["run", "-n", "2", "--show", "first", script, "--flag"]
    cold = run_command([*TUTTI, *words], env={"MINE": "yes"}, cwd=tmp_path)
    warm = run_tutti(*words, env={"MINE": "yes"}, cwd=tmp_path)
    assert (cold.returncode, warm.returncode) == (0, 0), cold.stderr + warm.stderr
    new, forked = json.loads(cold.stdout), json.loads(warm.stdout)
    for name in OF_THIS_WORLD:
        assert new["env"].pop(name) and forked["env"].pop(name)
    assert forked == new


def test_every_fork_has_its_own_random_seeds(tmp_path: Path) -> None:
    script = tmp_path / "seeds.py"
    script.write_text(
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.random(), torch.rand(()).item())\n"
    )
    one, other = (run_warm([script]).stdout.split() for _ in range(2))
    assert len(one) == len(other) == 3 and not set(one) & set(other)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise ValueError('oh')", 1, "ValueError: oh\n"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
        ("sys.excepthook = lambda *error: sys.exit(2); raise ValueError", 2, ""),
        ("atexit.register(print, 'bye', file=sys.stderr)", 0, "bye\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(
    line: str, code: int, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "end.py"
    script.write_text(f"import atexit, os, sys\n{line}\n")
    done = run_warm([script])
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(said) and bool(done.stderr) == bool(said), done.stderr


def test_a_fork_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "stay.py"
    script.write_text("import time\nprint('here')\ntime.sleep(60)\n")
    with pytest.raises(AssertionError, match=r"ran past 0\.5 s\nhere"):
        run_warm([script], timeout=0.5)
    assert run_warm(["-m", "tutti", "--version"]).stdout.startswith("tutti ")
