"""The table of a check: a line for each layout, then a line for each that failed."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 80


def print_rows(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print the rows; plain where nobody looks at a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH, no_color=True)
    console.print(Text(title))
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("layout", no_wrap=True)
    for name in ("loss", "grad", "norm", "sgd", "adamw"):
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    table.add_column("", no_wrap=True, min_width=2)
    table.add_column("worst parameter", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        if row["ok"] is False:
            line = f"{row['layout']} FAILED: {row['diagnosis']} (worst: {row['worst_parameter']})"
            console.print(Text(line, style="red"), soft_wrap=True)
    for reason in dict.fromkeys(row["not_applicable"] for row in rows if row["not_applicable"]):
        which = [row["layout"] for row in rows if row["not_applicable"] == reason]
        console.print(Text(f"not applicable, {', '.join(which)}: {reason}"), soft_wrap=True)


def progress_line(row: dict[str, Any]) -> str:
    """One row as it comes, for whoever waits."""
    if row["not_applicable"]:
        return f"{row['layout']}: not applicable"
    verdict = "ok" if row["ok"] else "FAILED"
    return f"{row['layout']}: {verdict}, gradients within {row['grad_rel_err']:.1e}"


def _cells(row: dict[str, Any]) -> list[str | Text]:
    if row["not_applicable"]:
        return [row["layout"], *["-"] * 5, "-"]
    updates = row["update_rel_err"]
    errors = [row["loss_rel_err"], row["grad_rel_err"], row["norm_rel_err"]]
    verdict = Text("ok", style="green") if row["ok"] else Text("FAILED", style="red")
    return [
        row["layout"],
        *(f"{error:.0e}" for error in (*errors, updates["sgd"], updates["adamw"])),
        verdict,
        row["worst_parameter"].removesuffix(".weight"),
    ]
