"""The datasets that come with tutti: names, published files, sizes. Does not import torch.

`tutti train` checks here that the files of a dataset exist before it starts ranks. Functions of
os.path are used because methods of Path raise OSError for a name that is too long.
"""

import json
import os
from pathlib import Path

from tutti.data import DataError
from tutti.data.download import Remote, published_files

# Datasets of the user's own files, with their path in the name: text:FILE, images:FOLDER.
FILE_DATASETS = ("text", "tokens", "jsonl", "parquet", "images")
DATASETS = ("digits", "fashion-mnist", "cifar100", "stdlib", "synthetic", *FILE_DATASETS)
TEXT_DATASETS = ("stdlib", "text", "tokens", "jsonl", "parquet")
IMAGE_DATASETS = ("digits", "fashion-mnist", "cifar100", "images")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}  # bytes of a token in a file
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


# The prefixes of the file names of a Hugging Face tokenizer.
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece")


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder of a Hugging Face model has a tokenizer."""
    return any(path.name.startswith(TOKENIZER_FILES) for path in folder.iterdir())


def dataset_kind(name: str) -> str:
    """Return the kind of a dataset: `text` for text:FILE, otherwise the name itself."""
    kind = name.partition(":")[0]
    return kind if kind in FILE_DATASETS else name


def dataset_path(name: str, data_dir: Path) -> Path:
    """Return the path in text:PATH, or --data-dir if the name has no path."""
    kind, colon, path = name.partition(":")
    return Path(path).expanduser() if colon and kind in FILE_DATASETS else data_dir


def parts_of(path: Path, suffix: str = "") -> tuple[Path, Path | None]:
    """Return the training and test parts of a folder, or (path, None) if one is missing."""
    train = path / f"train{suffix}"
    tests = [path / f"{name}{suffix}" for name in ("test", "val", "validation")]
    test = next((part for part in tests if os.path.exists(part)), None)
    return (train, test) if os.path.exists(train) and test is not None else (path, None)


def class_folders(folder: Path) -> list[Path]:
    """Return the folders of an image dataset, one per class, in order of their names."""
    found = [f for f in folder.iterdir() if os.path.isdir(f) and not f.name.startswith(".")]
    return sorted(found, key=lambda folder: folder.name)


def check_files(dataset: str, path: Path, download: bool = False) -> None:
    """Raise DataError if a file or directory of a dataset is missing. Downloads nothing."""
    dataset = dataset_kind(dataset)
    if dataset in ("fashion-mnist", "cifar100") and not download:
        if dataset == "fashion-mnist":
            published_files(FASHION_MNIST_FILES, path, download=False)
        elif cifar100_folder(path) is None:
            published_files([CIFAR100_ARCHIVE], path, download=False)
    elif dataset in ("text", "jsonl", "parquet"):
        wanted = "a file or a directory"
        if dataset != "text":
            wanted = f"a .{dataset} file, or a directory with train.{dataset} and test.{dataset}"
            if os.path.isdir(path):
                path, test = parts_of(path, f".{dataset}")
                if test is None:
                    raise DataError(f"{path} is a directory: give {wanted}")
        if not os.path.exists(path):
            raise DataError(f"{path} does not exist: give {wanted}")
        if os.path.isfile(path) and not path.stat().st_size:
            raise DataError(f"{path} is empty: give {wanted}")
        if os.path.isdir(path) and not any(file.is_file() for file in path.rglob("[!.]*")):
            raise DataError(f"{path} has no files: give {wanted}")
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} cannot be read: check its permissions")
    elif dataset == "images":
        if not os.path.isdir(path):
            problem = "is a file" if os.path.isfile(path) else "does not exist"
            raise DataError(f"{path} {problem}: give a folder with one folder of images per class")
        for part in parts_of(path):
            if part is not None and len(class_folders(part)) < 2:
                raise DataError(
                    f"{part} has {len(class_folders(part))} folders: give a folder with one folder "
                    "of images for each of at least 2 classes"
                )
    elif dataset == "tokens":
        token_files(path)


def token_files(directory: Path) -> tuple[str, int, list[Path]]:
    """Return dtype, vocabulary, and the files of training and test tokens, after checking them."""
    if not directory.is_dir():
        problem = "is a file" if directory.is_file() else "does not exist"
        cure = "give a directory with train.bin, test.bin and tokens.json"
        raise DataError(f"token directory {directory} {problem}: {cure}")
    path, example = directory / "tokens.json", '{"dtype": "uint16", "vocabulary": 50257}'
    if not os.path.exists(path):
        raise DataError(f"{path} does not exist. Create it with content such as {example}")
    try:
        metadata = json.loads(path.read_bytes())
        dtype, vocabulary = metadata["dtype"], metadata["vocabulary"]
        counts = dict(metadata.get("tokens") or {})
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not parse ({error!r}): expected {example}") from error
    if dtype not in TOKEN_BYTES or type(vocabulary) is not int or vocabulary < 1:
        raise DataError(
            f"{path} has dtype {dtype!r} and vocabulary {vocabulary!r}. The dtype must be uint8, "
            "uint16 or uint32, and the vocabulary must be at least 1."
        )
    test, item_bytes = directory / "test.bin", TOKEN_BYTES[dtype]
    files = [directory / "train.bin", test if test.is_file() else directory / "val.bin"]
    for file in files:
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        count, remainder = divmod(size, item_bytes)
        expected = counts.get(file.name, count)
        if remainder or count != expected or not count:
            raise DataError(
                f"{file} is truncated or has another dtype: it has {size} bytes, but {expected} "
                f"tokens of {item_bytes} bytes were expected. Write the file again."
            )
    return dtype, vocabulary, files


def cifar100_folder(directory: Path) -> Path | None:
    """Return the directory with the unpacked files of CIFAR-100, or None if there is none."""
    folders = (directory / CIFAR100_FOLDER, directory)
    return next((folder for folder in folders if (folder / "train").is_file()), None)
