"""Pin every rank to CPUs of its own: a rank that wanders, or shares, measures the scheduler."""

import contextlib
import os
from pathlib import Path

from tutti.machine.cpu_numa import allowed_cpus, format_cpu_list, parse_cpu_list
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json
from tutti.world.world import World


def pin(world: World) -> str:
    """Give this rank its share of the CPUs that ranks here have in common; returns what it got.

    Collective. Where ranks outnumber CPUs, they are dealt out one CPU each, in turn.
    """
    mine = format_cpu_list(allowed_cpus())
    alike = [
        rank
        for rank, each in enumerate(gather_json([world.host, mine]))
        if each == [world.host, mine]
    ]
    share = share_of(parse_cpu_list(mine), alike.index(world.rank), len(alike))
    _move_threads(share)
    return format_cpu_list(share)


def share_of(cpus: tuple[int, ...], position: int, sharers: int) -> tuple[int, ...]:
    """The CPUs of one of several ranks that may all use `cpus`."""
    if sharers > len(cpus):
        return (cpus[position % len(cpus)],)
    return cpus[position * len(cpus) // sharers : (position + 1) * len(cpus) // sharers]


def pin_to(cpus: tuple[int, ...]) -> str:
    """Pin every thread of this rank to these CPUs; says where it may not run on one of them."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError) as error:
        allowed = format_cpu_list(allowed_cpus())
        raise UsageError(
            f"--pin: this rank may not run on CPU {format_cpu_list(cpus)} ({error}): it may use "
            f"{allowed}"
        ) from None
    _move_threads(cpus)
    return format_cpu_list(cpus)


def _move_threads(cpus: tuple[int, ...]) -> None:
    # Every thread, not this one alone: gloo's are running already.
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            os.sched_setaffinity(int(thread.name), cpus)
