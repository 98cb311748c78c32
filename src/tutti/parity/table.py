"""The table of a check, line by line as it grows: it may take minutes, or be stopped."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tutti.parallel.layout import Layout

_ERRORS = ("loss", "grad", "norm", "sgd", "adamw", "stats")


class Table:
    """Prints a row for each layout, and beneath one that failed, what is wrong with it."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._console = Console(highlight=False)
        self._width = max(6, *(len(str(layout)) for layout in layouts))

    def begin(self, title: str) -> None:
        """The title and the names of the columns."""
        self._console.print(Text(title))
        errors = " ".join(f"{name:>5}" for name in _ERRORS)
        self._print(f"{'layout':<{self._width}} {errors}         worst parameter")

    def add(self, row: dict[str, Any]) -> None:
        """One more layout."""
        layout = f"{row['layout']:<{self._width}}"
        if row["not_applicable"]:
            self._print(f"{layout} not applicable: {row['not_applicable']}")
            return
        errors = [row[f"{name}_rel_err"] for name in _ERRORS[:3]]
        errors += [row["update_rel_err"][name] for name in _ERRORS[3:5]]
        errors += [row["buffer_rel_err"]]
        cells = " ".join("    -" if error is None else f"{error:5.0e}" for error in errors)
        verdict = ("ok", "green") if row["ok"] else ("FAILED", "red")
        name = row["worst_parameter"].removesuffix(".weight")
        self._print(f"{layout} {cells}  ", (f"{verdict[0]:<6}", verdict[1]), f" {name}")
        if row["diagnosis"]:
            said = row["diagnosis"]
            if row["worst_buffer"] is None or row["worst_buffer"] not in said:
                said += f" (worst: {row['worst_parameter']}, {row['worst_role']})"
            self._print((f"{row['layout']} FAILED: {said}", "red"))
        if row["own_buffers"]:
            first, *others = row["own_buffers"]
            more = f" and {len(others)} more" if others else ""
            self._print(
                f"{row['layout']} note: not compared: {first}{more}. Every data rank keeps what it "
                "saw in its own part of the batch; evaluation and checkpoints take rank 0's"
            )

    def _print(self, *parts: str | tuple[str, str]) -> None:
        # One line stays one line, for grep; a terminal that is too narrow folds it itself.
        self._console.print(Text.assemble(*parts), soft_wrap=True)
