"""The command line itself: help without torch, suggestions, completion, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tutti.cli import SUBCOMMANDS
from worlds import TUTTI, run_command, run_tutti


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["report", "--help"], ["wrold"]]
)
def test_help_and_wrong_usage_do_not_import_torch(arguments: list[str]) -> None:
    look = (
        "import sys; from tutti.cli import run_cli\n"
        "try: run_cli(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look, *arguments], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_importing_tutti_does_not_import_torch() -> None:
    look = "import sys, tutti; tutti.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], timeout=60).returncode == 0


@pytest.mark.parametrize("loaded", [True, False])
def test_objects_are_frozen_at_the_end_unless_triton_is_loaded(loaded: bool) -> None:
    """At exit, frozen objects are not collected. triton 3.9 warns about each of its objects."""
    look = (
        "import atexit, gc, sys, types\n"
        f"if {loaded}: sys.modules['triton'] = types.ModuleType('triton')\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 0))\n"
        "from tutti.cli import main; main()"
    )
    done = run_command([sys.executable, "-c", look, "--version"])
    assert done.returncode == 0 and f"frozen {not loaded}" in done.stdout, done


def test_dir_lists_the_public_names() -> None:
    import tutti

    assert {"init", "World", "Layout", "parallelize", "comm", "profile"} <= set(dir(tutti))


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (["wo"], ["world"]),
        (["--ver"], ["--version"]),
        (["bench", "c"], ["collectives", "compare"]),
        (["submit", ""], ["slurm", "mpi", "--help"]),
        (["run", "--de"], ["--device"]),
        (["run", "--device", "c"], ["cpu", "cuda"]),
        (["train", "--lr-s"], ["--lr-sweep", "--lr-scale"]),
        (["submit", "slurm", "--gpus"], ["--gpus-per-node"]),
        (["nonsense", "x"], []),
    ],
)
def test_commands_flags_and_choices_are_completed(words: list[str], candidates: list[str]) -> None:
    done = run_tutti("--complete", *words)
    assert done.stdout.split() == candidates, done.stderr


def test_every_subcommand_that_is_completed_exists() -> None:
    for command, subcommands in SUBCOMMANDS.items():
        for each in subcommands:
            done = run_tutti(command, each, "--help")
            assert done.returncode == 0 and f"tutti {command} {each}" in done.stdout, done.stderr


def test_the_bash_script_completes(tmp_path: Path) -> None:
    script = f"""
tutti() {{ {" ".join(TUTTI)} "$@"; }}
eval "$(tutti --print-completion bash)"
COMP_WORDS=(tutti run --sh) COMP_CWORD=2
_tutti
echo "${{COMPREPLY[@]}}"
"""
    done = run_command(["bash", "-c", script])
    assert done.stdout == "--show\n", done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_help_has_sections_with_plain_titles_in_any_encoding(encoding: str) -> None:
    done = run_command([*TUTTI, "train", "--help"], env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and "\ndata:\n" in done.stdout and "settings" not in done.stdout
    assert "None" not in done.stdout and "--no-reshard" in done.stdout


def test_help_lists_the_commands() -> None:
    done = run_command([*TUTTI, "--help"])
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "world", "submit"))


@pytest.mark.parametrize("columns", ["60", "80"])
def test_the_help_of_a_command_fits_the_terminal_and_does_not_mention_none(columns: str) -> None:
    done = run_tutti("bench", "collectives", "--help", env={"COLUMNS": columns})
    assert done.returncode == 0 and "None" not in done.stdout
    assert "  -n, --ranks INT  " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= int(columns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wrold"], "no command 'wrold': did you mean world?"),
        (["version"], "no command 'version': did you mean --version?"),
        (
            ["--print-completion", "tcsh"],
            "--print-completion must be one of bash, zsh, fish, got 'tcsh'",
        ),
        (["world", "--backend", "gloo"], "no flag --backend: see tutti world --help"),
        (["train", "--sweep", "1"], "no flag --sweep: did you mean --lr-sweep?"),
        (["world", "--josn", "x"], "no flag --josn: did you mean --json?"),
        (["world", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["world", "--ranks-per-gpu", "0"], "--ranks-per-gpu must be at least 1, got 0"),
        (["doctor", "--ranks-per-gpu", "-1"], "--ranks-per-gpu must be at least 1, got -1"),
        (["train", "--ranks-per-gpu", "0"], "--ranks-per-gpu must be at least 1, got 0"),
        (["topo", "--start-timeout", "0"], "--start-timeout must be seconds above 0"),
        (["world", "--json", "/proc/nowhere/x"], "--json /proc/nowhere/x"),
        (["world", "--json", "/proc/x.json"], "--json /proc/x.json"),
        (["world", "--json", "/tmp"], "--json /tmp: is a directory"),
        (["world", "--ledger", "me"], "--ledger 'me' is not a number. See tutti world --help"),
        (["parity", "--layouts", "dp2", "tp2"], "with commas, as in --layouts dp2,tp2"),
        (["train", "--lr", "0.1", "0.2"], "'0.2' is not expected here. See tutti train --help"),
        (["report"], "tutti report: there is nothing to report. Add the path"),
        (["profile"], "tutti profile: there must be either a program or --trace"),
        (["submit"], "tutti submit: the scheduler must be slurm or mpi"),
        (["bench", "compare", "a.json"], "NEW must be given. See tutti bench compare --help"),
    ],
)
def test_wrong_usage_of_a_command_is_one_line_and_exit_code_two(
    arguments: list[str], message: str
) -> None:
    done = run_tutti(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_two() -> None:
    done = run_command(TUTTI)
    assert done.returncode == 2 and "usage: tutti COMMAND" in done.stdout


def test_a_wrong_launcher_variable_is_one_line() -> None:
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-",
    }
    done = run_tutti("world", env=step)
    assert done.returncode == 2
    assert "SLURM_STEP_NODELIST='n[1-' cannot be parsed" in done.stderr
    assert done.stderr.count("\n") == 1
