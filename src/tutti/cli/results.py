"""Code that several commands use to start ranks, join a world and write result files."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.machine.environment import describe_environment
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.world import World


@dataclass(frozen=True, kw_only=True)
class WorldFlags:
    """The flags of commands that run on several ranks."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `auto` selects CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU."""
    start_timeout: float | None = None
    """Seconds to wait for all ranks to start (default: 300)."""
    timeout: float | None = None
    """Seconds after which a collective fails (default: 600)."""

    def device_type(self) -> Literal["cpu", "cuda"]:
        """Return the device, after "auto" has been resolved on this host."""
        on_gpu = self.device == "cuda" or (self.device == "auto" and visible_gpu_count() > 0)
        return "cuda" if on_gpu else "cpu"

    def check_ranks(self, ranks: int) -> None:
        """Raise UsageError if this host cannot run this number of ranks."""
        from tutti.world.launch import LocalWorld

        LocalWorld([], ranks, self.device, self.ranks_per_gpu).check()

    def start_ranks(
        self, command: Sequence[str], ranks: int, env: Mapping[str, str] | None = None, **more: Any
    ) -> int:
        """Run `tutti COMMAND` as local ranks and return the exit code.

        `command` is the command without `tutti`. `more` has other arguments of LocalWorld.
        """
        from tutti.world.launch import LocalWorld

        self.check_ranks(ranks)
        print_start(command[0], ranks)
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


def print_start(command: str, ranks: int) -> None:
    """Print that ranks are starting, if stderr is a terminal. Importing torch may take 10 s."""
    if sys.stderr.isatty():
        count = f"{ranks} rank{'s' * (ranks != 1)}"
        print(f"tutti {command}: starting {count}", file=sys.stderr, flush=True)


@contextmanager
def usage_error_on_rank_0(world: "World") -> Iterator[None]:
    """Make only rank 0 print a UsageError that all ranks raise in the `with` block.

    All ranks close the world. Then rank 0 raises the error again, and other ranks exit with code 2.
    """
    try:
        yield
    except UsageError:
        world.close()
        if world.is_first:
            raise
        raise SystemExit(2) from None


# -- result files ----------------------------------------------------------------------------------


def write_json(path: Path, schema: str, results: dict[str, Any]) -> None:
    """Write the file of --json: the results, the schema, the command line and the environment."""
    content = {
        "schema": schema,
        "command": ["tutti", *sys.argv[1:]],
        "environment": results.get("environment") or describe_environment(),
        **results,
    }
    write_result("--json", path, json.dumps(content, indent=2) + "\n")


def write_result(flag: str, path: Path, text: str) -> None:
    """Write a result file atomically. Raise UsageError, which names `flag`, if this fails."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}. Choose another file.") from None
