"""tutti bench KIND: measure what this machine does, and check what it did."""

from importlib import import_module

from tutti.world.errors import UsageError, did_you_mean

_KINDS = {
    "collectives": ("tutti.cli.bench_collectives", "every backend side by side, as nccl-tests"),
    "bandwidth": ("tutti.cli.bench_bandwidth", "every pair of ranks; slow links are named"),
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
    code: int = import_module(_KINDS[arguments[0]][0]).main(arguments[1:])
    return code
