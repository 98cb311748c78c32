"""The datasets that come with tutti: names, published files, sizes. Does not import torch.

`tutti train` checks here that the files of a dataset exist before it starts ranks.
"""

import os
from pathlib import Path

from tutti.data import DataError
from tutti.data.download import Remote, published_files

DATASETS = ("digits", "fashion-mnist", "cifar100", "stdlib", "text", "tokens", "synthetic")
TEXT_DATASETS = ("stdlib", "text", "tokens")
IMAGE_DATASETS = ("digits", "fashion-mnist", "cifar100")
BYTE_VOCABULARY_SIZE = 256  # vocabulary of text that is read as bytes

# Number of classes, and (channels, height, width) of one image; digits are scaled to --pixels.
IMAGE_SIZES = {
    "digits": (10, (1, 8, 8)),
    "fashion-mnist": (10, (1, 28, 28)),
    "cifar100": (100, (3, 32, 32)),
}

# From https://github.com/zalandoresearch/fashion-mnist (MIT), with the checksums published there.
# MNIST has the same file names and format, so a directory with MNIST can be read too.
FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_MNIST_FILES = tuple(
    Remote(name, f"{FASHION_MNIST_URL}/{name}", f"md5:{md5}")
    for name, md5 in (
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    )
)

# From https://www.cs.toronto.edu/~kriz/cifar.html.
CIFAR100_FOLDER = "cifar-100-python"
CIFAR100_ARCHIVE = Remote(
    name=f"{CIFAR100_FOLDER}.tar.gz",
    url=f"https://www.cs.toronto.edu/~kriz/{CIFAR100_FOLDER}.tar.gz",
    checksum="md5:eb9058c3a382ffc7106e4002c42a8d85",
)


def check_files(dataset: str, path: Path, download: bool = False) -> None:
    """Raise DataError if a file or directory of a dataset is missing. Downloads nothing."""
    if dataset in ("fashion-mnist", "cifar100") and not download:
        if dataset == "fashion-mnist":
            published_files(FASHION_MNIST_FILES, path, download=False)
        elif cifar100_folder(path) is None:
            published_files([CIFAR100_ARCHIVE], path, download=False)
    elif dataset == "text":
        if not path.exists():
            raise DataError(f"text {path} does not exist: give a file or a directory")
        if path.is_file() and not path.stat().st_size:
            raise DataError(f"{path} is empty: give a file with text")
        if not os.access(path, os.R_OK):
            raise DataError(f"text {path} cannot be read: check its permissions")
    elif dataset == "tokens":
        if not path.is_dir():
            problem = "is a file" if path.is_file() else "does not exist"
            files = "train.bin, test.bin and tokens.json"
            raise DataError(f"token directory {path} {problem}: give a directory with {files}")
        if not (path / "tokens.json").exists():
            example = '{"dtype": "uint16", "vocabulary": 50257}'
            raise DataError(
                f"{path / 'tokens.json'} does not exist. Create it with content such as {example}"
            )


def cifar100_folder(directory: Path) -> Path | None:
    """Return the directory with the unpacked files of CIFAR-100, or None if there is none."""
    folders = (directory / CIFAR100_FOLDER, directory)
    return next((folder for folder in folders if (folder / "train").is_file()), None)
