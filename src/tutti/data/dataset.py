"""What a data set is here: samples that are fetched many at a time, for training and for test.

`fetch` takes a whole batch of indices, because a Python call per sample is what makes loaders slow.
`prepare` turns what was fetched into what a model takes. The two are apart so that bytes travel to
the device as bytes (a quarter of the traffic of float32) and become numbers there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset as MapDataset
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tutti.data.errors import DataError

Pair = tuple[Tensor, Tensor]


class Samples(ABC):
    """A fixed number of (input, target) samples. Subclass it for data of one's own."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Tensor) -> Pair:
        """The samples at `indices` (1-D, int64, possibly empty), stacked along dim 0."""

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        """What a model sees of a fetched batch, on the batch's device. A fixed function."""
        return inputs, targets

    def batch(self, indices: Tensor | Sequence[int]) -> Pair:
        """Fetched and prepared: for looking at samples and for tests; training uses a Loader."""
        return self.prepare(*self.fetch(torch.as_tensor(indices, dtype=torch.int64)))

    def on(self, device: torch.device) -> "Samples":
        """The same samples, resident on `device`: fetch then takes and gives tensors there."""
        raise DataError(
            f"{type(self).__name__} cannot be kept on the device, as it is no tensor in memory: "
            "leave out --data-on-device"
        )


class TensorSamples(Samples):
    """Samples that lie in memory: `inputs[i]`, `targets[i]`."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(
                f"{len(inputs)} inputs against {len(targets)} targets: each input needs its target"
            )
        self.inputs, self.targets, self.transform = inputs, targets, transform

    def __len__(self) -> int:
        return len(self.inputs)

    def fetch(self, indices: Tensor) -> Pair:
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return (self.transform(inputs) if self.transform else inputs), targets

    def on(self, device: torch.device) -> Self:
        """On `device` and prepared once for all, so that a step is a single gather."""
        try:
            inputs, targets = self.prepare(self.inputs.to(device), self.targets.to(device))
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{len(self)} samples do not fit into the memory of {device}: "
                "leave out --data-on-device"
            ) from error
        return type(self)(inputs, targets)


class MapSamples(Samples):
    """Any torch map-style data set: `dataset[i]` gives (input, target), `collate` stacks them.

    A random transform inside it draws from the global generator, which is no part of the data
    position: a resumed run then sees the same samples, but transformed anew.
    """

    def __init__(
        self, dataset: MapDataset[Any], collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                f"{type(dataset).__name__} has no length and no index, so it cannot be cut exactly "
                "among ranks: give a map-style data set with __len__ and __getitem__"
            )
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(cast(Any, self.dataset))

    def fetch(self, indices: Tensor) -> Pair:
        wanted = indices.tolist()
        if not wanted:  # nothing to collate, yet shape and dtype must be those of the others
            inputs, targets = self.fetch(torch.zeros(1, dtype=torch.int64))
            return inputs[:0], targets[:0]
        many = getattr(self.dataset, "__getitems__", None)
        pair = self.collate(many(wanted) if many else [self.dataset[i] for i in wanted])
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and all(isinstance(part, Tensor) and len(part) == len(wanted) for part in pair)
        ):
            raise DataError(
                f"{type(self.dataset).__name__}: {len(wanted)} samples collate to "
                f"{_describe(pair)}, expected (inputs, targets): give a collate function that "
                "returns two tensors with the batch as dim 0"
            )
        return pair[0], pair[1]


@dataclass(frozen=True)
class Dataset:
    """A named data set. Images have `classes`, text has a `vocabulary`."""

    name: str
    train: Samples
    test: Samples
    classes: int | None = None
    vocabulary: int | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as a model sees it, such as (1, 28, 28)."""
        return tuple(self.train.batch([0])[0].shape[1:])


def as_samples(data: object) -> Samples:
    """Samples from what a user may have: Samples, (inputs, targets) tensors or a torch Dataset."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return TensorSamples(*data.tensors)
    if isinstance(data, tuple | list) and len(data) == 2:
        inputs, targets = data
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return TensorSamples(inputs, targets)
    if isinstance(data, MapDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return MapSamples(cast(MapDataset[Any], data))
    raise DataError(
        f"{_describe(data)} is no data: give (inputs, targets) tensors, a torch map-style Dataset "
        "or a tutti.data.Samples"
    )


def as_dataset(
    data: object, name: str, *, classes: int | None = None, vocabulary: int | None = None
) -> Dataset:
    """A Dataset from what a user's function returned: a Dataset, or a pair (train, test)."""
    if isinstance(data, Dataset):
        return data
    if not (isinstance(data, tuple | list) and len(data) == 2) or any(
        isinstance(part, Tensor) for part in data
    ):
        raise DataError(
            f"data set {name} is {_describe(data)}: give a tutti.data.Dataset or a pair "
            "(train, test)"
        )
    train, test = (as_samples(part) for part in data)
    return Dataset(name, train, test, classes=classes, vocabulary=vocabulary)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"({', '.join(_describe(part) for part in value)})"
    return type(value).__name__
