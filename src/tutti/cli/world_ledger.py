"""What `tutti world --ledger` prints: what each process of this host communicates, and where."""

from collections.abc import Sequence
from typing import Any

from tutti.comm.ledger_reader import OperationRecord, ProcessLedger, processes, read_process
from tutti.world.errors import UsageError


def show_ledgers(pids: Sequence[int]) -> list[dict[str, Any]]:
    """Print a row for each of these processes, or for all that have a ledger; returns the rows."""
    from rich.markup import escape
    from rich.table import Table

    from tutti.measure.terminal import console, table_fits

    found = [read_process(pid) for pid in pids or processes()]
    ledgers = [ledger for ledger in found if ledger is not None]
    for pid, ledger in zip(pids, found, strict=False):
        if ledger is None:
            raise UsageError(
                f"--ledger {pid}: no ledger there: the process has ended, belongs to another user, "
                "or has not called tutti.comm; `tutti world --ledger` lists those that have"
            )
    rows = [_row(ledger) for ledger in sorted(ledgers, key=lambda each: (each.rank, each.pid))]
    out = console()
    if not rows:
        out.print("no process of this user on this host has a ledger")
        return rows
    table = Table(title="operations, from the ledgers of this host")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    if table_fits(table, out):
        out.print(table)
        return rows
    for row in rows:  # a line for each process
        line = ", ".join(f"{name} {value}" for name, value in row.items() if value)
        out.print(line, markup=False, soft_wrap=True)
    return rows


def _row(ledger: ProcessLedger) -> dict[str, Any]:
    current = ledger.current
    location = f"{ledger.location}, {ledger.location_age:.1f} s ago" if ledger.location else ""
    return {
        "rank": f"{ledger.rank} of {ledger.size}" if ledger.rank >= 0 else "none",
        "pid": ledger.pid,
        "operation": "none yet" if current is None else str(current),
        "state": "" if current is None else _state(current),
        "called at": "" if current is None else current.where,
        "main thread": location,
    }


def _state(record: OperationRecord) -> str:
    if record.ended is None:
        return f"{record.state} for {record.age:.1f} s"
    return f"{record.state} {record.ended:.1f} s ago"
