"""Which pairs there are: those that come with tutti, and those in a file of one's own.

No torch in this file: the command line looks names up before it starts anything.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tutti.bench.pairs.pair import Make
from tutti.world.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Listed:
    """A pair by name: what its sides do, and where the function is that makes it."""

    name: str
    about: str  # what the baseline does → what the optimized form does
    home: str  # a module, or a file
    function: str

    def load(self) -> Make:
        """The function; imports its module, and torch with it."""
        if self.home.endswith(".py"):
            return next(make for make in _made_in(Path(self.home)) if name_of(make) == self.name)
        make: Make = getattr(import_module(self.home), self.function)
        return make


_STEPS, _MESSAGES = "tutti.bench.pairs.steps", "tutti.bench.pairs.messages"
_MEMORY, _REPLICAS = "tutti.bench.pairs.memory", "tutti.bench.pairs.replicas"
SHIPPED = {
    name: Listed(name, about, home, name.replace("-", "_"))
    for name, about, home in (
        ("data-parallel", "DataParallel in one process → DDP, a process for each GPU", _REPLICAS),
        ("overlap", "gradients all-reduced after backward → during it, same buckets", _STEPS),
        ("grouped", "many small all-reduces → the same in comm.group()", _MESSAGES),
        ("buckets", "all gradients in one bucket → buckets of the size found best", _STEPS),
        ("from-scratch", "an all-reduce for each gradient → one for all of them", _MESSAGES),
        ("pinned", "copies to the GPU from pageable memory → from pinned memory", _MEMORY),
        ("shm", "a DDP step over gloo → over shared memory", _STEPS),
        ("symmetric", "a small message by a collective → by symmetric memory", _MESSAGES),
        ("accumulation", "all-reduce after each small batch → after several", _STEPS),
        ("unified", "explicit copies through pinned memory → unified memory", _MEMORY),
        ("placement", "memory on this rank's NUMA node → on another (a cost)", _MEMORY),
        ("bf16-gradients", "gradients sent in full precision → as bfloat16", _STEPS),
    )
}


def choose(only: Sequence[str], file: Path | None) -> list[Listed]:
    """The pairs that were asked for, in order; refuses names that nobody has.

    With a file and no names these are the file's, with neither all that come with tutti.
    """
    own = {} if file is None else {each.name: each for each in _listed(file)}
    known = SHIPPED | own
    for name in only:
        if name not in known:
            raise UsageError(f"--only: no pair {name!r}: {did_you_mean(name, known)}")
        if only.count(name) > 1:
            raise UsageError(f"--only {','.join(only)}: name {name} once")
    return [known[name] for name in only or own or SHIPPED]


def name_of(make: Make) -> str:
    """What a pair is called."""
    return str(getattr(make, "__name__", "")).replace("_", "-")


def _listed(file: Path) -> list[Listed]:
    if not file.is_file():
        raise UsageError(f"--file {file}: there is no such Python file")
    home = file.absolute()
    return [
        Listed(name_of(make), (make.__doc__ or "").strip().partition("\n")[0], str(home), "")
        for make in _made_in(home)
    ]


@cache
def _made_in(file: Path) -> list[Make]:
    """The functions that a file of one's own lists; the file runs once."""
    spec = importlib.util.spec_from_file_location(f"tutti_pairs_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--file {file}: its name must end in .py")
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever somebody's file may raise
        raise UsageError(f"--file {file}: {type(error).__name__}: {error}") from error
    made = getattr(module, "PAIRS", None)
    if not isinstance(made, list) or not made or not all(map(callable, made)):
        raise UsageError(
            f"--file {file}: it must say PAIRS = [function, …], functions that take a Setting and "
            "return a Pair: see docs/pairs.md"
        )
    return made
