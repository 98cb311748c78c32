"""tutti run: starts any script as a world of local ranks."""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tutti.cli.flags import OutputFolder, parse, split_at_command
from tutti.observe.why import RunObserver
from tutti.world.errors import HANG_AFTER, START_TIMEOUT, TIMEOUT, UsageError
from tutti.world.launch import LocalWorld


@dataclass(frozen=True)
class Run:
    """Start a script as local ranks, with the environment variables of torchrun.

        tutti run -n 4 train.py --lr 0.1
        tutti run -n 4 -m package.module --lr 0.1

    All arguments after the script or module are passed to it. SCRIPT can also be an executable
    file. Ranks have no standard input.
    """

    USAGE_END = "SCRIPT [arguments of the script]"
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of ranks to start on this host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `auto` selects CUDA if a GPU is visible. `cpu` hides the GPUs from the
    ranks."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU, to develop multi-GPU code on one GPU. If this is
    above 1, tutti starts a private NVIDIA MPS (Multi-Process Service) server."""
    show: Literal["all", "first"] = "all"
    """Output to print. `all` prints the output of every rank, with the rank number before each
    line. `first` prints only the output of rank 0, without changes."""
    log_dir: OutputFolder | None = None
    """Directory for one log file per rank (default: no log files)."""
    start_timeout: float = START_TIMEOUT
    """Seconds to wait for all ranks to start."""
    timeout: float = TIMEOUT
    """Seconds after which a collective fails."""
    observe: bool = True
    """Record the operations and stacks of the ranks in shared memory. `tutti why` and `tutti watch`
    read the records. Recording costs less than 1 microsecond per collective."""
    hang_after: float = HANG_AFTER
    """Seconds without progress after which the ranks hang, and the reason is printed."""
    grace: float = 5.0
    """Seconds after Ctrl-C or SIGTERM until ranks that still run are killed."""


def main(arguments: list[str]) -> int:
    """Run the command. Return 0 or the exit code of the first rank that failed."""
    flags, command = split_at_command(Run, arguments)
    options = parse(Run, "tutti run", flags)
    settings = dict(vars(options))
    observed, hang_after = settings.pop("observe"), settings.pop("hang_after")
    observer = RunObserver(hang_after, options.log_dir) if observed else None
    return LocalWorld(python_command(command), observer=observer, **settings).run()


def python_command(command: list[str]) -> list[str]:
    """Return the full command for `SCRIPT …`, `-m MODULE …` or an executable.

    Raise UsageError if the script, module or executable does not exist.
    """
    if not command or command == ["-m"]:
        raise UsageError(
            "tutti run needs a script or a module. "
            "Use tutti run -n 2 SCRIPT or tutti run -n 2 -m MODULE."
        )
    if command[0] == "-m":
        # Look up only the top-level package. To look up a submodule, Python would import the user's
        # package in this process.
        top = command[1].partition(".")[0]
        if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            missing = f"{top} is neither in this directory nor installed"
            raise UsageError(f"-m {command[1]}: {missing}. Check the name.")
        return [sys.executable, *command]
    script = Path(command[0])
    if script.suffix != ".py":
        # Do not resolve symbolic links. The interpreter of a virtual environment is a symbolic
        # link, and Python finds the environment through the path of this link.
        program = str(script.absolute()) if os.access(script, os.X_OK) else shutil.which(command[0])
        if program is not None and not script.is_dir():
            return [program, *command[1:]]
    if script.is_dir():
        raise UsageError(f"{command[0]!r} is a directory. Use the path of a script.")
    if not script.is_file():
        raise UsageError(f"script {command[0]!r} does not exist. Check the path.")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {command[0]!r} cannot be read. Check its permissions.")
    return [sys.executable, *command]
