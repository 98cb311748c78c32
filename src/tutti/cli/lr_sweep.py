"""tutti train --lr-sweep: train with several learning rates and numbers of ranks."""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tutti.measure.terminal import console
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld

if TYPE_CHECKING:
    from tutti.cli.train import Train

Results = dict[tuple[float, int], dict[str, Any]]  # summaries by learning rate and ranks


def sweep(options: "Train", arguments: list[str]) -> int:
    """Train once for each learning rate and number of ranks; print the losses as a table."""
    results, code = train_all(options, arguments)
    if code == 0:
        print_table(results)
    return code


def train_all(options: "Train", arguments: list[str]) -> tuple[Results, int]:
    """Train once for each learning rate and number of ranks.

    Returns the summaries, and the exit code of the first run that failed, or 0.
    """
    rates = _numbers(options.lr_sweep or "", "--lr-sweep", float)
    ranks = [int(size) for size in _numbers(options.ranks or "1", "--ranks", int)]
    rest = _without(arguments, ("--lr-sweep", "--ranks", "-n", "--lr", "--out"))
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="tutti-sweep-") as folder:
        for rate in rates:
            for size in ranks:
                out = Path(folder, f"lr{rate:g}-ranks{size}")
                print(f"learning rate {rate:g}, ranks {size}", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", "tutti", "train", *rest]
                command += ["--lr", repr(rate), "--out", str(out)]
                code = LocalWorld(
                    command,
                    ranks=size,
                    device=options.device,
                    ranks_per_gpu=min(size, options.ranks_per_gpu),
                    show="none",
                ).run()
                summary = out / "summary.json"
                found = json.loads(summary.read_text()) if summary.exists() else {}
                if code != 0 and "diverged" not in found:
                    return results, code  # the run failed, but not because it diverged
                results[rate, size] = found
    return results, 0


def print_table(results: Results) -> None:
    """Print the losses, one line per learning rate."""
    rates = list(dict.fromkeys(rate for rate, _ in results))
    ranks = list(dict.fromkeys(size for _, size in results))
    table = Table(title="final training loss, test accuracy")
    table.add_column("learning rate")
    for size in ranks:
        table.add_column(f"{size} rank{'s' * (size != 1)}", justify="right")
    for rate in rates:
        table.add_row(f"{rate:g}", *[_cell(results.get((rate, size))) for size in ranks])
    console().print(table)


def _cell(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "–"
    if "diverged" in summary:
        return "diverged"
    accuracy = summary["test_accuracy"]
    right = "" if accuracy is None else f"  {100 * accuracy:.2f} %"
    return f"{summary['final_loss']:.4f}{right}"


def _numbers(text: str, flag: str, kind: type[float] | type[int]) -> list[float]:
    try:
        numbers = [kind(item) for item in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text}: give numbers with commas between them") from None
    if not all(number > 0 for number in numbers):
        raise UsageError(f"{flag} {text}: every number must be above 0")
    return numbers


def _without(arguments: list[str], flags: tuple[str, ...]) -> list[str]:
    """Return the arguments without these flags and their values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        # `--lr_sweep=1` is the flag `--lr-sweep` with its value.
        flag, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif flag.replace("_", "-") in flags:
            skip = not equals
        else:
            kept.append(argument)
    return kept
