"""tutti run: start any script as a world of local ranks."""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tutti.cli.flags import parse, split_at_command
from tutti.world.errors import START_TIMEOUT, TIMEOUT, UsageError
from tutti.world.launch import LocalWorld


@dataclass(frozen=True)
class Run:
    """Start a script as a world of local ranks, as torchrun would, and more.

    tutti run -n 4 train.py --lr 0.1

    tutti run -n 4 -m package.module --lr 0.1

    What follows SCRIPT, or -m MODULE, belongs to it. An executable works as well. Ranks have no
    standard input.
    """

    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """How many ranks to start on this host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; cpu hides the GPUs from them."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU: to develop multi-GPU code on one. Uses a private MPS."""
    show: Literal["all", "first"] = "all"
    """Whose output to show: every rank's, with its number in front, or rank 0's as it is."""
    log_dir: Path | None = None
    """A directory for one log file per rank."""
    start_timeout: float = START_TIMEOUT
    """Seconds for all ranks to arrive."""
    timeout: float = TIMEOUT
    """Seconds that a collective may take."""
    grace: float = 5.0
    """Seconds that ranks may take to end after Ctrl-C or SIGTERM, before they are killed."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code of the first rank that failed."""
    flags, command = split_at_command(Run, arguments)
    options = parse(Run, "tutti run", flags)
    return LocalWorld(
        command=python_command(command),
        ranks=options.ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show=options.show,
        log_dir=options.log_dir,
        start_timeout=options.start_timeout,
        timeout=options.timeout,
        grace=options.grace,
    ).run()


def python_command(command: list[str]) -> list[str]:
    """The full command for `SCRIPT …`, `-m MODULE …` or an executable; refuses what is missing."""
    if not command or command == ["-m"]:
        raise UsageError("what should run? tutti run -n 2 SCRIPT, or tutti run -n 2 -m MODULE")
    if command[0] == "-m":
        # The top of a dotted name only: to look deeper would import the user's package here.
        top = command[1].partition(".")[0]
        if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"-m {command[1]}: no module {top} here: is it installed?")
        return [sys.executable, *command]
    script = Path(command[0])
    if script.suffix != ".py":
        # Not where a link leads to: by its own path Python knows which environment it is of.
        program = str(script.absolute()) if os.access(script, os.X_OK) else shutil.which(command[0])
        if program is not None and not script.is_dir():
            return [program, *command[1:]]
    if script.is_dir():
        raise UsageError(f"{command[0]!r} is a directory: give a script in it")
    if not script.is_file():
        raise UsageError(f"script {command[0]!r} does not exist: check the path")
    return [sys.executable, *command]
