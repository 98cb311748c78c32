"""Synthetic data of any shape at nearly no cost, for benchmarks that should not measure loading.

A sample is a window into a pool of random numbers. The pool has 65,536 numbers more than a sample.
The window and the label are functions of the seed and the sample's index.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tutti.data import DataError
from tutti.data.dataset import Dataset, Pair, Samples
from tutti.data.sampler import hash_integers, splitmix64

# These periods are coprime, so a pair of window and label repeats only after 2³² samples.
WINDOWS = 1 << 16
LABELS = WINDOWS + 1


class SyntheticSamples(Samples):
    """`size` samples: sample i is the window of `pool` at `offsets[i]`, with its label."""

    def __init__(
        self, size: int, shape: tuple[int, ...], pool: Tensor, offsets: Tensor, labels: Tensor
    ) -> None:
        self.size, self.shape = size, shape
        self.pool, self.offsets, self.labels = pool, offsets, labels

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Tensor) -> Pair:
        windows = self._windows(math.prod(self.shape), indices)
        return windows.reshape(-1, *self.shape), self.labels[indices % LABELS]

    def _windows(self, length: int, indices: Tensor) -> Tensor:
        # A view of all windows takes no memory; indexing copies the selected windows.
        return self.pool.unfold(0, length, 1)[self.offsets[indices % WINDOWS]]

    def to(self, device: torch.device) -> "SyntheticSamples":
        tensors = (t.to(device) for t in (self.pool, self.offsets, self.labels))
        return type(self)(self.size, self.shape, *tensors)


class SyntheticTokens(SyntheticSamples):
    """Windows of tokens: the target is the input shifted by one token."""

    def fetch(self, indices: Tensor) -> Pair:
        windows = self._windows(self.shape[0] + 1, indices)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def synthetic_dataset(
    shape: Sequence[int], classes: int, *, size: int = 60_000, test: int = 10_000, seed: int = 0
) -> Dataset:
    """Return float32 inputs of `shape` with mean 0 and variance 1, and labels below `classes`."""
    _check(size, test, classes, *shape)

    def samples(split: int, count: int) -> SyntheticSamples:
        bits = _random_bits(math.prod(shape) + WINDOWS, seed, split, 0)
        # Uniform between -√3 and √3, which has variance 1. The bits are integers below 2⁶⁴.
        pool = torch.from_numpy(bits * (2 * math.sqrt(3) / 2**64) - math.sqrt(3)).float()
        return SyntheticSamples(count, tuple(shape), pool, *_tables(classes, seed, split))

    return Dataset("synthetic", samples(0, size), samples(1, test), classes=classes)


def synthetic_text_dataset(
    seq_len: int, vocabulary: int, *, size: int = 60_000, test: int = 10_000, seed: int = 0
) -> Dataset:
    """Return windows of `seq_len` tokens below `vocabulary`. Targets are shifted by one token."""
    _check(size, test, vocabulary, seq_len)

    def samples(split: int, count: int) -> SyntheticTokens:
        pool = _below(vocabulary, seq_len + 1 + WINDOWS, seed, split, 0)
        return SyntheticTokens(count, (seq_len,), pool, *_tables(1, seed, split))

    return Dataset("synthetic-text", samples(0, size), samples(1, test), vocabulary=vocabulary)


def _tables(classes: int, seed: int, split: int) -> tuple[Tensor, Tensor]:
    return _below(WINDOWS, WINDOWS, seed, split, 1), _below(classes, LABELS, seed, split, 2)


def _below(limit: int, count: int, *parts: int) -> Tensor:
    return torch.from_numpy((_random_bits(count, *parts) % np.uint64(limit)).astype(np.int64))


def _random_bits(count: int, *parts: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(hash_integers(*parts)))


def _check(size: int, test: int, classes: int, *shape: int) -> None:
    if min(size, test, classes, *shape) < 1:
        numbers = f"samples {size} and {test}, shape {shape}, classes or vocabulary {classes}"
        raise DataError(f"numbers of synthetic data must be 1 or more, got {numbers}")
