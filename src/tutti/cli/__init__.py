"""The command line. Each command has its own module, which is imported when the command is run.

`tutti --print-completion SHELL` prints a completion script. At every Tab, the script calls
`tutti --complete WORD...`, so it always completes the commands and flags of the installed version.
"""

import contextlib
import gc
import io
import os
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from tutti.world.errors import EXPLAINED_ERRORS, UsageError, did_you_mean

# The module of each command has `main(arguments) -> exit code`.
COMMANDS = {
    "train": ("tutti.cli.train", "train a model on one rank or many"),
    "parity": ("tutti.cli.parity", "compare every layout with one device, step by step"),
    "predict": ("tutti.cli.predict", "predict a dataset, or generate text from prompts"),
    "export": ("tutti.cli.export", "write the weights of a run for other programs"),
    "run": ("tutti.cli.run", "start any script as local ranks, like torchrun"),
    "why": ("tutti.cli.why", "explain a job that hangs or has died"),
    "watch": ("tutti.cli.watch", "show a running job live: steps, late ranks, alerts"),
    "world": ("tutti.cli.world", "show the host, device and backend of every rank"),
    "bench": ("tutti.cli.bench", "measure collectives, links and symmetric memory"),
    "topo": ("tutti.cli.topo", "show devices, links, NUMA nodes and NICs"),
    "doctor": ("tutti.cli.doctor", "check the machine, with a cure for each problem"),
    "profile": ("tutti.cli.profile", "show where the time of a step goes"),
    "scale": ("tutti.cli.scale", "show where efficiency is lost with more ranks"),
    "plan": ("tutti.cli.plan", "predict memory and time of every layout before a run"),
    "tune": ("tutti.cli.tune", "search for faster settings of a job on this machine"),
    "report": ("tutti.cli.report", "write runs and results as one HTML page"),
    "submit": ("tutti.cli.submit", "write and submit a Slurm or MPI job"),
}

SUBCOMMANDS = {
    "bench": ("collectives", "bandwidth", "symmetric", "pairs", "compare", "tune"),
    "submit": ("slurm", "mpi"),
}

_USAGE = """usage: tutti COMMAND [flags]

tutti takes a PyTorch model from one device to many, proves that many devices compute what one
device computed, and explains where the speed went.

commands:
{commands}

tutti COMMAND --help               show the flags of a command
tutti --version                    show the version
tutti --print-completion SHELL     print a completion script for bash, zsh or fish:
                                   eval "$(tutti --print-completion bash)\""""


def main() -> None:
    """Run the command and exit with its code. This is the entry point of the console script."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # The standard output of rank 0 is a terminal even if the output of mpirun goes into a file.
        # Without this variable, rich would print colour codes into the file.
        os.environ.setdefault("TTY_COMPATIBLE", "0")
    try:
        code = run_cli(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output has ended (`tutti … | head`)
        sys.stderr.close()
        code = 0
    except KeyboardInterrupt:
        print("tutti: interrupted", file=sys.stderr)
        code = 130
    # gc.freeze() avoids the garbage collections at exit, which take 0.5 s if torch is loaded. If
    # triton is loaded, collect, because triton prints a warning for each object that is not
    # collected.
    if "triton" not in sys.modules:
        gc.freeze()
    sys.exit(code)


def run_cli(arguments: list[str]) -> int:
    """Run one command line. Return 0 on success, 1 if a check failed, or 2 for wrong usage."""
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
            if name == "--complete":
                print("\n".join(_completions(rest)))
                return 0
            scripts, shell = _completion_scripts(), rest[0] if rest else ""
            if shell not in scripts:
                shells = ", ".join(scripts)
                raise UsageError(f"--print-completion must be one of {shells}, got {shell!r}")
            print(scripts[shell], end="")
            return 0
        if name not in COMMANDS:
            hint = did_you_mean(name, ["--version"] if "version" in name else COMMANDS)
            raise UsageError(f"there is no command {name!r}: {hint} See tutti --help.")
        code: int = import_module(COMMANDS[name][0]).main(rest)
        return code
    except EXPLAINED_ERRORS as error:
        if not error.printed:
            prefix = f"tutti {name}" if name in COMMANDS else "tutti"
            print(f"{prefix}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # If torch is not loaded, no user code has run, so the error is about a file that the user
        # named with a flag.
        if error.filename is None or "torch" in sys.modules:
            raise
        reason = f"{error.filename}: {error.strerror}. Check the path and its permissions."
        print(f"tutti {name}: {reason}", file=sys.stderr)
        return 2


def _completion_scripts() -> dict[str, str]:
    return tomllib.loads((Path(__file__).parent / "completion.toml").read_text())


def _completions(arguments: list[str]) -> list[str]:
    """Return the completions of the last argument, which may be empty."""
    *before, last = arguments or [""]
    if not before:
        candidates = [*COMMANDS, "--help", "--version", "--print-completion"]
    elif before == ["--print-completion"]:
        candidates = list(_completion_scripts())
    elif before[0] not in COMMANDS:
        candidates = []
    elif len(before) == 1 and before[0] in SUBCOMMANDS:
        candidates = [*SUBCOMMANDS[before[0]], "--help"]
    else:
        choices = _flag_choices(before[: 2 if before[0] in SUBCOMMANDS else 1])
        candidates = choices.get(before[-1]) or (list(choices) if last.startswith("-") else [])
    return [candidate for candidate in candidates if candidate.startswith(last)]


def _flag_choices(command: list[str]) -> dict[str, list[str]]:
    """Return {flag: choices} of a command, read from the help of the command."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit, UsageError):
        import_module(COMMANDS[command[0]][0]).main([*command[1:], "--help"])
    flags: dict[str, list[str]] = {}
    # A line of the help:   -n, --ranks INT         Number of ranks …
    for line in re.findall(r"(?m)^  (-.*?)(?:  |$)", page.getvalue()):
        choices = re.search(r"\{([\w.,-]+)\}", line)
        for flag in re.findall(r"(?:^|, )(--?[a-z][\w-]*)", line):
            flags[flag] = choices[1].split(",") if choices else []
    return flags
