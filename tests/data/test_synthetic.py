"""Synthetic data: a function of seed and index, of any shape, with next to no memory."""

import pytest
import torch

from tutti.data import DataError, synthetic_dataset, synthetic_text_dataset


def test_a_sample_depends_on_its_index_and_not_on_its_batch() -> None:
    train = synthetic_dataset((3, 8, 8), classes=10, size=1000).train
    inputs, targets = train.batch(range(1000))
    for index in (0, 1, 500, 999):
        alone, label = train.batch([index])
        assert torch.equal(alone[0], inputs[index])
        assert label.item() == targets[index]


def test_the_seed_and_the_split_change_inputs_and_labels() -> None:
    one, same, other = (synthetic_dataset((4,), 10, seed=seed) for seed in (1, 1, 2))
    indices = range(100)
    assert torch.equal(one.train.batch(indices)[0], same.train.batch(indices)[0])
    assert not torch.equal(one.train.batch(indices)[0], other.train.batch(indices)[0])
    assert not torch.equal(one.train.batch(indices)[0], one.test.batch(indices)[0])


def test_inputs_have_mean_0_and_variance_1_and_labels_are_spread() -> None:
    dataset = synthetic_dataset((3, 16, 16), classes=7, size=5000, test=10)
    inputs, targets = dataset.train.batch(range(5000))
    assert (inputs.dtype, inputs.shape) == (torch.float32, (5000, 3, 16, 16))
    # The pool has 66,000 numbers, so its mean is off by about 1/√66,000 = 0.004.
    assert inputs.mean().item() == pytest.approx(0, abs=0.02)
    assert inputs.var().item() == pytest.approx(1, abs=0.02)
    counts = torch.bincount(targets)
    assert len(counts) == 7
    assert counts.min() > 5000 / 7 * 0.8
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (5000, 10, 7)


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    train = synthetic_dataset((3, 32, 32), classes=100, size=10**12).train
    inputs, targets = train.batch([0, 10**12 - 1])
    assert not torch.equal(inputs[0], inputs[1])
    assert targets.max() < 100


def test_text_targets_are_the_inputs_shifted_by_one_token() -> None:
    dataset = synthetic_text_dataset(seq_len=12, vocabulary=50, size=100)
    inputs, targets = dataset.train.batch(range(100))
    assert inputs.shape == targets.shape == (100, 12)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.min() >= 0
    assert inputs.max() == 49
    assert dataset.vocabulary == 50
    assert dataset.train.batch([])[0].shape == (0, 12)


@pytest.mark.parametrize("dataset", [synthetic_dataset((2, 3), 5), synthetic_text_dataset(6, 9)])
def test_synthetic_data_on_the_device_is_the_same(dataset: object) -> None:
    train = dataset.train  # type: ignore[attr-defined]
    resident = train.to(torch.device("cpu"))
    for actual, expected in zip(train.batch([5, 7]), resident.batch([5, 7]), strict=True):
        assert torch.equal(actual, expected)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(DataError, match="1 or more"):
        synthetic_dataset((3, 0), classes=10)
    with pytest.raises(DataError, match="1 or more"):
        synthetic_text_dataset(8, vocabulary=0)
