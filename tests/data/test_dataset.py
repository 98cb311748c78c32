"""Datasets: a batch of indices in, (inputs, targets) out."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset as MapDataset
from torch.utils.data import IterableDataset, Subset, TensorDataset

from tutti.data import (
    DataError,
    Dataset,
    MapSamples,
    TensorSamples,
    as_dataset,
    as_samples,
)
from tutti.data.image_datasets import Standardise


class Squares(MapDataset[tuple[Tensor, int]]):
    """A user's dataset: sample i is (i², i)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index**2)]), index


def test_importing_tutti_data_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, tutti.data, tutti.data.split;"
        "print([m for m in ('torch', 'numpy', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_fetched() -> None:
    import tutti.data

    for name in tutti.data.__all__:
        assert getattr(tutti.data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tutti.data.nonsense  # noqa: B018


def test_tensors_are_fetched_by_a_batch_of_indices() -> None:
    samples = TensorSamples(torch.arange(20).view(10, 2), torch.arange(10))
    inputs, targets = samples.batch([3, 0, 3])
    assert inputs.tolist() == [[6, 7], [0, 1], [6, 7]]
    assert targets.tolist() == [3, 0, 3]
    assert samples.batch([])[0].shape == (0, 2)


def test_standardise_works_per_channel() -> None:
    images = torch.randint(0, 256, (5, 2, 3, 3), dtype=torch.uint8)
    ready = Standardise(mean=(0.5, 0.25), std=(0.5, 0.125))(images)
    for channel, (mean, std) in enumerate([(0.5, 0.5), (0.25, 0.125)]):
        expected = (images[:, channel].double() / 255 - mean) / std
        # One rounding per operation in float32, on values up to 6.
        torch.testing.assert_close(ready[:, channel].double(), expected, atol=1e-6, rtol=0)
    assert images.dtype == torch.uint8


def test_samples_on_the_device_are_prepared_once() -> None:
    images = torch.randint(0, 256, (6, 1, 2, 2), dtype=torch.uint8)
    samples = TensorSamples(images, torch.arange(6), Standardise((0.3,), (0.4,)))
    resident = samples.to(torch.device("cpu"))
    indices = torch.tensor([5, 1])
    assert resident.inputs.dtype == torch.float32
    torch.testing.assert_close(resident.batch(indices), samples.batch(indices), rtol=0, atol=0)


def test_a_torch_dataset_is_fetched_sample_by_sample_and_collated() -> None:
    samples = as_samples(Squares())
    assert isinstance(samples, MapSamples)
    assert len(samples) == 10
    inputs, targets = samples.batch([3, 1])
    assert inputs.tolist() == [[9.0], [1.0]]
    assert targets.tolist() == [3, 1]


def test_a_torch_dataset_gives_an_empty_batch_of_the_right_shape() -> None:
    inputs, targets = as_samples(Squares()).batch([])
    assert (inputs.shape, inputs.dtype) == ((0, 1), torch.float32)
    assert (targets.shape, targets.dtype) == ((0,), torch.int64)


def test_a_dataset_with_batched_access_is_called_once_per_batch() -> None:
    calls = []

    class Batched(Squares):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
            calls.append(indices)
            return [self[i] for i in indices]

    as_samples(Batched()).batch([4, 2])
    assert calls == [[4, 2]]
    assert as_samples(Subset(Squares(), [7, 8])).batch([1])[1].tolist() == [8]


def test_tensor_datasets_and_pairs_of_tensors_stay_tensors() -> None:
    inputs, targets = torch.zeros(3, 2), torch.arange(3)
    assert isinstance(as_samples(TensorDataset(inputs, targets)), TensorSamples)
    assert isinstance(as_samples((inputs, targets)), TensorSamples)
    samples = TensorSamples(inputs, targets)
    assert as_samples(samples) is samples


def test_a_pair_of_splits_becomes_a_dataset() -> None:
    dataset = as_dataset((Squares(), Subset(Squares(), [1])), "squares")
    assert (dataset.name, len(dataset.train), len(dataset.test)) == ("squares", 10, 1)
    assert dataset.input_shape == (1,)
    assert as_dataset(dataset, "other") is dataset


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_unsuitable_data_is_refused() -> None:
    with pytest.raises(DataError, match="Endless cannot be divided"):
        as_samples(Endless())
    with pytest.raises(DataError, match="int is not a dataset"):
        as_samples(3)
    with pytest.raises(DataError, match="3 inputs but 2 targets"):
        TensorSamples(torch.zeros(3), torch.zeros(2))
    with pytest.raises(DataError, match=r"mine is \(Tensor\[3\], Tensor\[3\]\)"):
        as_dataset((torch.zeros(3), torch.zeros(3)), "mine")
    with pytest.raises(DataError, match="cannot be stored on the device"):
        as_samples(Squares()).to(torch.device("cpu"))


def test_a_collate_that_returns_no_pair_is_refused_with_the_shapes() -> None:
    class Triples(Squares):
        def __getitem__(self, index: int) -> tuple[Tensor, int, int]:  # type: ignore[override]
            return torch.zeros(2), index, index

    with pytest.raises(DataError, match=r"\(Tensor\[2, 2\], Tensor\[2\], Tensor\[2\]\)"):
        MapSamples(Triples()).batch([0, 1])
    pair = MapSamples(Triples(), collate=lambda items: (torch.zeros(len(items)),) * 2)
    assert len(pair.batch([0, 1])[0]) == 2


def test_a_dataset_has_the_input_shape_of_its_model() -> None:
    samples = TensorSamples(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.zeros(4))
    assert Dataset("d", samples, samples, classes=10).input_shape == (1, 28, 28)
