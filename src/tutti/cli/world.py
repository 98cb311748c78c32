"""tutti world: shows the host, device and backend of every rank, and the reason for each value."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tutti.cli.flags import OutputFile, parse
from tutti.cli.results import WorldFlags, write_json
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from rich.console import Console

    from tutti.comm.ledger import ProcessLedger

_LOCATION_COLUMNS = ("rank", "local_rank", "node", "host")
_COLUMNS = (*_LOCATION_COLUMNS, "device", "backend", "launcher", "cpus", "threads")


@dataclass(frozen=True, kw_only=True)
class ShowWorld(WorldFlags):
    """Show the host, device and backend of every rank, with the reason for each value.

    Start this command in the same way as a training job: without a launcher, with --ranks, or under
    torchrun, srun or mpirun.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start (default: 1). Ignored under torchrun, srun or mpirun."""
    json: OutputFile | None = None
    """Also write the rows to this JSON file."""
    ledger: tuple[int, ...] | None = None
    """Do not start ranks. Instead, show the current tutti.comm operation of running processes, and
    the source line that called it. The values are process ids (default: all of your processes on
    this host that use tutti.comm). This also works for processes that hang."""


def main(arguments: list[str]) -> int:
    options = parse(ShowWorld, "tutti world", arguments)
    if options.ledger is not None:
        rows = _show_ledgers(options.ledger)
        if options.json is not None:
            write_json(options.json, "tutti.world.ledger/1", {"rows": rows})
        return 0
    if options.ranks is not None and identify(os.environ).size == 1:
        return options.start_ranks(["world", *arguments], options.ranks)

    from tutti.world.exchange import gather_json

    with options.join_world() as world:
        rows = gather_json(world.row())
        if world.is_first:
            _print_table(rows)
            if options.json is not None:
                write_json(options.json, "tutti.world/1", {"rows": rows})
    return 0


def _print_rows(title: str, rows: list[dict[str, Any]], wrap: bool = True) -> "Console":
    """Print a table, or one line per row if the terminal is too narrow for the table."""
    from rich.markup import escape
    from rich.table import Table

    from tutti.measure.terminal import console, table_fits

    out = console()
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("local_rank", "local"))
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    if table_fits(table, out):
        out.print(table)
        return out
    for row in rows:
        line = ", ".join(f"{name} {value}" for name, value in row.items() if value != "")
        out.print(line, markup=False, soft_wrap=not wrap)
    return out


def _print_table(rows: list[dict[str, Any]]) -> None:
    title = f"world of {len(rows)} rank{'s' * (len(rows) != 1)}"
    out = _print_rows(title, [{name: row[name] for name in _COLUMNS} for row in rows])
    # Most reasons are the same on every rank, so each distinct reason is printed once.
    for value in rows[0]["reasons"]:
        reasons = [row["reasons"].get(value, "") for row in rows]
        for reason in dict.fromkeys(reasons):
            ranks = [str(rank) for rank, other in enumerate(reasons) if other == reason]
            suffix = "" if len(ranks) == len(rows) else f" (rank {', '.join(ranks)})"
            out.print(f"  {value}: {reason}{suffix}", markup=False)
    sharing = max(row["ranks_on_device"] for row in rows)
    if sharing > 1:
        out.print(f"note: {sharing} ranks share one GPU")


def _show_ledgers(pids: Sequence[int]) -> list[dict[str, Any]]:
    """Print and return one row per process. Empty `pids` means all processes that have a ledger.

    A process records its tutti.comm operations in a ledger, which other processes can read.
    """
    from tutti.comm.ledger import processes, read_process

    ledgers = []
    for pid in pids or processes():
        ledger = read_process(pid)
        if ledger is not None:
            ledgers.append(ledger)
        elif pids:
            raise UsageError(
                f"--ledger {pid}: this process has ended, belongs to another user, or has not "
                "called tutti.comm. Run `tutti world --ledger` to list the processes."
            )
    rows = [_row(ledger) for ledger in sorted(ledgers, key=lambda entry: (entry.rank, entry.pid))]
    if rows:
        _print_rows("current operations of the processes on this host", rows, wrap=False)
    else:
        print("none of your processes on this host has called tutti.comm")
    return rows


def _row(ledger: "ProcessLedger") -> dict[str, Any]:
    current, state = ledger.current, ""
    if current is not None:
        ended = f"{current.ended_ago:.1f} s ago" if current.ended_ago is not None else None
        state = f"{current.state} {ended or f'for {current.age:.1f} s'}"
    return {
        "rank": f"{ledger.rank} of {ledger.size}" if ledger.rank >= 0 else "none",
        "pid": ledger.pid,
        "operation": "none yet" if current is None else str(current),
        "state": state,
        "called at": "" if current is None else current.where,
        "main thread": ledger.location and f"{ledger.location}, {ledger.location_age:.1f} s ago",
    }
