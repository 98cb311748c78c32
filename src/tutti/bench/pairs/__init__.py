"""Pairs: a baseline and an optimized form of it, which are measured in turn and compared.

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

The name of a pair is the name of its function with dashes instead of underscores. The first line of
the function's docstring describes the two sides of the pair: the baseline, an arrow (→) and the
optimized form. This module does not import torch, so that the command line can look up names
quickly before it starts ranks.
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
    """Two functions without arguments that do the same work. Every rank calls both functions.

    Each function returns its result: a tensor, a number, or a list, tuple or dict of results. The
    result must not depend on earlier calls. On CUDA, a call may return before its work on the
    current stream is done, because the harness synchronizes the device.
    """

    baseline: Callable[[], Any]
    optimized: Callable[[], Any]
    tolerance: float = 0.0
    """Largest allowed difference of the results, relative to the baseline's largest value."""
    reason: str = ""
    """The workload, and why the tolerance is not 0. This text is printed below the row."""
    close: Callable[[], None] = lambda: None
    """A function that all ranks call after the measurement of the pair, to free resources."""


@dataclass(frozen=True)
class Setting:
    """The world and the workload size. Every function that makes a pair gets a Setting."""

    world: "World"
    quick: bool = False
    """Whether to use small workloads, which only check that a pair works (--quick)."""

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
    about: str  # "the baseline → the optimized form"
    make: Callable[[Setting], Pair]


def _make_builtin(name: str, setting: Setting) -> Pair:
    """Return a built-in pair. The module of the pair is imported here, because it imports torch."""
    kind = "memory" if name in ("pinned", "unified", "placement") else "communication"
    module = import_module(f"tutti.bench.pairs.{kind}_pairs")
    pair: Pair = getattr(module, name.replace("-", "_"))(setting)
    return pair


BUILTIN_PAIRS = {
    name: PairEntry(name, about, partial(_make_builtin, name))
    for name, about in (
        ("data-parallel", "DataParallel in one process → DDP, one process per GPU"),
        ("overlap", "gradients all-reduced after backward → during backward"),
        ("grouped", "many small all-reduces → the same all-reduces in comm.group()"),
        ("buckets", "all gradients in one bucket → buckets of the fastest size"),
        ("from-scratch", "one all-reduce per gradient → one all-reduce for all gradients"),
        ("pinned", "copies to the GPU from pageable memory → from pinned memory"),
        ("shm", "a DDP step over gloo → over shared memory"),
        ("symmetric", "a small message with a collective → with symmetric memory"),
        ("accumulation", "all-reduce after each microbatch → after several microbatches"),
        ("unified", "explicit copies through pinned memory → unified memory"),
        ("placement", "memory on this rank's NUMA node → on another, slower NUMA node"),
        ("bf16-gradients", "gradients sent in full precision → as bfloat16"),
    )
}


def select_pairs(only: Sequence[str], file: Path | None) -> list[PairEntry]:
    """Return the pairs that --only names.

    Without --only, return all pairs of --file. Without --file, return all built-in pairs.
    """
    from_file = {} if file is None else {entry.name: entry for entry in _entries_in(file)}
    available = BUILTIN_PAIRS | from_file
    for name in only:
        if name not in available:
            raise UsageError(f"--only: there is no pair {name!r}: {did_you_mean(name, available)}")
        if only.count(name) > 1:
            raise UsageError(f"--only {','.join(only)} has {name} twice. Name each pair once")
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
    except (Exception, SystemExit) as error:  # a user's file may raise any exception
        raise UsageError(f"--file {file}: {type(error).__name__}: {error}") from error
    factories = getattr(module, "PAIRS", None)
    if not isinstance(factories, list) or not factories or not all(map(callable, factories)):
        raise UsageError(f"--file {file} must define PAIRS = [function, …] (see Pair and Setting)")
    for factory in factories:
        about = (factory.__doc__ or "").strip().partition("\n")[0]
        name = str(getattr(factory, "__name__", "")).replace("_", "-")
        yield PairEntry(name, about, factory)
