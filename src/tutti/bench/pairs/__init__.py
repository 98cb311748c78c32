"""Pairs: a baseline and its optimized form, measured in turn in one process group and compared.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tutti.bench import Unsupported as Unsupported
from tutti.world.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

    from tutti.world.world import World

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
    """Largest allowed difference of the results, relative to the largest value of the baseline."""
    reason: str = ""
    """The workload, and why the tolerance is not 0. This text is printed below the row."""
    close: Callable[[], None] = lambda: None
    """A function that is called on all ranks after the pair was measured."""


@dataclass(frozen=True)
class Setting:
    """The environment of a pair, which every function that makes a pair gets as its argument."""

    world: "World"
    quick: bool = False
    """Whether to use small workloads that only check that a pair works."""

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

    def need(self, condition: bool, reason: str) -> None:
        """Skip the pair if `condition` is false on any rank. All ranks must call this method."""
        from tutti.world.exchange import gather_json

        if not all(gather_json(condition)):
            raise Unsupported(reason)


class PairEntry(NamedTuple):
    """The name and description of a pair, and a function that makes the pair."""

    name: str
    about: str  # what the baseline does → what the optimized form does
    make: Callable[[Setting], Pair]


def _make_builtin(name: str, setting: Setting) -> Pair:
    """Return a built-in pair. Its module is imported only here, because it imports torch."""
    kind = "memory" if name in ("pinned", "unified", "placement") else "communication"
    module = import_module(f"tutti.bench.pairs.{kind}_pairs")
    pair: Pair = getattr(module, name.replace("-", "_"))(setting)
    return pair


BUILTIN_PAIRS = {
    name: PairEntry(name, about, partial(_make_builtin, name))
    for name, about in (
        ("data-parallel", "DataParallel in one process → DDP, one process per GPU"),
        ("overlap", "gradients all-reduced after backward → during backward"),
        ("grouped", "many small all-reduces → the same in comm.group()"),
        ("buckets", "all gradients in one bucket → buckets of the fastest size"),
        ("from-scratch", "an all-reduce for each gradient → one for all gradients"),
        ("pinned", "copies to the GPU from pageable memory → from pinned memory"),
        ("shm", "a DDP step over gloo → over shared memory"),
        ("symmetric", "a small message with a collective → with symmetric memory"),
        ("accumulation", "all-reduce after each small batch → after several"),
        ("unified", "explicit copies through pinned memory → unified memory"),
        ("placement", "memory on this rank's NUMA node → on another, slower node"),
        ("bf16-gradients", "gradients sent in full precision → as bfloat16"),
    )
}


def select_pairs(only: Sequence[str], file: Path | None) -> list[PairEntry]:
    """Return the pairs named by --only, or else all pairs of --file, or else all built-in pairs."""
    from_file = {} if file is None else {entry.name: entry for entry in _entries_in(file)}
    available = BUILTIN_PAIRS | from_file
    for name in only:
        if name not in available:
            raise UsageError(f"--only has no pair {name!r}: {did_you_mean(name, available)}")
        if only.count(name) > 1:
            raise UsageError(f"--only {','.join(only)} has {name} twice")
    return [available[name] for name in only or from_file or BUILTIN_PAIRS]


def _entries_in(file: Path) -> Iterator[PairEntry]:
    """Yield the pairs in the list PAIRS of a user's file."""
    if not file.is_file():
        raise UsageError(f"--file {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"tutti_pairs_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--file {file} must end in .py")
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise UsageError(f"--file {file}: {type(error).__name__}: {error}") from error
    factories = getattr(module, "PAIRS", None)
    if not isinstance(factories, list) or not factories or not all(map(callable, factories)):
        raise UsageError(f"--file {file} must define PAIRS = [function, …] (see Pair and Setting)")
    for factory in factories:
        about = (factory.__doc__ or "").strip().partition("\n")[0]
        name = str(getattr(factory, "__name__", "")).replace("_", "-")
        yield PairEntry(name, about, factory)
