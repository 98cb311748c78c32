"""tutti world: rank, device and backend of every rank, and the source of each value."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable, write_json
from tutti.world.errors import START_TIMEOUT, UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from rich.console import Console

    from tutti.comm.ledger import ProcessLedger


@dataclass(frozen=True)
class Show:
    """Show a row for each rank, and where each value came from.

    Start it as a training job: alone, with --ranks, or under torchrun, srun or mpirun.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Local ranks to start, unless a launcher already did."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the ranks; auto: CUDA if a GPU is visible."""
    ranks_per_gpu: int | None = None
    """Ranks that may share one GPU (default 1)."""
    json: Path | None = None
    """Also write the rows to this file."""
    start_timeout: float = START_TIMEOUT
    """Seconds for all ranks to start."""
    ledger: tuple[int, ...] | None = None
    """Start no rank: show the current communication and source line of the processes with these
    ids, or of all your processes on this host, even if they hang."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Show, "tutti world", arguments)
    check_writable("--json", options.json)
    if options.ledger is not None:
        rows = _show_ledgers(options.ledger)
        if options.json is not None:
            write_json(options.json, "tutti.world.ledger/1", {"rows": rows})
        return 0
    if options.ranks is not None and identify(os.environ).size == 1:
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "world", *arguments],
            ranks=options.ranks,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu or 1,
            show="first",
            start_timeout=options.start_timeout,
        ).run()

    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    with init(
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        start_timeout=options.start_timeout,
    ) as world:
        rows = gather_json(world.row())
        if world.is_first:
            _print_table(rows)
            if options.json is not None:
                write_json(options.json, "tutti.world/1", {"rows": rows})
    return 0


_COLUMNS = (
    *("rank", "local_rank", "node", "host", "device", "backend", "launcher", "cpus", "threads"),
)


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
    # Most reasons are the same on every rank, so each different reason is printed once.
    for value in rows[0]["reasons"]:
        by_rank = [row["reasons"].get(value, "") for row in rows]
        for reason in dict.fromkeys(by_rank):
            ranks = [str(rank) for rank, other in enumerate(by_rank) if other == reason]
            which = "" if len(ranks) == len(rows) else f" (rank {', '.join(ranks)})"
            out.print(f"  {value}: {reason}{which}", markup=False)
    sharing = max(row["ranks_on_device"] for row in rows)
    if sharing > 1:
        out.print(f"note: {sharing} ranks share one GPU")


def _show_ledgers(pids: Sequence[int]) -> list[dict[str, Any]]:
    """Print and return a row for each of these processes, or for all processes with a ledger."""
    from tutti.comm.ledger import processes, read_process

    found = [read_process(pid) for pid in pids or processes()]
    ledgers = [ledger for ledger in found if ledger is not None]
    for pid, ledger in zip(pids, found, strict=False):
        if ledger is None:
            raise UsageError(
                f"--ledger {pid}: no ledger there: the process has ended, belongs to another user, "
                "or has not called tutti.comm: `tutti world --ledger` lists the processes with one"
            )
    rows = [_row(ledger) for ledger in sorted(ledgers, key=lambda each: (each.rank, each.pid))]
    if rows:
        _print_rows("operations, from the ledgers of this host", rows, wrap=False)
    else:
        print("no process of this user on this host has a ledger")
    return rows


def _row(ledger: "ProcessLedger") -> dict[str, Any]:
    current, state = ledger.current, ""
    if current is not None:
        running = f"for {current.age:.1f} s"
        state = running if current.ended is None else f"{current.ended:.1f} s ago"
        state = f"{current.state} {state}"
    return {
        "rank": f"{ledger.rank} of {ledger.size}" if ledger.rank >= 0 else "none",
        "pid": ledger.pid,
        "operation": "none yet" if current is None else str(current),
        "state": state,
        "called at": "" if current is None else current.where,
        "main thread": ledger.location and f"{ledger.location}, {ledger.location_age:.1f} s ago",
    }
