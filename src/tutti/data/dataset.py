"""Datasets: a training and a test set of samples, fetched a batch at a time.

`prepare` is separate from `fetch`, so that images are copied to the device as bytes (a quarter of
the size of float32) and are converted there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset as MapDataset
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tutti.data import DataError

Pair = tuple[Tensor, Tensor]


class Samples(ABC):
    """A fixed number of (input, target) samples. Subclass it for your own data."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Tensor) -> Pair:
        """Return the samples at `indices` (1-D, int64, possibly empty), stacked along dim 0."""

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        """Convert a fetched batch to the model's input on its device. It must be deterministic."""
        return inputs, targets

    def batch(self, indices: Tensor | Sequence[int]) -> Pair:
        """Fetch and prepare the samples at `indices`. Training uses a Loader instead."""
        return self.prepare(*self.fetch(torch.as_tensor(indices, dtype=torch.int64)))

    def to(self, device: torch.device) -> "Samples":
        """Return the same samples stored on `device`. Their `fetch` returns tensors on `device`."""
        name = type(self).__name__
        raise DataError(f"{name} cannot be stored on the device: leave out --data-on-device")


class TensorSamples(Samples):
    """Samples held in memory as two tensors: sample i is `inputs[i]`, `targets[i]`."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"there are {len(inputs)} inputs but {len(targets)} targets")
        self.inputs, self.targets, self.transform = inputs, targets, transform

    def __len__(self) -> int:
        return len(self.inputs)

    def fetch(self, indices: Tensor) -> Pair:
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return (self.transform(inputs) if self.transform else inputs), targets

    def to(self, device: torch.device) -> Self:
        """Copy the samples to `device` and prepare them once; `fetch` is then a single gather."""
        try:
            inputs, targets = self.prepare(self.inputs.to(device), self.targets.to(device))
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{len(self)} samples do not fit into {device}: leave out --data-on-device"
            ) from error
        return type(self)(inputs, targets)


class MapSamples(Samples):
    """A torch map-style dataset: `dataset[i]` returns (input, target); `collate` stacks them.

    The state of random transforms is not saved: a resumed run has the same samples, but different
    random transforms.
    """

    def __init__(
        self, dataset: MapDataset[Any], collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                f"{type(dataset).__name__} cannot be divided among ranks, because it has no length "
                "or no index: use a map-style dataset with __len__ and __getitem__"
            )
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(cast(Any, self.dataset))

    def fetch(self, indices: Tensor) -> Pair:
        positions = indices.tolist()
        if not positions:  # collate needs a sample to find the shape and dtype of an empty batch
            inputs, targets = self.fetch(torch.zeros(1, dtype=torch.int64))
            return inputs[:0], targets[:0]
        fetch_many = getattr(self.dataset, "__getitems__", None)
        samples = fetch_many(positions) if fetch_many else [self.dataset[i] for i in positions]
        pair = self.collate(samples)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(
            isinstance(part, Tensor) and len(part) == len(positions) for part in pair
        ):
            raise DataError(
                f"{type(self.dataset).__name__}: {len(positions)} samples collate to "
                f"{_describe(pair)}, expected (inputs, targets): return (input, target) tensors "
                "from __getitem__, or return tutti.data.MapSamples(dataset, collate) from the "
                "dataset function, where collate makes (inputs, targets) from a list of samples"
            )
        return pair[0], pair[1]


@dataclass(frozen=True)
class Dataset:
    """A named dataset. Image datasets set `classes`, text datasets set `vocabulary`."""

    name: str
    train: Samples
    test: Samples
    classes: int | None = None
    vocabulary: int | None = None
    padded: bool = False  # whether targets contain -100, which have no loss

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input of the model, after `prepare`, such as (1, 28, 28)."""
        return tuple(self.train.batch([0])[0].shape[1:])


def as_samples(data: object) -> Samples:
    """Convert Samples, a pair of (inputs, targets) tensors or a torch Dataset to Samples."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return TensorSamples(*data.tensors)
    if isinstance(data, tuple | list) and [isinstance(part, Tensor) for part in data] == [True] * 2:
        return TensorSamples(*data)
    if isinstance(data, MapDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return MapSamples(cast(MapDataset[Any], data))
    raise DataError(
        f"{_describe(data)} is not a dataset: give (inputs, targets) tensors, a torch map-style "
        "Dataset or a tutti.data.Samples"
    )


def as_dataset(data: object, name: str) -> Dataset:
    """Convert a pair (train, test) to a Dataset. A Dataset is returned unchanged."""
    if isinstance(data, Dataset):
        return data
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    if is_pair and not any(isinstance(part, Tensor) for part in cast(Any, data)):
        train, test = (as_samples(part) for part in cast(Any, data))
        return Dataset(name, train, test)
    raise DataError(
        f"dataset {name} is {_describe(data)}: return a tutti.data.Dataset or a pair (train, test)"
    )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"({', '.join(_describe(part) for part in value)})"
    return type(value).__name__
