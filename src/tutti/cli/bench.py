"""tutti bench KIND: measure what this machine does, and check what it did."""

import os
import signal
from importlib import import_module

from tutti.world.errors import UsageError, did_you_mean
from tutti.world.launchers import identify

_KINDS = {
    "collectives": ("tutti.cli.bench_collectives", "every backend side by side, as nccl-tests"),
    "bandwidth": ("tutti.cli.bench_bandwidth", "every pair of ranks; slow links are named"),
    "pairs": ("tutti.cli.bench_pairs", "a baseline and its optimized form, results compared"),
    "tune": ("tutti.cli.bench_tune", "where one path overtakes another: tutti.comm's size table"),
    "symmetric": ("tutti.cli.bench_symmetric", "one-sided memory, and the structures on it"),
    "compare": ("tutti.cli.bench_compare", "what changed between two results, beyond the spread"),
}

_USAGE = """usage: tutti bench KIND [flags]

Measures several ways in one run, in turns, and checks the results of what was timed.

kinds:
{kinds}

`tutti bench KIND --help` lists the flags."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        rows = "\n".join(f"  {name:<12} {about}" for name, (_, about) in _KINDS.items())
        print(_USAGE.format(kinds=rows))
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"what should be measured? tutti bench {' or '.join(_KINDS)}, see --help")
    if arguments[0] not in _KINDS:
        raise UsageError(f"no kind {arguments[0]!r}: {did_you_mean(arguments[0], _KINDS)}")
    if identify(os.environ).launcher != "python":
        _end_at_once_on_ctrl_c()
    code: int = import_module(_KINDS[arguments[0]][0]).main(arguments[1:])
    return code


def _end_at_once_on_ctrl_c() -> None:
    """In a rank, until it measures and stops in good order (Control.stop_on_signals).

    Python's KeyboardInterrupt may come inside torch's import or a destructor, where it is caught or
    only printed: this rank would go on and wait at the roll call for the others, who have gone.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored (nohup, `&`) stays ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
