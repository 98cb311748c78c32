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
from tutti.data.nested import Nested, count_rows, describe, is_nested, map_tensors, tensors_of

Pair = tuple[Nested, Nested]
"""Inputs and targets."""
Collate = Callable[[list[Any]], Any]
"""A list of samples → (inputs, targets)."""


class Samples(ABC):
    """A fixed number of (input, target) samples. Subclass it for your own data.

    Inputs and targets are tensors, or dicts, tuples or lists of tensors.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Tensor) -> Pair:
        """Return the samples at `indices` (1-D, int64, possibly empty), stacked along dim 0."""

    def prepare(self, inputs: Nested, targets: Nested) -> Pair:
        """Convert a fetched batch to the model's input, on the device of the batch.

        An implementation must be deterministic.
        """
        return inputs, targets

    def batch(self, indices: Tensor | Sequence[int]) -> Pair:
        """Fetch and prepare the samples at `indices`. Training uses a Loader instead."""
        return self.prepare(*self.fetch(torch.as_tensor(indices, dtype=torch.int64)))

    def to(self, device: torch.device) -> "Samples":
        """Return the same samples stored on `device`. Their `fetch` returns tensors on `device`."""
        name = type(self).__name__
        raise DataError(f"{name} cannot be stored on the device: leave out --data-on-device")


class TensorSamples(Samples):
    """Samples held in memory as tensors: sample i is row i of `inputs` and of `targets`."""

    def __init__(
        self, inputs: Nested, targets: Nested, transform: Callable[[Any], Any] | None = None
    ) -> None:
        for kind, value in (("inputs", inputs), ("targets", targets)):
            for tensor in tensors_of(value):
                if len(tensor) != count_rows(inputs):
                    raise DataError(
                        f"there are {count_rows(inputs)} inputs but {len(tensor)} {kind}"
                    )
        self.inputs, self.targets, self.transform = inputs, targets, transform

    def __len__(self) -> int:
        return count_rows(self.inputs)

    def fetch(self, indices: Tensor) -> Pair:
        inputs, targets = map_tensors(
            lambda tensor: tensor.index_select(0, indices), (self.inputs, self.targets)
        )
        return inputs, targets

    def prepare(self, inputs: Nested, targets: Nested) -> Pair:
        return (self.transform(inputs) if self.transform else inputs), targets

    def to(self, device: torch.device) -> Self:
        """Copy the samples to `device` and prepare them once; `fetch` is then a single gather."""
        try:
            pair = map_tensors(lambda tensor: tensor.to(device), (self.inputs, self.targets))
            inputs, targets = self.prepare(*pair)
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{len(self)} samples do not fit into {device}: leave out --data-on-device"
            ) from error
        return type(self)(inputs, targets)


class MapSamples(Samples):
    """A torch map-style dataset: `dataset[i]` returns (input, target); `collate` stacks samples.

    Input and target may be dicts, tuples or lists of tensors.

    The state of random transforms is not saved: a resumed run has the same samples, but different
    random transforms.
    """

    def __init__(self, dataset: MapDataset[Any], collate: Collate = default_collate) -> None:
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
            first = self.fetch(torch.zeros(1, dtype=torch.int64))
            inputs, targets = map_tensors(lambda tensor: tensor[:0], first)
            return inputs, targets
        fetch_many = getattr(self.dataset, "__getitems__", None)
        samples = fetch_many(positions) if fetch_many else [self.dataset[i] for i in positions]
        pair = self.collate(samples)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        valid = is_pair and all(is_nested(part) for part in pair)
        if not valid or any(
            tensor.dim() == 0 or len(tensor) != len(positions) for tensor in tensors_of(pair)
        ):
            raise DataError(
                f"{type(self.dataset).__name__}: collate returned {describe(pair)}, expected "
                "(inputs, targets), each a tensor, or a dict or tuple of tensors with one row per "
                "sample: return (input, target) from __getitem__, or use --collate "
                "package.module:function, which makes (inputs, targets) from a list of samples"
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
    padded: bool = False  # whether targets contain -100, which marks tokens without loss

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input of the model, after `prepare`, such as (1, 28, 28)."""
        inputs = self.train.batch([0])[0]
        if not isinstance(inputs, Tensor):
            raise DataError(
                f"the inputs of dataset {self.name} are {describe(inputs)}, but a built-in model "
                "takes one tensor: use --model package.module:function"
            )
        return tuple(inputs.shape[1:])


def as_samples(data: object, collate: Collate | None = None) -> Samples:
    """Convert Samples, a pair (inputs, targets) of tensors or a torch Dataset to Samples.

    `collate` makes (inputs, targets) from a list of samples of a torch Dataset.
    """
    if collate is None:
        if isinstance(data, Samples):
            return data
        if isinstance(data, TensorDataset) and len(data.tensors) == 2:
            return TensorSamples(*data.tensors)
        is_pair = isinstance(data, tuple | list) and len(data) == 2
        # A tuple of two values is (inputs, targets). A list of two tensors is, too; any other list
        # is a dataset.
        parts = cast(Any, data) if is_pair else ()
        kind: Any = object if isinstance(data, tuple) else Tensor
        if is_pair and all(is_nested(part) and isinstance(part, kind) for part in parts):
            return TensorSamples(*parts)
    elif isinstance(data, Samples | tuple | dict):
        raise DataError(
            f"--collate has no effect on a {type(data).__name__}: return a torch map-style Dataset "
            "or a list of samples, or leave out --collate"
        )
    if isinstance(data, MapDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return MapSamples(cast(MapDataset[Any], data), collate or default_collate)
    raise DataError(
        f"{describe(data)} is not a dataset: give (inputs, targets) tensors, a torch map-style "
        "Dataset or a tutti.data.Samples"
    )


def as_dataset(data: object, name: str, collate: Collate | None = None) -> Dataset:
    """Convert a pair (train, test) to a Dataset. A Dataset is returned unchanged."""
    if isinstance(data, Dataset):
        if collate is not None:
            as_samples(data.train, collate)  # raises DataError
        return data
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    if is_pair and not any(isinstance(part, Tensor) for part in cast(Any, data)):
        train, test = (as_samples(part, collate) for part in cast(Any, data))
        return Dataset(name, train, test)
    raise DataError(
        f"dataset {name} is {describe(data)}: return a tutti.data.Dataset or a pair (train, test)"
    )
