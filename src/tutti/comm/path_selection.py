"""Chooses the path of an operation by its size, from a table that is measured once per machine.

A path is an implementation that transfers the data (see PATHS). `tutti bench tune` writes the table
to $XDG_CACHE_HOME/tutti/paths/MACHINE-RANKS.json (default: ~/.cache). All ranks use rank 0's table,
so that they take the same path. Without a table, DEFAULTS is used. If a table is not valid, `load`
raises an error, but a running job prints a warning and uses DEFAULTS.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tutti.comm import ledger
from tutti.comm.backend_calls import issue
from tutti.comm.ledger import KINDS
from tutti.comm.operation import CommGroup, Operation, comm_group_of
from tutti.machine.environment import describe_environment
from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError, did_you_mean

SCHEMA = "tutti.comm.paths/1"
PATHS = ("gloo", "shm", "hierarchical", "nccl", "symmetric one-shot")

# The dtypes that torch's one-shot kernels reduce.
_ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """The fastest path for one operation in one range of sizes."""

    op: str
    device: str  # cpu or cuda
    path: str
    from_bytes: int
    to_bytes: int | None  # exclusive; None means no upper limit
    time_us: float | None = None  # the time at the smallest size measured in the range
    dtype: str | None = None
    measured: str | None = None  # the date, if it differs from the table's date

    def covers(self, op: str, device: str, size: int) -> bool:
        """Return whether the row applies to this operation on this device at this size."""
        in_range = self.from_bytes <= size and (self.to_bytes is None or size < self.to_bytes)
        return (self.op, self.device) == (op, device) and in_range


@dataclass(frozen=True)
class Table:
    """The fastest paths on one machine, measured with one number of ranks."""

    machine: str
    ranks: int
    measured: str  # the date of the last measurement
    rows: tuple[Row, ...]

    def row(self, op: str, device: str, size: int, among: Collection[str]) -> Row | None:
        """Return the first row for the operation whose path is in `among`, or None."""
        rows = (row for row in self.rows if row.covers(op, device, size) and row.path in among)
        return next(rows, None)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2)


class Measured(NamedTuple):
    """One measurement: an operation of some size on one path."""

    op: str
    device: str
    path: str
    bytes: int
    time_us: float


# Used if no path was measured. On 4 to 8 GPUs of one host, one-shot kernels on symmetric memory are
# faster than NCCL up to 512 KiB. For larger tensors NCCL is faster, because one-shot kernels need a
# copy of the tensor in symmetric memory. On the CPU a group has only one path.
DEFAULTS = (
    Row("all_reduce", "cuda", "symmetric one-shot", 0, 512 << 10),
    *(Row(op, "cuda", "nccl", 0, None) for op in KINDS),
)


def fastest(measurements: Iterable[Measured], ranks: int, dtype: str | None = None) -> Table:
    """Return a table of the fastest paths. A row ends where another path becomes faster."""
    best: dict[tuple[str, str, int], Measured] = {}
    for new in measurements:
        key = (new.op, new.device, new.bytes)
        if new.path in PATHS and (key not in best or new.time_us < best[key].time_us):
            best[key] = new
    rows: list[Row] = []
    for (op, device, size), fast in sorted(best.items()):
        start = 0
        if rows and (rows[-1].op, rows[-1].device) == (op, device):
            if rows[-1].path == fast.path:
                continue
            rows[-1] = replace(rows[-1], to_bytes=size)
            start = size
        rows.append(Row(op, device, fast.path, start, None, fast.time_us, dtype))
    return Table(machine_key(), ranks, time.strftime("%Y-%m-%d"), tuple(rows))


def machine_key() -> str:
    """Return a name that machines with the same CPU model, CPU count and GPUs share."""
    environment = describe_environment()
    gpus = [gpu["name"] for gpu in environment["gpus"]]
    parts = [environment["cpu"], platform.machine(), str(os.cpu_count()), *gpus]
    short = re.sub(r"[^a-z0-9]+", "-", (gpus[0] if gpus else str(environment["cpu"])).lower())
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()
    return f"{short.strip('-')[:40]}-{digest}"


def file_for(ranks: int) -> Path:
    """Return the path of the table file for this machine and this number of ranks."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tutti" / "paths" / f"{machine_key()}-{ranks}.json"


def save(table: Table) -> Path:
    """Store a table for later runs and return the file.

    If a table is already stored, its rows for other operations and devices are kept. An invalid
    file is replaced.
    """
    path = file_for(table.ranks)
    with contextlib.suppress(UsageError):
        if (stored := load(table.ranks)) is not None:
            renewed = {(row.op, row.device) for row in table.rows}
            other_rows = (row for row in stored.rows if (row.op, row.device) not in renewed)
            dated = (replace(row, measured=row.measured or stored.measured) for row in other_rows)
            table = replace(table, rows=(*dated, *table.rows))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table.to_json() + "\n")
    except OSError as error:
        raise UsageError(
            f"the table of paths cannot be written to {path} ({error.strerror}). Set "
            "XDG_CACHE_HOME to a directory in which you can write."
        ) from None
    return path


def load(ranks: int) -> Table | None:
    """Return the table for this machine and number of ranks, or None if nothing was measured."""
    path = file_for(ranks)
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a valid table of paths ({error}). Delete it, or measure again with "
            "`tutti bench tune`."
        ) from None


def parse(text: str) -> Table:
    """Return a table read from JSON. Raise ValueError with the reason if the table is not valid."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    try:
        rows = tuple(Row(**row) for row in content["rows"])
        machine, ranks = str(content["machine"]), int(content["ranks"])
        table = Table(machine, ranks, str(content["measured"]), rows)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is wrong or missing: {error}") from None
    for row in rows:
        if row.path not in PATHS or row.op not in KINDS or row.device not in ("cpu", "cuda"):
            raise ValueError(
                f"its row for {row.op} on {row.device} with path {row.path} has an unknown "
                "operation, device or path"
            )
        sizes: list[Any] = [row.from_bytes, 0 if row.to_bytes is None else row.to_bytes]
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError(
                f"its row for {row.op} is for {row.from_bytes} to {row.to_bytes} bytes, but sizes "
                "must be whole numbers of at least 0"
            )
    return table


class Choice(NamedTuple):
    """A path, and the reason why it was chosen."""

    path: str
    reason: str


def choose(
    op: str, size: int, device: str, available: Collection[str], table: Table | None
) -> Choice:
    """Choose one of the available paths for an operation of `size` bytes."""
    if len(available) == 1:
        reason = "the only path available"
        if table is not None and (row := table.row(op, device, size, PATHS)) is not None:
            reason += f"; {row.path} is {_figures(row, table)}"
        return Choice(next(iter(available)), reason)
    if table is not None and (row := table.row(op, device, size, available)) is not None:
        return Choice(row.path, _figures(row, table))
    for row in DEFAULTS:
        if row.covers(op, device, size) and row.path in available:
            reason = "the default, because nothing was measured (use `tutti bench tune`)"
            return Choice(row.path, reason)
    return Choice(next(iter(available)), "the first path available, because nothing was measured")


def _figures(row: Row, table: Table) -> str:
    end = "" if row.to_bytes is None else f" to {row.to_bytes}"
    figure = "" if row.time_us is None else f", {row.time_us:.1f} µs at the smallest size"
    when = f"with {table.ranks} ranks on {row.measured or table.measured}"
    return f"the fastest from {row.from_bytes} bytes{end} when measured {when}{figure}"


@dataclass(frozen=True)
class Explanation:
    """The path that an operation takes, and the reason. str() returns both as a sentence."""

    op: str
    bytes: int
    group: str
    device: str
    path: str
    reason: str
    others: tuple[str, ...]

    def __str__(self) -> str:
        others = f" (also available: {', '.join(self.others)})" if self.others else ""
        operation = f"{self.op} of {self.bytes} bytes on {self.device} in group {self.group}"
        return f"{operation} uses {self.path}: {self.reason}{others}"


def explain(
    op: str, bytes: int, *, group: dist.ProcessGroup | None = None, device: str | None = None
) -> Explanation:
    """Explain which path an operation of this size takes in this group, and why.

    `device` is cpu or cuda. The default is cuda if the group supports CUDA. This function is not
    collective, so a single rank may call it.
    """
    comm_group = comm_group_of(group)
    if op not in KINDS:
        raise UsageError(f"op={op!r} is not an operation: {did_you_mean(op, KINDS)}")
    if bytes < 0:
        raise UsageError(f"bytes must be at least 0, got {bytes}")
    supported = comm_group.device_types
    if device is None:
        device = "cuda" if "cuda" in supported and torch.cuda.is_available() else "cpu"
    if device not in supported:
        listed = " and ".join(sorted(supported))
        raise UsageError(f"device must be {listed} for group {comm_group.label}, got {device!r}")
    paths = available_paths(comm_group, device)
    problem = ""
    try:
        table = comm_group.path_tables.get(device) or load(comm_group.size)
    except UsageError as error:
        table, problem = None, f"; {error}"
    path, reason = choose(op, bytes, device, paths, table)
    others = tuple(other for other in paths if other != path)
    return Explanation(op, bytes, comm_group.label, device, path, reason + problem, others)


def available_paths(comm_group: CommGroup, device: str) -> tuple[str, ...]:
    """Return the available paths for tensors on this device, the path of the backend first."""
    from tutti.comm.shm.registration import hosts

    backend = comm_group.backend(device)
    if backend == "shm" and hosts(comm_group.process_group) > 1:
        return ("hierarchical",)
    if device == "cuda" and backend == "nccl" and _has_symmetric_memory(comm_group):
        return backend, "symmetric one-shot"
    return (backend,)


def _has_symmetric_memory(comm_group: CommGroup) -> bool:
    """Return whether torch has CUDA symmetric memory and all group ranks are on this host."""
    if comm_group.has_symmetric_memory is None:
        from tutti.comm.symmetric import available

        comm_group.has_symmetric_memory = False
        if comm_group.size > 1 and available("cuda")["cuda"][0]:
            # Every rank writes its address to the store when it first uses tutti.comm.
            keys = [f"tutti/ledger/{rank}" for rank in comm_group.ranks]
            store = c10d._get_default_store()
            store.wait(keys)
            addresses = map(json.loads, store.multi_get(keys))
            comm_group.has_symmetric_memory = all(map(ledger.is_on_this_machine, addresses))
    return comm_group.has_symmetric_memory


def sender_of(operation: Operation) -> Callable[[Operation, bool], Any]:
    """Return the function that sends an operation on a GPU: `issue` or the one-shot kernels."""
    from tutti.comm.symmetric.heap_collectives import STAGED_BYTES

    if operation.kind != "all_reduce" or operation.bytes > STAGED_BYTES:
        return issue
    if operation.reduction != "sum" or operation.target.dtype not in _ONE_SHOT_DTYPES:  # type: ignore[union-attr]
        return issue
    comm_group = operation.comm_group
    paths = available_paths(comm_group, "cuda")
    if len(paths) == 1:
        return issue
    tables = comm_group.path_tables
    if "cuda" not in tables:
        tables["cuda"] = _table_of_rank_0(comm_group)
    path, _ = choose(operation.kind, operation.bytes, "cuda", paths, tables["cuda"])
    if path != "symmetric one-shot":
        return issue
    # The one-shot kernels of different ranks wait for each other, so kernels on two streams could
    # deadlock. Therefore all one-shot kernels of a group run on the stream of the group's first
    # one-shot kernel, and operations on other streams use NCCL.
    stream = torch.cuda.current_stream().cuda_stream
    if comm_group.symmetric_stream is None:
        comm_group.symmetric_stream = stream
    return _one_shot if comm_group.symmetric_stream == stream else issue


def _table_of_rank_0(comm_group: CommGroup) -> Table | None:
    """Return rank 0's table, which all ranks use.

    Ranks with different tables could choose different paths and wait for each other forever.
    """
    key = "tutti/paths"
    if comm_group.rank != 0:
        text = comm_group.store.get(key).decode()  # waits until rank 0 has set the key
        return parse(text) if text else None
    try:
        table = load(comm_group.size)
    except UsageError as error:
        warnings.warn(f"{error} The default paths are used instead.", stacklevel=2)
        table = None
    comm_group.store.set(key, "" if table is None else table.to_json())
    return table


class _KernelWork:
    """The Work of an operation that was launched as a kernel on the current stream."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """Make the current stream wait for the kernel."""
        torch.cuda.current_stream(self._result.device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[self._result.device]
        )
        future.set_result([self._result])
        return future


def _one_shot(operation: Operation, asynchronous: bool) -> _KernelWork | None:
    """All-reduce through a buffer in symmetric memory, on the current stream.

    Return the Work, or None if `asynchronous` is False.
    """
    from tutti.comm.symmetric import all_reduce_staged

    assert operation.target is not None
    all_reduce_staged(operation.target, "sum", operation.comm_group.process_group)
    return _KernelWork(operation.target) if asynchronous else None
