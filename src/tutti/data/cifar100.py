"""CIFAR-100: 50,000 + 10,000 colour images, 32 × 32, a hundred classes, as the python archive.

From https://www.cs.toronto.edu/~kriz/cifar.html. The archive holds pickles, and a pickle is a
program: see pickles.py for how it is read without running it.
"""

import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tutti.data.dataset import Dataset, TensorSamples
from tutti.data.download import Remote, cure_for, ensure
from tutti.data.errors import DataError
from tutti.data.pickles import load_plain
from tutti.data.pixels import Standardise

FOLDER = "cifar-100-python"
ARCHIVE = Remote(
    name=f"{FOLDER}.tar.gz",
    url=f"https://www.cs.toronto.edu/~kriz/{FOLDER}.tar.gz",
    checksum="md5:eb9058c3a382ffc7106e4002c42a8d85",
)
CLASSES = 100
SHAPE = (3, 32, 32)
STANDARDISE = Standardise(  # of the training images, red, green, blue
    mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
)


def cifar100_dataset(
    directory: Path | str,
    *,
    download: bool = False,
    mirror: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Dataset:
    """CIFAR-100 with its fine labels, from a directory that holds the archive or its content.

    `mirror` is another base URL for the archive; `note` is told of a download.
    """
    directory = Path(directory)
    archive = replace(ARCHIVE, url=f"{mirror}/{ARCHIVE.name}") if mirror else ARCHIVE
    cure = cure_for([archive], directory, "--dataset digits")
    folder = next((d for d in (directory / FOLDER, directory) if (d / "train").is_file()), None)
    if folder is not None:
        pair = {name: (folder / name, _read_file(folder / name)) for name in ("train", "test")}
    else:
        if download:
            ensure([archive], directory, cure=cure, note=note)
        path = directory / archive.name
        if not path.is_file():
            raise DataError(
                f"data directory {directory} has no {archive.name}; {cure}"
                if directory.is_dir()
                else f"data directory {directory} does not exist; {cure}"
            )
        pair = {name: (path / name, data) for name, data in _read_archive(path).items()}
    samples = {name: _samples(where, data) for name, (where, data) in pair.items()}
    return Dataset(name="cifar-100", train=samples["train"], test=samples["test"], classes=CLASSES)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _read_archive(path: Path) -> dict[str, bytes]:
    """The two pickles, read in memory: nothing of the archive is written to disk."""
    found = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                folder, _, name = member.name.removeprefix("./").partition("/")
                if folder == FOLDER and name in ("train", "test") and member.isfile():
                    file = archive.extractfile(member)
                    found[name] = file.read() if file else b""
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} is a damaged archive ({error}): fetch it again") from error
    for name in ("train", "test"):
        if name not in found:
            raise DataError(
                f"{path} has no {FOLDER}/{name}: put the python version of CIFAR-100 there"
            )
    return found


def _samples(where: Path, pickled: bytes) -> TensorSamples:
    content = load_plain(pickled, where)
    if not isinstance(content, Mapping):
        raise DataError(f"{where} holds a {type(content).__name__}, expected a dictionary")
    # Python 2 wrote the keys, so they are bytes; copies made since then may have text.
    fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = fields.get("data"), fields.get("fine_labels")
    if not isinstance(data, np.ndarray) or data.shape[1:] != (np.prod(SHAPE),) or not len(data):
        raise DataError(
            f"{where} has no `data` of N × {np.prod(SHAPE)} bytes "
            f"(found {getattr(data, 'shape', None)}): put the python version of CIFAR-100 there"
        )
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < CLASSES for label in labels
    ):
        raise DataError(
            f"{where} has no `fine_labels` of 0 to {CLASSES - 1}: "
            "put the python version of CIFAR-100 there"
        )
    if len(labels) != len(data):
        raise DataError(f"{where} has {len(data)} images and {len(labels)} labels: fetch it again")
    return TensorSamples(torch.from_numpy(data).view(-1, *SHAPE), torch.tensor(labels), STANDARDISE)
