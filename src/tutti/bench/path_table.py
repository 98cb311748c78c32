"""From the rows of a sweep to the table by which tutti.comm chooses a path."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tutti.comm.ledger import KINDS
from tutti.comm.path_selection import Measured, Table, fastest
from tutti.measure.bus_bandwidth import OPERATIONS

# What is measured on symmetric tensors says nothing about ordinary ones, which the table is for.
PATH_OF = {"gloo": "gloo", "shm": "shm", "nccl": "nccl", "staged": "symmetric one-shot"}
# A change of path must save at least this part of the time at one size, or less at several.
_WORTH_A_CHANGE = 0.05


def path_table(rows: Iterable[dict[str, Any]], device: str, ranks: int, dtype: str) -> Table:
    """Which path was fastest at which size; back-to-back times in torch's own placement count."""
    return fastest(measurements(rows, device), ranks, dtype)


def measurements(rows: Iterable[dict[str, Any]], device: str) -> list[Measured]:
    """What a sweep says about paths."""
    return [
        Measured(row["op"], device, PATH_OF[row["backend"]], row["bytes"], row["time_us"]["p50"])
        for row in rows
        if row["backend"] in PATH_OF
        and row["timing"] == "back-to-back"
        and row["wrong"] == 0
        and row["op"] in KINDS
        and row["placement"] == OPERATIONS[row["op"]].native
    ]


def settled(measured: Sequence[Measured]) -> list[Measured]:
    """One measurement for each size: that of the path to take, which changes only where it pays.

    Taking the fastest at each size would follow the noise back and forth around a crossover. Here
    the choice over all sizes is the one that loses least: ln(time / best time) summed up over the
    sizes, and ln 1.05 for each change of path (a walk through sizes, best first: Viterbi's).
    """
    result: list[Measured] = []
    for op, device in dict.fromkeys((each.op, each.device) for each in measured):
        times: dict[int, dict[str, Measured]] = {}
        for each in measured:
            if (each.op, each.device) == (op, device):
                times.setdefault(each.bytes, {})[each.path] = each
        result += _walk([times[size] for size in sorted(times)])
    return result


def _walk(sizes: list[dict[str, Measured]]) -> list[Measured]:
    change = math.log(1 + _WORTH_A_CHANGE)
    walks: dict[str, tuple[float, list[Measured]]] = {}  # by the path that each ends on
    for choices in sizes:
        best = min(each.time_us for each in choices.values())
        following = {}
        for path, each in choices.items():
            loss = math.log(each.time_us / best)
            # The first size is a beginning and no change.
            before = [
                (cost + change * (last != path), steps) for last, (cost, steps) in walks.items()
            ] or [(0.0, [])]
            cost, steps = min(before, key=lambda walk: walk[0])
            following[path] = cost + loss, [*steps, each]
        walks = following
    return min(walks.values(), key=lambda walk: walk[0])[1] if walks else []
