"""The command line itself: fast help, near names, exit codes."""

import subprocess
import sys

import pytest

from worlds import TUTTI, run_command


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["report", "--help"], ["wrold"]]
)
def test_help_and_mistakes_do_not_import_torch(arguments: list[str]) -> None:
    look = (
        "import sys; from tutti.cli import run\n"
        "try: run(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look, *arguments], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_importing_tutti_does_not_import_torch() -> None:
    look = "import sys, tutti; tutti.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], timeout=60).returncode == 0


@pytest.mark.parametrize("loaded", [True, False])
def test_a_command_ends_fast_unless_triton_would_complain_of_it(loaded: bool) -> None:
    """What is frozen is not collected at the end, and triton 3.9 lists all of its own by name."""
    look = (
        "import atexit, gc, sys, types\n"
        f"if {loaded}: sys.modules['triton'] = types.ModuleType('triton')\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 0))\n"
        "from tutti.cli import main; main()"
    )
    done = run_command([sys.executable, "-c", look, "--version"])
    assert done.returncode == 0 and f"frozen {not loaded}" in done.stdout, done


def test_help_lists_the_commands() -> None:
    done = run_command([*TUTTI, "--help"])
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "world", "submit"))


@pytest.mark.parametrize("columns", ["60", "80"])
def test_the_help_of_a_command_fits_the_terminal_and_says_no_none(columns: str) -> None:
    env = {"COLUMNS": columns, "PYTHONIOENCODING": "utf-8"}
    done = run_command([*TUTTI, "bench", "collectives", "--help"], env=env)
    assert done.returncode == 0 and "None" not in done.stdout
    assert "│ -n INT, --ranks INT " in done.stdout and "Ctrl-C leaves" in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert {len(line) for line in lines if line[:1] in ("╭", "│", "╰") and line} == {int(columns)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wrold"], "no command 'wrold': did you mean world?"),
        (["world", "--josn", "x"], "no flag --josn: did you mean --json?"),
        (["world", "--ranks", "0"], "--ranks 0: a world has at least one rank"),
        (["world", "--json", "/proc/nowhere/x"], "--json /proc/nowhere/x"),
        (["world", "--ledger", "me"], "--ledger 'me' is no number: see tutti world --help"),
        (["bench", "compare", "a.json"], "NEW must be given: see tutti bench compare --help"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments: list[str], message: str) -> None:
    done = run_command([*TUTTI, *arguments])
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_no_command_is_a_mistake_that_shows_the_help() -> None:
    done = run_command(TUTTI)
    assert done.returncode == 2 and "usage: tutti COMMAND" in done.stdout


def test_a_launchers_nonsense_is_one_line_in_a_command() -> None:
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-",
    }
    done = run_command([*TUTTI, "world"], env=step)
    assert done.returncode == 2
    assert "SLURM_STEP_NODELIST='n[1-' does not parse" in done.stderr
    assert done.stderr.count("\n") == 1
