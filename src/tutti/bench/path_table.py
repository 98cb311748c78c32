"""From the rows of a sweep to the table by which tutti.comm chooses a path."""

from collections.abc import Iterable
from typing import Any

from tutti.bench.formulas import OPERATIONS
from tutti.comm.paths import Measured, Table, fastest

# What is measured on symmetric tensors says nothing about ordinary ones, which the table is for.
_PATHS = {"gloo": "gloo", "shm": "shm", "nccl": "nccl", "staged": "symmetric one-shot"}


def path_table(rows: Iterable[dict[str, Any]], device: str, ranks: int, dtype: str) -> Table:
    """Which path was fastest at which size; back-to-back times in torch's own placement count."""
    measured = [
        Measured(row["op"], device, _PATHS[row["backend"]], row["bytes"], row["time_us"]["p50"])
        for row in rows
        if row["backend"] in _PATHS
        and row["timing"] == "back-to-back"
        and row["wrong"] == 0
        and row["op"] != "send_recv"
        and row["placement"] == OPERATIONS[row["op"]].native
    ]
    return fastest(measured, ranks, dtype)
