"""Fetching in other processes, by torch's loader: for data sets that are heavy on Python."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset

from tutti.data.batch import Part
from tutti.data.dataset import Pair, Samples


class WorkerFetches(Iterator[tuple[Part, Pair]]):
    """Each part with its samples, in the order of the parts."""

    def __init__(self, samples: Samples, parts: Iterator[Part], workers: int, seed: int) -> None:
        self._asked: deque[Part] = deque()

        def wanted() -> Iterator[list[int]]:
            for part in parts:
                self._asked.append(part)
                yield part.indices.tolist()

        loader = DataLoader(
            _Batched(samples),
            batch_sampler=wanted(),
            num_workers=workers,
            collate_fn=_as_it_is,
            # Its own generator: the seed of the workers would else be drawn from the global one,
            # and a resumed run would no longer be the uninterrupted one.
            generator=torch.Generator().manual_seed(seed),
        )
        self._rows: Any = iter(loader)

    def __next__(self) -> tuple[Part, Pair]:
        inputs, targets = next(self._rows)
        return self._asked.popleft(), (inputs, targets)

    def close(self) -> None:
        # An exception keeps its frames and with them the iterator alive, so dropping it is not
        # enough to end the processes.
        if self._rows is not None:
            self._rows._shutdown_workers()
        self._rows = None


class _Batched(MapDataset[Any]):
    """Samples as torch's loader wants them: a whole batch is one `__getitems__`."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitems__(self, indices: list[int]) -> Pair:
        return self.samples.fetch(torch.tensor(indices, dtype=torch.int64))


def _as_it_is(pair: Any) -> Any:
    return pair
