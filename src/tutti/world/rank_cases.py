"""Lets a command that runs several cases continue after one case has crashed.

A case is, for example, a layout or a message size. The error message of the crashed case becomes
its row in the results, and new ranks run the remaining cases.
"""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tutti.world.errors import UsageError

_CASES_FILE = "TUTTI_CASES_FILE"
# Exit codes of ranks that were stopped with a signal by the user or by the scheduler.
_STOPPED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def start_cases(start_ranks: Callable[[Mapping[str, str]], int]) -> int:
    """Start ranks that run several cases, and return the exit code.

    After a rank has crashed, the process groups of the other ranks cannot be used again. So the
    crash is recorded, and new ranks are started for the remaining cases.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-cases-") as folder:
        path = Path(folder, "cases.jsonl")
        while True:
            code = start_ranks({**os.environ, _CASES_FILE: str(path)})
            if code in _STOPPED or not Cases(path).record_crash(code):
                return code


class Cases:
    """The state of a command's cases, in a file that the ranks and their launcher read and write.

    Each line of the file is a JSON object: {"begun": name}, {"error": text}, {"ended": name},
    {"row": [name, row]} or {"crashed": [name, text]}.
    """

    def __init__(self, path: Path | None) -> None:
        self.rows: dict[str, dict[str, Any]] = {}  # rows of the cases that earlier ranks have run
        self.crashed: dict[str, str] = {}  # maps the name of each crashed case to its error
        self._path = path
        self._begun: str | None = None  # the case that has begun and not ended
        self._errors: list[str] = []  # errors of the case that began last
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for kind, value in (item for line in lines for item in json.loads(line).items()):
            if kind == "begun":
                self._begun, self._errors = value, []
            elif kind == "ended":
                self._begun = None
            elif kind == "error":
                self._errors.append(value)
            else:
                (self.rows if kind == "row" else self.crashed)[value[0]] = value[1]

    @classmethod
    def from_environment(cls) -> "Cases":
        """Return the cases in the file of `start_cases`.

        A rank that another launcher started has no such file. Its Cases are empty and record
        nothing.
        """
        path = os.environ.get(_CASES_FILE)
        return cls(None if path is None else Path(path))

    @property
    def restarts(self) -> bool:
        """Whether `start_cases` starts new ranks after a crash."""
        return self._path is not None

    @property
    def failed(self) -> list[dict[str, str]]:
        """The cases that crashed, as the value of the key `failed` in a JSON result."""
        return [{"case": name, "error": error} for name, error in self.crashed.items()]

    def is_new(self, name: str) -> bool:
        return name not in self.rows and name not in self.crashed

    @contextmanager
    def running(self, name: str, rank: int) -> Iterator[None]:
        """Record that a case begins. After the `with` block, record that it has ended or failed."""
        if rank == 0:
            self._write("begun", name)
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            first_line = str(error).partition("\n")[0]
            self._write("error", f"rank {rank}: {kind}{first_line}")
            raise
        if rank == 0:
            self._write("ended", name)

    def add_row(self, name: str, row: dict[str, Any]) -> None:
        """Write the row of a case into the file. Called on rank 0."""
        self._write("row", [name, row])

    def record_crash(self, code: int) -> bool:
        """If a case was running when the ranks ended, record its error and return True."""
        if self._begun is None or not self.is_new(self._begun):
            return False
        error = [*self._errors, f"the ranks ended with exit code {code}"][0]
        if code > 128:  # a signal killed a rank, and the other ranks' errors are lost connections
            error = f"a rank was killed by {signal.Signals(code - 128).name}"
        self._write("crashed", [self._begun, error])
        return True

    def _write(self, kind: str, value: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")
