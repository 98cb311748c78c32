"""Make the table from which tutti.comm chooses a path for each message size."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tutti.comm.ledger import KINDS
from tutti.comm.path_selection import Measured
from tutti.measure.message_cost import OPERATIONS

# {backend of a row: path}. Backends on symmetric tensors are not listed, because the table is for
# ordinary tensors.
PATH_OF = {"gloo": "gloo", "shm": "shm", "nccl": "nccl", "staged": "symmetric one-shot"}
# A change of path between two sizes must save at least this fraction of the time, added up over
# all sizes from the change on.
_MIN_GAIN = 0.05


def path_measurements(rows: Iterable[dict[str, Any]], device: str) -> list[Measured]:
    """Return the measurements of all correct back-to-back rows in torch's native placement."""
    return [
        Measured(row["op"], device, PATH_OF[row["backend"]], row["bytes"], row["time_us"]["p50"])
        for row in rows
        if row["backend"] in PATH_OF
        and row["timing"] == "back-to-back"
        and row["wrong"] == 0
        and row["op"] in KINDS
        and row["placement"] == OPERATIONS[row["op"]].native
    ]


def smooth_choice(measured: Sequence[Measured]) -> list[Measured]:
    """Choose the path for each operation and size; return the measurement of each chosen path.

    If the fastest path were chosen at each size, noise would make the choice alternate at sizes for
    which two paths are about equally fast. Instead, the sum of ln(time / fastest time) over sizes,
    plus ln 1.05 per change of path, is minimized by dynamic programming over ascending sizes
    (Viterbi).
    """
    result: list[Measured] = []
    for op, device in dict.fromkeys((each.op, each.device) for each in measured):
        by_size: dict[int, dict[str, Measured]] = {}
        for each in measured:
            if (each.op, each.device) == (op, device):
                by_size.setdefault(each.bytes, {})[each.path] = each
        result += _viterbi([by_size[size] for size in sorted(by_size)])
    return result


def _viterbi(sizes: list[dict[str, Measured]]) -> list[Measured]:
    change_cost = math.log(1 + _MIN_GAIN)
    best: dict[str, tuple[float, list[Measured]]] = {}  # {last path: (cost, choices)}
    for choices in sizes:
        fastest_us = min(each.time_us for each in choices.values())
        following = {}
        for path, each in choices.items():
            before = [
                (cost + change_cost * (last != path), chosen)
                for last, (cost, chosen) in best.items()
            ] or [(0.0, [])]
            cost, chosen = min(before, key=lambda candidate: candidate[0])
            following[path] = cost + math.log(each.time_us / fastest_us), [*chosen, each]
        best = following
    return min(best.values(), key=lambda candidate: candidate[0])[1] if best else []
