"""Datasets, sampling and loading: from files to each rank's batch on its device.

This package imports no other part of tutti. Importing it imports neither torch nor numpy: every
name except DataError is loaded on first use. `tutti.data.split` is used as a module:
`split.even(10, 3)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING


class DataError(ValueError):
    """The data, or the request for it, is wrong; the one-line message names the cure."""


if TYPE_CHECKING:
    from tutti.data.dataset import (
        Dataset,
        MapSamples,
        Samples,
        TensorSamples,
        as_dataset,
        as_samples,
    )
    from tutti.data.image_datasets import cifar100_dataset, digits_dataset, fashion_mnist_dataset
    from tutti.data.loader import Batch, BatchIndices, Loader, evaluation_loader
    from tutti.data.sampler import Draw, GlobalSampler, Position
    from tutti.data.synthetic import synthetic_dataset, synthetic_text_dataset
    from tutti.data.text_datasets import (
        TokenSamples,
        byte_dataset,
        save_tokens,
        stdlib_dataset,
        token_dataset,
    )

_NAMES_OF_MODULE = {
    "dataset": ("Dataset", "MapSamples", "Samples", "TensorSamples", "as_dataset", "as_samples"),
    "image_datasets": ("cifar100_dataset", "digits_dataset", "fashion_mnist_dataset"),
    "loader": ("Batch", "BatchIndices", "Loader", "evaluation_loader"),
    "sampler": ("Draw", "GlobalSampler", "Position"),
    "synthetic": ("synthetic_dataset", "synthetic_text_dataset"),
    "text_datasets": (
        *("TokenSamples", "byte_dataset", "save_tokens", "stdlib_dataset", "token_dataset"),
    ),
}

__all__ = [
    "Batch",
    "BatchIndices",
    "DataError",
    "Dataset",
    "Draw",
    "GlobalSampler",
    "Loader",
    "MapSamples",
    "Position",
    "Samples",
    "TensorSamples",
    "TokenSamples",
    "as_dataset",
    "as_samples",
    "byte_dataset",
    "cifar100_dataset",
    "digits_dataset",
    "evaluation_loader",
    "fashion_mnist_dataset",
    "save_tokens",
    "stdlib_dataset",
    "synthetic_dataset",
    "synthetic_text_dataset",
    "token_dataset",
]


def __getattr__(name: str) -> object:
    for module, names in _NAMES_OF_MODULE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
