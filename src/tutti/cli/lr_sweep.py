"""tutti train --lr-sweep: how sensitive a recipe is to its learning rate, for each world size."""

import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld


def sweep(rates: str, ranks: str, arguments: list[str]) -> int:
    """Train once for each learning rate and number of ranks; print the losses as a table."""
    rate_list = _numbers(rates, "--lr-sweep", float)
    rank_list = _numbers(ranks, "--ranks", int)
    rest = _without(arguments, ("--lr-sweep", "--ranks", "-n", "--lr", "--out"))
    results: dict[tuple[float, int], dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="tutti-sweep-") as folder:
        for rate in rate_list:
            for size in rank_list:
                out = Path(folder, f"lr{rate:g}-ranks{size}")
                print(f"learning rate {rate:g}, {size} ranks", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", "tutti", "train", *rest]
                command += ["--lr", repr(rate), "--out", str(out)]
                # Ranks of their own even for a world of one: results go to files, not to stdout.
                code = LocalWorld(command, int(size), show="none").run()
                if code not in (0, 1):
                    return code
                summary = out / "summary.json"
                results[rate, int(size)] = json.loads(summary.read_text()) if code == 0 else {}
    _print(results, rate_list, [int(size) for size in rank_list])
    return 0


def _print(
    results: dict[tuple[float, int], dict[str, float]], rates: list[float], ranks: list[int]
) -> None:
    table = Table(title="final training loss, test accuracy")
    table.add_column("learning rate")
    for size in ranks:
        table.add_column(f"{size} rank{'s' * (size != 1)}", justify="right")
    for rate in rates:
        cells = []
        for size in ranks:
            found = results[rate, size]
            if not found:
                cells.append("diverged")
                continue
            accuracy = found["test_accuracy"]
            right = "" if accuracy is None else f"  {100 * accuracy:.2f} %"
            cells.append(f"{found['final_loss']:.4f}{right}")
        table.add_row(f"{rate:g}", *cells)
    Console().print(table)


def _numbers(text: str, flag: str, kind: type[float] | type[int]) -> list[float]:
    try:
        numbers = [kind(item) for item in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text}: give numbers with commas between them") from None
    if not all(number > 0 for number in numbers):
        raise UsageError(f"{flag} {text}: every number must be above 0")
    return numbers


def _without(arguments: list[str], flags: tuple[str, ...]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in flags:
            skip = True
        elif not argument.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(argument)
    return kept
