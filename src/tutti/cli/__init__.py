"""The command line: one module per command. `tutti --help` does not import them or torch."""

import gc
import os
import sys
from importlib import import_module

from tutti.world.errors import RanksDiffer, UsageError, did_you_mean

# The module of each command has `main(arguments) -> exit code`.
COMMANDS = {
    "train": ("tutti.cli.train", "train a model on one rank or many"),
    "parity": ("tutti.cli.parity", "compare every layout with one device, step by step"),
    "predict": ("tutti.cli.predict", "predict a dataset, or continue a text"),
    "run": ("tutti.cli.run", "start any script as a world of local ranks"),
    "world": ("tutti.cli.world", "show rank, device and backend of every rank, with reasons"),
    "bench": ("tutti.cli.bench", "measure collectives, links and symmetric memory"),
    "topo": ("tutti.cli.topo", "show devices, links, NUMA nodes and NICs"),
    "doctor": ("tutti.cli.doctor", "check health and configuration, with a cure for each problem"),
    "profile": ("tutti.cli.profile", "capture or read traces: where the time of a step goes"),
    "scale": ("tutti.cli.scale", "run at several sizes: the causes of lost efficiency"),
    "report": ("tutti.cli.report", "write runs and results as one HTML page"),
    "submit": ("tutti.cli.submit", "write a Slurm or MPI job, and submit it"),
}

_USAGE = """usage: tutti COMMAND [flags]

tutti takes a PyTorch model from one device to many, proves that many devices compute what one
did, and explains where the speed went.

commands:
{commands}

tutti COMMAND --help               the flags of a command
tutti --version                    the version
tutti --print-completion SHELL     a completion script for bash, zsh or fish:
                                   eval "$(tutti --print-completion bash)\""""


def main() -> None:
    """Run the command and exit with its code. This is the entry point of the console script."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # mpirun gives rank 0 a terminal even if the output of mpirun goes into a file, so rich must
        # not print colours.
        os.environ.setdefault("TTY_COMPATIBLE", "0")
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has ended: `tutti … | head`
        sys.stderr.close()
        code = 0
    except KeyboardInterrupt:
        print("tutti: interrupted", file=sys.stderr)
        code = 130
    if "triton" not in sys.modules:  # triton prints a warning about objects that are not collected
        gc.freeze()  # skips the interpreter's last garbage collections: 0.5 s with torch loaded
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code: 0 done, 1 a check failed, 2 wrong usage."""
    name, *rest = arguments or [""]
    if name in ("", "-h", "--help", "help"):
        rows = "\n".join(f"  {name:<8} {about}" for name, (_, about) in COMMANDS.items())
        print(_USAGE.format(commands=rows))
        return 0 if arguments else 2
    if name in ("-V", "--version"):
        from tutti import __version__

        print(f"tutti {__version__}")
        return 0
    try:
        if name in ("--print-completion", "--complete"):
            from tutti.cli import completion

            modules = {command: module for command, (module, _) in COMMANDS.items()}
            if name == "--complete":
                print("\n".join(completion.candidates(rest, modules)))
            else:
                print(completion.script(rest[0] if rest else ""), end="")
            return 0
        if name not in COMMANDS:
            hint = did_you_mean(name, ["--version"] if "version" in name else COMMANDS)
            raise UsageError(f"no command {name!r}: {hint} See tutti --help")
        code: int = import_module(COMMANDS[name][0]).main(rest)
        return code
    except (UsageError, RanksDiffer) as error:
        if not error.printed:
            prefix = f"tutti {name}" if name in COMMANDS else "tutti"
            print(f"{prefix}: {error}", file=sys.stderr)
        return 2
