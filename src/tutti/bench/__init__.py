"""Benchmarks: collectives, link bandwidth, symmetric memory, and pairs of techniques."""

from tutti.measure.units import format_bytes, format_size
from tutti.world.errors import UsageError


class Unsupported(Exception):
    """A backend, an operation or a pair cannot be measured on this machine.

    The exception's message is the reason.
    """


def check_free_memory(size: int, ranks: int, free: int | None) -> None:
    """Raise UsageError if `ranks` ranks on one host need more than `free` bytes of memory.

    Each rank exchanges messages of `size` bytes.
    """
    needed = 2 * size * ranks  # each rank needs a send buffer and the expected result
    if free is not None and needed > free:
        memory = f"{format_bytes(needed)} of memory, but {format_bytes(free)} are free"
        raise UsageError(
            f"--sizes {format_size(size)}: {ranks} rank{'s' * (ranks > 1)} on a host need at "
            f"least {memory}. Use smaller sizes or fewer ranks"
        )
