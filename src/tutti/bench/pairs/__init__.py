"""Pairs: a baseline and its optimized form, measured in turns in one process group and compared.

`tutti bench pairs --file FILE` measures your own pairs. Each pair is made by a function in FILE:

    import torch
    from tutti.bench.pairs import Pair, Setting

    def one_call_for_all_rows(setting: Setting) -> Pair:
        \"\"\"a sum for each row → one sum over the matrix\"\"\"
        matrix = torch.ones(1000, 1000, device=setting.device)
        return Pair(
            baseline=lambda: torch.stack([row.sum() for row in matrix]),
            optimized=lambda: matrix.sum(1),
            tolerance=1e-6,
        )

    PAIRS = [one_call_for_all_rows]

The name of a pair is the name of the function with dashes instead of underscores. The first line of
the docstring describes the two sides. This module does not import torch, so that the command line
can look up names quickly before ranks are started.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tutti.bench import Unsupported
from tutti.world.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

    from tutti.world.world import World

__all__ = ["BUILTIN_PAIRS", "Pair", "PairEntry", "Setting", "Unsupported", "select_pairs"]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Pair:
    """Two functions without arguments that do the same work, on every rank.

    Each function returns its result: a tensor, a number, or a list, tuple or dict of results. Calls
    are independent of each other and can be repeated. On CUDA, a call may return before its work on
    the current stream is done; the harness synchronizes.
    """

    baseline: Callable[[], Any]
    optimized: Callable[[], Any]
    tolerance: float = 0.0
    """Largest allowed difference, relative to the largest value of a tensor. 0: no difference."""
    reason: str = ""
    """The workload, and why the tolerance is not 0. Printed below the row."""
    close: Callable[[], None] = lambda: None
    """Called on all ranks after the pair was measured."""


@dataclass(frozen=True)
class Setting:
    """Where a pair is measured: the argument of every function that makes a pair."""

    world: "World"
    quick: bool = False
    """Use small workloads, to check that a pair works. The figures are not meaningful."""

    @property
    def device(self) -> "torch.device":
        """The device for the tensors of a pair."""
        return self.world.device

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.world.device.type == "cuda"

    def pick(self, full: Value, quick: Value) -> Value:
        """Return `quick` if --quick is set, else `full`."""
        return quick if self.quick else full

    def need(self, has: bool, reason: str) -> None:
        """Skip the pair on all ranks unless `has` is true on every rank. Collective."""
        from tutti.world.exchange import gather_json

        if not all(gather_json(has)):
            raise Unsupported(reason)


PairFactory = Callable[[Setting], Pair]


@dataclass(frozen=True)
class PairEntry:
    """The name of a pair and the function that makes the pair; its module is imported later."""

    name: str
    about: str  # what the baseline does → what the optimized form does
    make: PairFactory


def _make_builtin(module: str, name: str, setting: Setting) -> Pair:
    """Import the module, which imports torch, and call the function that makes the pair."""
    pairs = import_module(f"tutti.bench.pairs.{module}_pairs")
    pair: Pair = getattr(pairs, name.replace("-", "_"))(setting)
    return pair


BUILTIN_PAIRS = {
    name: PairEntry(name, about, partial(_make_builtin, module, name))
    for name, module, about in (
        ("data-parallel", "training", "DataParallel in one process → DDP, a process for each GPU"),
        ("overlap", "training", "gradients all-reduced after backward → during it, same buckets"),
        ("grouped", "message", "many small all-reduces → the same in comm.group()"),
        ("buckets", "training", "all gradients in one bucket → buckets of the size found best"),
        ("from-scratch", "message", "an all-reduce for each gradient → one for all of them"),
        ("pinned", "memory", "copies to the GPU from pageable memory → from pinned memory"),
        ("shm", "training", "a DDP step over gloo → over shared memory"),
        ("symmetric", "message", "a small message by a collective → by symmetric memory"),
        ("accumulation", "training", "all-reduce after each small batch → after several"),
        ("unified", "memory", "explicit copies through pinned memory → unified memory"),
        ("placement", "memory", "memory on this rank's NUMA node → on another (a cost)"),
        ("bf16-gradients", "training", "gradients sent in full precision → as bfloat16"),
    )
}


def select_pairs(only: Sequence[str], file: Path | None) -> list[PairEntry]:
    """Return the pairs that --only names, or else all pairs of --file, or else all built-in pairs.

    Raises UsageError if --only names an unknown pair.
    """
    own = {} if file is None else {entry.name: entry for entry in _entries_in(file)}
    known = BUILTIN_PAIRS | own
    for name in only:
        if name not in known:
            raise UsageError(f"--only: no pair {name!r}: {did_you_mean(name, known)}")
        if only.count(name) > 1:
            raise UsageError(f"--only {','.join(only)}: {name} is named twice")
    return [known[name] for name in only or own or BUILTIN_PAIRS]


def _entries_in(file: Path) -> list[PairEntry]:
    if not file.is_file():
        raise UsageError(f"--file {file}: there is no such Python file")
    entries = []
    for factory in _factories_in(file):
        name = str(getattr(factory, "__name__", "")).replace("_", "-")
        about = (factory.__doc__ or "").strip().partition("\n")[0]
        entries.append(PairEntry(name, about, factory))
    return entries


def _factories_in(file: Path) -> list[PairFactory]:
    """Return the functions in the list PAIRS of a user's file."""
    spec = importlib.util.spec_from_file_location(f"tutti_pairs_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--file {file}: its name must end in .py")
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise UsageError(f"--file {file}: {type(error).__name__}: {error}") from error
    factories = getattr(module, "PAIRS", None)
    if not isinstance(factories, list) or not factories or not all(map(callable, factories)):
        raise UsageError(
            f"--file {file}: it must define PAIRS = [function, …], functions that take a Setting "
            "and return a Pair"
        )
    return factories
