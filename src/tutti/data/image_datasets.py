"""Image datasets: digits (from scikit-learn), Fashion-MNIST or MNIST (IDX files), CIFAR-100."""

import gzip
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from tutti.data import DataError
from tutti.data.dataset import Dataset, TensorSamples
from tutti.data.dataset_files import (
    CIFAR100_ARCHIVE,
    CIFAR100_FOLDER,
    FASHION_MNIST_FILES,
    cifar100_folder,
)
from tutti.data.download import published_files
from tutti.data.sampler import shuffled


@dataclass(frozen=True)
class Standardise:
    """Converts byte images [N, C, H, W] to float32: (x / 255 - mean) / std for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        result = images.float()
        # The constants are Python numbers, because tensors would have to be copied to the device
        # for every batch.
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            result[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
        return result


# -- digits: 1,797 handwritten digits, 8 × 8, part of scikit-learn ---------------------------------

DIGITS_TEST = 360


def digits_dataset(size: int = 28) -> Dataset:
    """Return scikit-learn's digits as [N, 1, size, size], standardised. A fifth is the test set.

    The original size is 8; for another size the images are scaled bilinearly. LeNet needs 28.
    """
    if size < 8:
        raise DataError(f"digits are 8 × 8 pixels: size must be at least 8, got {size}")
    package = find_spec("sklearn")  # does not import scikit-learn, which would take 1 s
    folders = (package and package.submodule_search_locations) or []
    files = [Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    if not files or not files[0].is_file():
        raise DataError("dataset digits needs scikit-learn: pip install 'tutti-torch[demo]'")
    rows = np.loadtxt(files[0], delimiter=",")  # 64 pixels and the digit
    pixels, labels = rows[:, :-1], rows[:, -1]
    # The file is sorted by writer: shuffle once, so that both sets have digits of all writers.
    order = shuffled(np.arange(len(labels)), len(labels), seed=0, epoch=0)
    images = torch.from_numpy(pixels[order]).float().div(16).view(-1, 1, 8, 8)  # pixels: 0 to 16
    targets = torch.from_numpy(labels[order]).long()
    if size != 8:
        images = interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    train_images = images[DIGITS_TEST:]
    images = (images - train_images.mean()) / train_images.std()
    test = TensorSamples(images[:DIGITS_TEST], targets[:DIGITS_TEST])
    train = TensorSamples(images[DIGITS_TEST:], targets[DIGITS_TEST:])
    return Dataset("digits", train, test, classes=10)


# -- Fashion-MNIST: 60,000 + 10,000 grey images, 28 × 28, 10 classes, four IDX files ---------------
# Mean and standard deviation of the training images.
FASHION_MNIST_STANDARDISE = Standardise(mean=(0.2860,), std=(0.3530,))


def fashion_mnist_dataset(directory: Path | str, *, download: bool = False) -> Dataset:
    """Return Fashion-MNIST from `directory`. If `download`, fetch missing files first."""
    paths = published_files(FASHION_MNIST_FILES, Path(directory), download=download)
    train, test = _read_mnist(*paths[:2]), _read_mnist(*paths[2:])
    return Dataset("fashion-mnist", train, test, classes=10)


def _read_mnist(images_path: Path, labels_path: Path) -> TensorSamples:
    images, labels = read_idx(images_path, dims=3), read_idx(labels_path, dims=1)
    problem = None
    if images.shape[1:] != (28, 28):
        size = f"{images.shape[1]} × {images.shape[2]}"
        problem = f"{images_path} has images of {size}, expected 28 × 28"
    elif len(images) != len(labels) or len(images) == 0:
        problem = (
            f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels"
        )
    elif labels.max() > 9:
        problem = f"{labels_path} has label {labels.max()}, expected 0 to 9"
    if problem:
        raise DataError(f"{problem}: put the published files there")
    inputs, targets = torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()
    return TensorSamples(inputs, targets, FASHION_MNIST_STANDARDISE)


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes with `dims` dimensions, gzipped or not.

    IDX: two zero bytes, the type (0x08 is unsigned byte), the number of dims, one big-endian uint32
    per dim, then the values in row-major order.
    """
    content = _read_file(path)
    try:
        # Test the content and not the name: a file without .gz in its name may be compressed, and
        # a file with .gz may not.
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}): download it again") from error
    magic = bytes([0, 0, 0x08, dims])
    if content[:4] != magic:
        raise DataError(
            f"{path} is not an IDX file of bytes with {dims} dims: it starts with "
            f"0x{content[:4].hex() or '-'}, expected 0x{magic.hex()}. Put the published file there."
        )
    header = 4 + 4 * dims
    if len(content) < header:
        raise DataError(f"{path} is truncated in its header of {header} bytes: download it again")
    shape = struct.unpack(f">{dims}I", content[4:header])
    size, expected = len(content) - header, math.prod(shape)
    if size != expected:
        problem = "too long" if size > expected else "truncated"
        sizes = (
            f"{size} bytes after the header, expected {' × '.join(map(str, shape))} = {expected}"
        )
        raise DataError(f"{path} is {problem} ({sizes}): download it again")
    # Copy, because `content` is read-only and torch needs writable memory.
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


# -- CIFAR-100: 50,000 + 10,000 colour images, 32 × 32, 100 classes, the python archive ------------
# The archive contains pickles, which are read without executing code.

_CIFAR_SHAPE = (3, 32, 32)
# Mean and standard deviation of the training images: red, green, blue.
CIFAR100_STANDARDISE = Standardise(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
_CIFAR_CURE = "put the python version of CIFAR-100 there"


def cifar100_dataset(directory: Path | str, *, download: bool = False) -> Dataset:
    """Return CIFAR-100 with fine labels, from a directory with the archive or its contents."""
    directory = Path(directory)
    path = cifar100_folder(directory)
    if path is not None:
        pickles = {name: _read_file(path / name) for name in ("train", "test")}
    else:
        (path,) = published_files([CIFAR100_ARCHIVE], directory, download=download)
        pickles = _read_archive(path)
    train, test = (_read_cifar(path / name, pickles[name]) for name in ("train", "test"))
    return Dataset("cifar-100", train, test, classes=100)


def _read_archive(path: Path) -> dict[str, bytes]:
    """Return the bytes of the pickles train and test. Nothing is extracted to disk."""
    pickles = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                folder, _, name = member.name.removeprefix("./").partition("/")
                if folder == CIFAR100_FOLDER and name in ("train", "test") and member.isfile():
                    file = archive.extractfile(member)
                    pickles[name] = file.read() if file else b""
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} is a damaged archive ({error}): download it again") from error
    for name in ("train", "test"):
        if name not in pickles:
            raise DataError(f"{path} has no {CIFAR100_FOLDER}/{name}: {_CIFAR_CURE}")
    return pickles


def _read_cifar(path: Path, pickled: bytes) -> TensorSamples:
    content = load_plain(pickled, path)
    if not isinstance(content, Mapping):
        raise DataError(f"{path} holds a {type(content).__name__}, expected a dictionary")
    # The keys were written by Python 2 as bytes; later copies may have str keys.
    fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = fields.get("data"), fields.get("fine_labels")
    pixels = math.prod(_CIFAR_SHAPE)
    if not isinstance(data, np.ndarray) or data.shape[1:] != (pixels,) or not len(data):
        shape = getattr(data, "shape", None)
        raise DataError(
            f"{path} has no `data` of N × {pixels} bytes (found {shape}): {_CIFAR_CURE}"
        )
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 100 for label in labels
    ):
        raise DataError(f"{path} has no `fine_labels` with values of 0 to 99: {_CIFAR_CURE}")
    if len(labels) != len(data):
        raise DataError(f"{path} has {len(data)} images but {len(labels)} labels: {_CIFAR_CURE}")
    images = torch.from_numpy(data).view(-1, *_CIFAR_SHAPE)
    return TensorSamples(images, torch.tensor(labels), CIFAR100_STANDARDISE)


# -- restricted pickles ----------------------------------------------------------------------------
# A pickle is a program that may import any name and call it. This unpickler accepts only the names
# that an array of bytes needs, and replaces them with the classes below, which only record their
# arguments; any other name is an error. The recorded values are checked before they are passed to
# numpy. Everything else in the file is a dict, list, tuple, bytes, str or number.


def load_plain(content: bytes, path: Path) -> object:
    """Return the data in a pickle, without executing code. Errors name the file `path`."""
    try:
        value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if isinstance(value, dict):
            return {k: v.numpy() if isinstance(v, _Array) else v for k, v in value.items()}
        return value.numpy() if isinstance(value, _Array) else value
    except DataError as error:
        raise DataError(f"{path} is refused: {error}") from error
    except Exception as error:  # a damaged pickle may cause any exception
        raise DataError(f"{path} is a damaged pickle ({error!r}): download it again") from error


class _Dtype:
    """Stands in for numpy.dtype; accepts unsigned bytes only."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise DataError(f"it has an array of {code!r}, expected bytes (u1)")

    def __setstate__(self, _: object) -> None: ...


class _Array:
    """Stands in for numpy.ndarray and for the functions that rebuild an array."""

    shape: tuple[int, ...] = (0,)
    content: bytes | bytearray = b""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, dtype, fortran, self.content = state
        if not isinstance(dtype, _Dtype) or fortran:
            raise DataError("it has an array whose data is not bytes in row-major order")

    @classmethod
    def from_buffer(cls, content: bytes, dtype: object, shape: tuple[int, ...], order: str) -> Any:
        array = cls()
        array.__setstate__((1, shape, dtype, order not in ("C", b"C"), content))
        return array

    def numpy(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        shape, content = self.shape, self.content
        if not isinstance(content, bytes | bytearray) or not all(type(n) is int for n in shape):
            raise DataError("it has an array without content or shape")
        if math.prod(shape) != len(content) or any(n < 0 for n in shape):
            raise DataError(f"it has an array of {shape} with {len(content)} bytes")
        return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    # numpy 1 and numpy 2 name their modules differently.
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Array.from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _Array.from_buffer,
    # Python 3 writes bytes into old pickle protocols as _codecs.encode(text, "latin1").
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in ALLOWED:
            raise DataError(
                f"its pickle imports {module}.{name}, which plain data does not need. "
                "Do not trust this file. Download the published file."
            )
        return ALLOWED[module, name]
