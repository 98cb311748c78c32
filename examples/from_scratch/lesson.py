"""Flags, images and initial parameters, which both lessons share.

Everything here is numpy, so that PyTorch and MXNet start from the same numbers and get the same
batches in the same order. Therefore a test can compare the results of both.
"""

import argparse
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SIDE = 28  # pixels; unpadded 5×5 convolutions and 2×2 pooling reduce it: 28 → 24 → 12 → 8 → 4
CLASSES = 10


class Images(NamedTuple):
    train_x: NDArray[np.float32]  # (samples, 1, 28, 28), mean 0 and variance 1 over the train set
    train_y: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]
    source: str  # printed at the start of a run


class Epoch(NamedTuple):
    loss: float  # mean over the samples of the epoch, each with the parameters of its step
    accuracy: float  # correct fraction of the test set, after the epoch
    seconds: float  # training time, without the evaluation

    def line(self, epoch: int) -> str:
        return (
            f"epoch {epoch}  loss {self.loss:.4f}  test accuracy {self.accuracy:.1%}"
            f"  {self.seconds:.2f} s"
        )


def first_params(seed: int) -> list[NDArray[np.float64]]:
    """Return the initial weight and bias of each layer of LeNet, in the order of the layers.

    Weights have variance 2 / fan-in, so that activations have a similar variance in all ReLU
    layers.
    """
    rng = np.random.default_rng(seed)
    params: list[NDArray[np.float64]] = []
    for shape in ((20, 1, 5, 5), (50, 20, 5, 5), (128, 50 * 4 * 4), (CLASSES, 128)):
        fan_in = math.prod(shape[1:])
        params.append(rng.standard_normal(shape) * math.sqrt(2 / fan_in))
        params.append(np.zeros(shape[0]))
    return params


def batches(samples: int, batch_size: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield the shuffled indices of each batch of one epoch. The last batch may be short."""
    order = rng.permutation(samples)
    for start in range(0, samples, batch_size):
        yield order[start : start + batch_size]


def load_images(directory: Path | None = None) -> Images:
    """Return Fashion-MNIST or MNIST from a directory of IDX files.

    Without a directory, return scikit-learn's digits, or made-up images without scikit-learn.
    """
    if directory is not None:
        parts = [
            _read_idx(directory, f"{part}-{kind}")
            for part in ("train", "t10k")
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
        for name, x, y in (("train", *parts[:2]), ("t10k", *parts[2:])):
            if x.shape != (len(y), SIDE, SIDE) or len(y) == 0 or y.max() >= CLASSES:
                raise ValueError(
                    f"{directory}: {name} has images {x.shape} and {len(y)} labels; "
                    f"this LeNet needs (n, {SIDE}, {SIDE}) and n labels below {CLASSES}"
                )
        return _standardised(parts, source=f"IDX files in {directory}")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return _standardised(_made_up(), source="made-up images (scikit-learn is not installed)")
    digits = load_digits()
    # 8×8 pixels, each enlarged to 3×3, then 2 pixels of margin: 3 × 8 + 2 × 2 = 28.
    x = np.kron(digits.images, np.ones((1, 3, 3)))
    x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1500], order[1500:]
    y = digits.target
    return _standardised((x[train], y[train], x[test], y[test]), source="scikit-learn's digits")


def flags(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--devices", type=_count, default=2, help="number of replicas (default 2)")
    parser.add_argument(
        "--batch", type=_count, default=64, help="samples per step, over all devices (default 64)"
    )
    parser.add_argument("--lr", type=_rate, default=0.1, help="learning rate (default 0.1)")
    parser.add_argument("--epochs", type=_count, default=5, help="number of epochs (default 5)")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="directory with Fashion-MNIST's four IDX files"
    )
    parser.add_argument(
        "--naive", action="store_true", help="one all-reduce per gradient instead of one for all"
    )
    args = parser.parse_args()
    try:
        args.images = load_images(args.data)
    except ValueError as error:
        parser.error(f"--data: {error}")
    return args


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {value}")
    return value


def _read_idx(directory: Path, name: str) -> NDArray[np.uint8]:
    """Return the array in an IDX file of bytes.

    The file has two zero bytes, the type (8), the number of dims, each dim as a big-endian uint32,
    and then the data.
    """
    found = [path for path in (directory / name, directory / f"{name}.gz") if path.is_file()]
    if not found:
        raise ValueError(f"{directory} has no {name} (nor {name}.gz)")
    try:
        raw = found[0].read_bytes()
        raw = gzip.decompress(raw) if found[0].suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{found[0]} cannot be read: {error}") from error
    dims = int(name.split("idx")[1][0])
    head = 4 + 4 * dims
    if len(raw) < head or raw[:4] != bytes((0, 0, 8, dims)):
        raise ValueError(f"{found[0]} is not an IDX file of bytes with {dims} dims")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dims, offset=4))
    if len(raw) != head + math.prod(shape):
        raise ValueError(
            f"{found[0]} has {len(raw) - head} bytes of data, its header says {math.prod(shape)}"
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def _made_up() -> tuple[NDArray[Any], ...]:
    """Return images of ten coarse patterns with added noise of the same variance."""
    rng = np.random.default_rng(0)
    patterns = np.kron(rng.standard_normal((CLASSES, 7, 7)), np.ones((1, 4, 4)))
    y = rng.integers(CLASSES, size=1800)
    x = patterns[y] + rng.standard_normal((len(y), SIDE, SIDE))
    return x[:1500], y[:1500], x[1500:], y[1500:]


def _standardised(parts: Sequence[NDArray[Any]], source: str) -> Images:
    """Scale images to mean 0 and variance 1 over the training set, which sets the scale alone."""
    train_x, train_y, test_x, test_y = parts
    mean, std = float(train_x.mean()), float(train_x.std()) or 1.0
    x = [((part - mean) / std).astype(np.float32)[:, np.newaxis] for part in (train_x, test_x)]
    y = [part.astype(np.int64) for part in (train_y, test_y)]
    return Images(x[0], y[0], x[1], y[1], source)
