"""Datasets, sampling and loading: from files to each rank's batch on its device.

Importing this package imports neither torch nor numpy: names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING


class DataError(ValueError):
    """The data or an argument is wrong; the message is one line and names the cure."""


if TYPE_CHECKING:
    from tutti.data.dataset import (
        Dataset,
        MapSamples,
        Samples,
        TensorSamples,
        as_dataset,
        as_samples,
    )
    from tutti.data.documents import CompletionSamples, document_dataset
    from tutti.data.image_datasets import cifar100_dataset, digits_dataset, fashion_mnist_dataset
    from tutti.data.image_folder import ImageFiles, image_folder_dataset
    from tutti.data.loader import Batch, BatchIndices, Loader, evaluation_loader
    from tutti.data.sampler import Draw, GlobalSampler, Position
    from tutti.data.synthetic import synthetic_dataset, synthetic_text_dataset
    from tutti.data.text_datasets import TokenSamples, byte_dataset, stdlib_dataset, token_dataset

_NAMES = {  # the names that each module defines
    "dataset": ("Dataset", "MapSamples", "Samples", "TensorSamples", "as_dataset", "as_samples"),
    "documents": ("CompletionSamples", "document_dataset"),
    "image_datasets": ("cifar100_dataset", "digits_dataset", "fashion_mnist_dataset"),
    "image_folder": ("ImageFiles", "image_folder_dataset"),
    "loader": ("Batch", "BatchIndices", "Loader", "evaluation_loader"),
    "sampler": ("Draw", "GlobalSampler", "Position"),
    "synthetic": ("synthetic_dataset", "synthetic_text_dataset"),
    "text_datasets": ("TokenSamples", "byte_dataset", "stdlib_dataset", "token_dataset"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["Batch", "BatchIndices", "DataError", "Loader", "evaluation_loader"]
__all__ += ["Dataset", "MapSamples", "Samples", "TensorSamples", "as_dataset", "as_samples"]
__all__ += ["Draw", "GlobalSampler", "Position", "synthetic_dataset", "synthetic_text_dataset"]
__all__ += ["cifar100_dataset", "digits_dataset", "fashion_mnist_dataset"]
__all__ += ["CompletionSamples", "ImageFiles", "document_dataset", "image_folder_dataset"]
__all__ += ["TokenSamples", "byte_dataset", "stdlib_dataset", "token_dataset"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
