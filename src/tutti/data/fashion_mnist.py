"""Fashion-MNIST: 60,000 + 10,000 grey images of clothes, 28 × 28, ten classes, as four IDX files.

From https://github.com/zalandoresearch/fashion-mnist (MIT), with the checksums published there.
MNIST has the same four names and the same format, so a directory with MNIST can be read as well.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tutti.data.dataset import Dataset, TensorSamples
from tutti.data.download import Remote, cure_for, ensure, find
from tutti.data.errors import DataError
from tutti.data.idx import read_idx
from tutti.data.pixels import Standardise

BASE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = tuple(
    Remote(name, f"{BASE}/{name}", f"md5:{md5}")
    for name, md5 in (
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    )
)
CLASSES = 10
SIDE = 28
STANDARDISE = Standardise(mean=(0.2860,), std=(0.3530,))  # of the training images


def fashion_mnist_dataset(
    directory: Path | str,
    *,
    download: bool = False,
    mirror: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Dataset:
    """Fashion-MNIST from a directory, into which it is downloaded first if asked and not there.

    `mirror` is another base URL for the same files; `note` is told of a download.
    """
    directory = Path(directory)
    files = [replace(f, url=f"{mirror}/{f.name}") for f in FILES] if mirror else FILES
    cure = cure_for(files, directory, "--dataset digits")
    if download:
        ensure(files, directory, cure=cure, note=note)
    paths = find(files, directory, cure=cure)
    return Dataset(
        name="fashion-mnist",
        train=_read_pair(*paths[:2]),
        test=_read_pair(*paths[2:]),
        classes=CLASSES,
    )


def _read_pair(images_path: Path, labels_path: Path) -> TensorSamples:
    images, labels = read_idx(images_path, dims=3), read_idx(labels_path, dims=1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{images_path} has images of {images.shape[1]} × {images.shape[2]}, "
            f"expected {SIDE} × {SIDE}: put the published file there"
        )
    if len(images) != len(labels) or len(images) == 0:
        raise DataError(
            f"{images_path} has {len(images)} images, {labels_path} has {len(labels)} labels: "
            "put files that belong together there"
        )
    if labels.max() >= CLASSES:
        raise DataError(
            f"{labels_path} has label {labels.max()}, expected 0 to {CLASSES - 1}: "
            "put the published file there"
        )
    return TensorSamples(
        torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long(), STANDARDISE
    )
