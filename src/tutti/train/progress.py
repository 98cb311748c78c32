"""What a person sees while it trains: a bar on a terminal, a line per interval elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 5.0


class ProgressReport:
    """Shows steps, loss, speed. Silent on all ranks but the first."""

    def __init__(self, steps: int, first: int, shown: bool) -> None:
        self._steps = steps
        self._shown = shown
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._next_line = time.monotonic()
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=steps, completed=first, text="")
            self._bar.start()

    def show(self, step: int, text: str) -> None:
        """Say where the run is. A line every few seconds where there is no bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif self._shown and (time.monotonic() >= self._next_line or step == self._steps):
            print(f"step {step}/{self._steps}: {text}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + _LINE_SECONDS

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._shown:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
