"""How many samples a step has: what the program's loader gives it while a capture runs.

Like capture.py, this file imports torch and the standard library alone.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader


class BatchWatch:
    """Counts what one loader gives: the first that is asked for a batch after `begin`.

    That is after the program's first step, so an evaluation before it is not taken for training.
    Loaders of torch count by their batch size, tutti's own by what a batch holds.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._loader: Any = None
        self._samples: float | None = 0.0

    def begin(self) -> None:
        """From now on batches are counted."""
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", _of_torch)
        ours = sys.modules.get("tutti.data.loader")
        if ours is not None:
            self._wrap(ours.Loader, "_received", _of_tutti)

    def end(self, steps: int) -> int | None:
        """Loaders are as they were before. Samples per step of this rank; None if not known."""
        while self._undo:
            self._undo.pop()()
        self._loader = None
        return round(self._samples / steps) or None if self._samples and steps else None

    def _wrap(self, owner: Any, name: str, look: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        given = getattr(owner, name)

        def counted(loader: Any, *arguments: Any) -> Any:
            batch = given(loader, *arguments)
            self._count(*look(loader, batch))
            return batch

        setattr(owner, name, counted)
        self._undo.append(lambda: setattr(owner, name, given))

    def _count(self, loader: Any, samples: Any) -> None:
        if self._loader is None:
            self._loader = loader
        if self._loader is loader and self._samples is not None:
            self._samples = self._samples + samples if isinstance(samples, int | float) else None


def _of_torch(iterator: Any, batch: Any) -> tuple[Any, Any]:
    # An epoch has its own iterator; the sampler of batches is the loader's.
    sampler = getattr(iterator, "_index_sampler", None)
    if not getattr(iterator, "_auto_collation", False):
        return sampler, None  # the data set makes batches by itself
    size = getattr(sampler, "batch_size", None)
    if size and getattr(sampler, "split_batches", False):  # Accelerate: a batch is for all ranks
        size /= getattr(sampler, "num_processes", 1)
    return sampler, size


def _of_tutti(loader: Any, batch: Any) -> tuple[Any, Any]:
    return loader, batch.count
