"""Which path serves an operation of so many bytes: a table, measured once for each machine.

`tutti bench tune` writes what it measured to

    $XDG_CACHE_HOME/tutti/paths/MACHINE-RANKS.json      (~/.cache where that is not set)

and every group that has a choice reads it, once; rank 0's table counts for all, so that all ranks
take the same path. Without a table, the defaults below are used. A table that cannot be read is an
error where it is asked for (`load`), and a warning and the defaults in a running job: a
damaged cache must not end one.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tutti.machine.environment import describe_environment
from tutti.world.errors import UsageError

SCHEMA = "tutti.comm.paths/1"
PATHS = ("gloo", "shm", "hierarchical", "nccl", "symmetric one-shot")
OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    *("all_to_all", "send", "recv", "barrier"),
)


@dataclass(frozen=True)
class Row:
    """In this range of sizes, this path is the fastest for this operation."""

    op: str
    device: str  # cpu or cuda
    path: str
    from_bytes: int
    to_bytes: int | None  # the first size beyond; None: without end
    time_us: float | None = None  # at the smallest size measured in the range
    dtype: str | None = None
    measured: str | None = None  # the date, if it is not the table's

    def covers(self, op: str, device: str, size: int) -> bool:
        """Whether it speaks about this operation at this size."""
        end = float("inf") if self.to_bytes is None else self.to_bytes
        return (self.op, self.device) == (op, device) and self.from_bytes <= size < end


@dataclass(frozen=True)
class Table:
    """What was measured on a machine with so many ranks."""

    machine: str
    ranks: int
    measured: str  # the date of the last measurement
    rows: tuple[Row, ...]

    def row(self, op: str, device: str, size: int, among: Collection[str]) -> Row | None:
        """The row for an operation, if it names a path that there is."""
        rows = (row for row in self.rows if row.covers(op, device, size) and row.path in among)
        return next(rows, None)

    def to_json(self) -> str:
        """As it is kept in a file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2)


@dataclass(frozen=True)
class Measured:
    """One measurement: an operation of some size on one path."""

    op: str
    device: str
    path: str
    bytes: int
    time_us: float


# What is known without measuring. On 4 to 8 GPUs of one host one-shot kernels on symmetric memory
# win up to 512 KB; beyond that, for tensors that must first be copied there, NCCL does. On the CPU
# a group has one path.
DEFAULTS = (
    Row("all_reduce", "cuda", "symmetric one-shot", 0, 512 << 10),
    *(Row(op, "cuda", "nccl", 0, None) for op in OPS),
)


@dataclass(frozen=True)
class Choice:
    """A path and the reason for it."""

    path: str
    reason: str


def choose(
    op: str, size: int, device: str, available: Collection[str], table: Table | None
) -> Choice:
    """The path for an operation of `size` bytes, of those that there are."""
    if len(available) == 1:
        only = next(iter(available))
        row = table.row(op, device, size, PATHS) if table is not None else None
        known = "" if row is None or table is None else f"; {row.path} is {_figures(row, table)}"
        return Choice(only, f"the only one there is{known}")
    row = table.row(op, device, size, available) if table is not None else None
    if row is not None and table is not None:
        return Choice(row.path, _figures(row, table))
    defaults = (row for row in DEFAULTS if row.covers(op, device, size) and row.path in available)
    row = next(defaults, None)
    if row is None:
        return Choice(next(iter(available)), "the first one there is: nothing is known of others")
    return Choice(row.path, "the default: measure with `tutti bench tune`")


def _figures(row: Row, table: Table) -> str:
    end = "" if row.to_bytes is None else f" to {row.to_bytes}"
    figure = "" if row.time_us is None else f", {row.time_us:.1f} µs at the low end"
    when = f"with {table.ranks} ranks on {row.measured or table.measured}"
    return f"the fastest from {row.from_bytes} bytes{end} when measured {when}{figure}"


def fastest(measurements: Iterable[Measured], ranks: int, dtype: str | None = None) -> Table:
    """The table that says what was fastest; each path rules up to the next size measured."""
    best: dict[tuple[str, str, int], Measured] = {}
    for each in measurements:
        key = (each.op, each.device, each.bytes)
        if each.path in PATHS and (key not in best or each.time_us < best[key].time_us):
            best[key] = each
    rows: list[Row] = []
    for (op, device, size), each in sorted(best.items()):
        if rows and (rows[-1].op, rows[-1].device) == (op, device):
            if rows[-1].path == each.path:
                continue
            rows[-1] = Row(**{**asdict(rows[-1]), "to_bytes": size})
            rows.append(Row(op, device, each.path, size, None, each.time_us, dtype))
        else:
            rows.append(Row(op, device, each.path, 0, None, each.time_us, dtype))
    return Table(machine_key(), ranks, time.strftime("%Y-%m-%d"), tuple(rows))


def machine_key() -> str:
    """A name for machines like this one: processor, number of CPUs, GPUs."""
    about = describe_environment()
    gpus = [gpu["name"] for gpu in about["gpus"]]
    parts = [about["cpu"], platform.machine(), str(os.cpu_count()), *gpus]
    short = re.sub(r"[^a-z0-9]+", "-", (gpus[0] if gpus else str(about["cpu"])).lower())
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()
    return f"{short.strip('-')[:40]}-{digest}"


def file_for(ranks: int) -> Path:
    """Where the table of this machine and so many ranks is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tutti" / "paths" / f"{machine_key()}-{ranks}.json"


def save(table: Table) -> Path:
    """Keep a table for later runs; returns the file. A reader sees the old one or the new one.

    What is stored about other operations and devices stays; a damaged file is replaced.
    """
    path = file_for(table.ranks)
    with contextlib.suppress(UsageError):
        table = _merged(load(table.ranks), table)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(table.to_json() + "\n")
        beside.replace(path)
    except OSError as error:
        raise UsageError(
            f"the table of paths cannot be written to {path}: {error.strerror}: set "
            "XDG_CACHE_HOME to a directory that can be"
        ) from None
    return path


def _merged(stored: Table | None, table: Table) -> Table:
    """The table, and what is stored about operations and devices of which it says nothing."""
    if stored is None:
        return table
    renewed = {(row.op, row.device) for row in table.rows}
    kept = (row for row in stored.rows if (row.op, row.device) not in renewed)
    dated = tuple(replace(row, measured=row.measured or stored.measured) for row in kept)
    return replace(table, rows=dated + table.rows)


def load(ranks: int) -> Table | None:
    """The table of this machine and so many ranks; None if nothing was measured."""
    path = file_for(ranks)
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is no table of paths ({error}): delete it, or measure again with "
            "`tutti bench tune`"
        ) from None


def parse(text: str) -> Table:
    """Read a table from JSON; ValueError says what is wrong with it."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    try:
        rows = tuple(_checked(Row(**row)) for row in content["rows"])
        return Table(str(content["machine"]), int(content["ranks"]), str(content["measured"]), rows)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is wrong or missing: {error}") from None


def _checked(row: Row) -> Row:
    numbers: list[Any] = [row.from_bytes, 0 if row.to_bytes is None else row.to_bytes]
    if row.path not in PATHS or row.op not in OPS or row.device not in ("cpu", "cuda"):
        raise ValueError(f"it has a row for {row.op} on {row.device} by {row.path}")
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"it has sizes {row.from_bytes} to {row.to_bytes}")
    return row
