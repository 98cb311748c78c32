"""Functions that commands share: they start and join ranks, and check and write result files."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.machine.environment import describe_environment
from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.world import World


@dataclass(frozen=True, kw_only=True)
class WorldFlags:
    """The flags of commands that run on several ranks."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto selects CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU."""
    start_timeout: float | None = None
    """Seconds to wait for all ranks to start (default: 300)."""
    timeout: float | None = None
    """Seconds after which a collective fails (default: 600)."""

    def start_ranks(
        self, command: Sequence[str], ranks: int, env: Mapping[str, str] | None = None, **more: Any
    ) -> int:
        """Run `tutti COMMAND` as local ranks and return the exit code. `more` is for LocalWorld."""
        from tutti.world.launch import LocalWorld

        options: dict[str, Any] = {"ranks_per_gpu": self.ranks_per_gpu, "show": "first"} | more
        tutti = [sys.executable, "-m", "tutti", *command]
        return LocalWorld(command=tutti, ranks=ranks, device=self.device, **options).run(env)

    def join_world(self, backend: str | None = None) -> "World":
        """Join the world that the launcher started, and return it."""
        from tutti.world.world import init

        return init(
            device=self.device,
            backend=backend,
            ranks_per_gpu=self.ranks_per_gpu if self.ranks_per_gpu > 1 else None,
            start_timeout=self.start_timeout,
            timeout=self.timeout,
        )


@contextmanager
def usage_error_on_rank_0(world: "World") -> Iterator[None]:
    """Handle a UsageError that every rank raises.

    All ranks leave the world. Then rank 0 raises the error again, and the others exit with code 2.
    """
    try:
        yield
    except UsageError:
        world.close()
        if world.is_first:
            raise
        raise SystemExit(2) from None


# -- cases that crash ------------------------------------------------------------------------------

_CASES_FILE = "TUTTI_CASES_FILE"
_STOPPED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def start_cases(start_ranks: Callable[[Mapping[str, str]], int]) -> int:
    """Start ranks that run several cases, and return the exit code.

    After a rank has crashed, the process groups of the other ranks cannot be used again. So if a
    case crashes, its error becomes its row, and new ranks run the remaining cases.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-cases-") as folder:
        path = Path(folder, "cases.jsonl")
        while True:
            code = start_ranks({**os.environ, _CASES_FILE: str(path)})
            if code in _STOPPED or not Cases(path).record_crash(code):
                return code


class Cases:
    """The cases of a command, in a file that the ranks and the process that starts them share.

    Each line of the file is a JSON object: {"begun": name}, {"error": text}, {"row": [name, row]}
    or {"crashed": [name, text]}.
    """

    def __init__(self, path: Path | None) -> None:
        self.rows: dict[str, dict[str, Any]] = {}  # rows of the cases that earlier ranks have run
        self.crashed: dict[str, str] = {}  # maps the name of a case to its error
        self._path = path
        self._begun: str | None = None
        self._errors: list[str] = []  # errors of the last case
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for kind, value in (item for line in lines for item in json.loads(line).items()):
            if kind == "begun":
                self._begun, self._errors = value, []
            elif kind == "error":
                self._errors.append(value)
            else:
                (self.rows if kind == "row" else self.crashed)[value[0]] = value[1]

    @classmethod
    def from_environment(cls) -> "Cases":
        """Return the cases of the ranks that `start_cases` started, or none for other launchers."""
        path = os.environ.get(_CASES_FILE)
        return cls(None if path is None else Path(path))

    def is_new(self, name: str) -> bool:
        return name not in self.rows and name not in self.crashed

    @contextmanager
    def running(self, name: str, world: "World") -> Iterator[None]:
        """Record that a case has begun, and the error if the `with` block raises one."""
        if world.is_first:
            self._write("begun", name)
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            first_line = str(error).partition("\n")[0]
            self._write("error", f"rank {world.rank}: {kind}{first_line}")
            raise

    def add_row(self, name: str, row: dict[str, Any]) -> None:
        """Report the row of a case. Called on rank 0."""
        self._write("row", [name, row])

    def record_crash(self, code: int) -> bool:
        """Record the error of the case that ended the ranks. Return whether a case ended them."""
        if self._begun is None or not self.is_new(self._begun):
            return False
        error = [*self._errors, f"the ranks ended with exit code {code}"][0]
        self._write("crashed", [self._begun, error])
        return True

    def _write(self, kind: str, value: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")


# -- result files ----------------------------------------------------------------------------------


def check_writable(flag: str, path: Path | None) -> None:
    """Raise UsageError if a result file cannot be written. Called before ranks are started."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(0, "no permission to write, or a read-only file system")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}. Choose another file.") from None


def write_json(path: Path, schema: str, results: dict[str, Any]) -> None:
    """Write the file of --json, with the schema, the command line, the environment and results."""
    content = {
        "schema": schema,
        "command": ["tutti", *sys.argv[1:]],
        "environment": results.get("environment") or describe_environment(),
        **results,
    }
    write_result("--json", path, json.dumps(content, indent=2) + "\n")


def write_result(flag: str, path: Path, text: str) -> None:
    """Write a result file atomically. On failure, raise UsageError with the name of the flag."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}. Choose another file.") from None
