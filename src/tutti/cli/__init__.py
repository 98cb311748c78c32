"""The command line: one module per command. `tutti --help` imports none of them, nor torch."""

import gc
import os
import sys
from importlib import import_module

from tutti.world.errors import RanksDiffer, UsageError, did_you_mean

# Each command's module has `main(arguments) -> exit code`.
COMMANDS = {
    "train": ("tutti.cli.train", "train a recipe on one rank or many"),
    "parity": ("tutti.cli.parity", "compare every layout with one device, step by step"),
    "predict": ("tutti.cli.predict", "predict a data set, or text after a prompt"),
    "run": ("tutti.cli.run", "start any script as a world of local ranks"),
    "world": ("tutti.cli.world", "show the world as every rank sees it, with reasons"),
    "bench": ("tutti.cli.bench", "measure collectives and symmetric memory, results checked"),
    "topo": ("tutti.cli.topo", "show devices, links, NUMA nodes and NICs, as a matrix or picture"),
    "doctor": ("tutti.cli.doctor", "check health and configuration, and name the cures"),
    "profile": ("tutti.cli.profile", "capture or read traces: where a step's time goes"),
    "scale": ("tutti.cli.scale", "run a job at several sizes: what the lost efficiency is due to"),
    "report": ("tutti.cli.report", "make one HTML page of runs and results, to open offline"),
    "submit": ("tutti.cli.submit", "write a Slurm or MPI job for a cluster, and submit it"),
}

_USAGE = """usage: tutti COMMAND [flags]

tutti takes a PyTorch model from one device to many, proves that the many compute what the one
did, and explains every per cent of speed that was lost on the way.

commands:
{commands}

`tutti COMMAND --help` is the reference of a command; `tutti --version` prints the version."""


def main() -> None:
    """The console script: run the command and exit with its code."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # mpirun gives rank 0 a terminal even where its own output goes into a file: no colours.
        os.environ.setdefault("TTY_COMPATIBLE", "0")
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `tutti … | head`: the reader has seen enough
        sys.stderr.close()
        code = 0
    except KeyboardInterrupt:
        print("tutti: interrupted", file=sys.stderr)
        code = 130
    if "triton" not in sys.modules:  # which complains at length of what is not collected
        gc.freeze()  # or the interpreter's last collections walk all of torch: half a second
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code: 0 done, 1 a check failed, 2 wrong usage."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        rows = "\n".join(f"  {name:<8} {about}" for name, (_, about) in COMMANDS.items())
        print(_USAGE.format(commands=rows))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from tutti import __version__

        print(f"tutti {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        print(f"tutti: no command {name!r}: {hint} See tutti --help", file=sys.stderr)
        return 2
    try:
        code: int = import_module(COMMANDS[name][0]).main(rest)
        return code
    except (UsageError, RanksDiffer) as error:
        if not error.printed:
            print(f"tutti {name}: {error}", file=sys.stderr)
        return 2
