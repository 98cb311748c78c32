"""What `tutti world --ledger` prints: the processes of this host that communicate, and how."""

from collections.abc import Sequence
from typing import Any

from tutti.comm.ledger_reader import Account, Record, processes, read_process
from tutti.world.errors import UsageError


def show_ledgers(pids: Sequence[int]) -> list[dict[str, Any]]:
    """Print a row for each process, of those given or of all there are; returns the rows."""
    from rich.markup import escape
    from rich.table import Table

    from tutti.measure.terminal import console, table_fits

    accounts = [_read(pid) for pid in pids] if pids else _all_accounts()
    rows = [_row(account) for account in accounts]
    out = console()
    if not rows:
        out.print("no process of this user on this host has a ledger")
        return rows
    table = Table(title="operations, as the ledgers of this host say")
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


def _read(pid: int) -> Account:
    account = read_process(pid)
    if account is None:
        raise UsageError(
            f"--ledger {pid}: no ledger there: the process has ended, is another user's, or has "
            "not called tutti.comm; `tutti world --ledger` lists those that have"
        )
    return account


def _all_accounts() -> list[Account]:
    accounts = [account for pid in processes() if (account := read_process(pid)) is not None]
    return sorted(accounts, key=lambda account: (account.rank, account.pid))


def _row(account: Account) -> dict[str, Any]:
    current = account.current
    return {
        "rank": f"{account.rank} of {account.size}" if account.rank >= 0 else "none",
        "pid": account.pid,
        "operation": "none yet" if current is None else str(current),
        "state": "" if current is None else _state(current),
        "called at": "" if current is None else current.where,
        "main thread": f"{account.place}, {account.place_age:.1f} s ago" if account.place else "",
    }


def _state(record: Record) -> str:
    if record.ended is None:
        return f"{record.state} for {record.age:.1f} s"
    return f"{record.state} {record.ended:.1f} s ago"
