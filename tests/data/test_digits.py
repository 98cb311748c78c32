"""The digits that come with scikit-learn."""

import sys

import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

from tutti.data import DataError, TensorSamples, digits_dataset


def test_both_splits_together_are_all_the_digits() -> None:
    dataset = digits_dataset(size=8)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (1437, 360, 10)
    both = [dataset.test.batch(range(360)), dataset.train.batch(range(1437))]
    images = torch.cat([images for images, _ in both]).flatten(1)
    targets = torch.cat([targets for _, targets in both])
    # Standardising is one straight line for all pixels, so the original comes back from its ends.
    images = (images - images.min()) / (images.max() - images.min()) * 16
    pixels, labels = load_digits(return_X_y=True)
    mine = sorted((int(t), i.round().int().tolist()) for i, t in zip(images, targets, strict=True))
    theirs = sorted((int(t), p.astype(int).tolist()) for p, t in zip(pixels, labels, strict=True))
    assert mine == theirs


def test_they_are_standardised_and_fit_lenet() -> None:
    dataset = digits_dataset()
    assert dataset.input_shape == (1, 28, 28)
    assert isinstance(dataset.train, TensorSamples)
    inputs = dataset.train.inputs
    assert inputs.dtype == torch.float32
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std().item() == pytest.approx(1, abs=1e-5)
    # Every class is in both splits, in about equal parts: no test of some digits only.
    assert torch.bincount(dataset.test.batch(range(360))[1]).min() > 20


def test_the_split_is_the_same_each_time() -> None:
    first, second = digits_dataset(), digits_dataset()
    assert torch.equal(first.test.batch(range(360))[0], second.test.batch(range(360))[0])
    assert digits_dataset(8).test.batch(range(10))[1].tolist() == [3, 9, 2, 5, 8, 6, 5, 9, 3, 9]


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"pip install 'tutti\[demo\]'"):
        digits_dataset()


def test_they_cannot_be_shrunk() -> None:
    with pytest.raises(DataError, match="8 × 8"):
        digits_dataset(size=4)
