"""Data: sets of samples, which of them a step takes, how a batch is cut among ranks, loading.

This room imports no other. Importing it imports neither torch nor numpy: names are fetched when
they are used. (`tutti.data.split`, pure arithmetic, is used as a module: `split.even(10, 3)`.)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tutti.data.errors import DataError

if TYPE_CHECKING:
    from tutti.data.batch import Batch, Part
    from tutti.data.cifar100 import cifar100_dataset
    from tutti.data.dataset import (
        Dataset,
        MapSamples,
        Samples,
        TensorSamples,
        as_dataset,
        as_samples,
    )
    from tutti.data.digits import digits_dataset
    from tutti.data.fashion_mnist import fashion_mnist_dataset
    from tutti.data.loader import Loader, evaluation_loader
    from tutti.data.sampler import Draw, GlobalSampler, Position
    from tutti.data.synthetic import synthetic_dataset, synthetic_text_dataset
    from tutti.data.text import (
        TokenSamples,
        byte_dataset,
        save_tokens,
        stdlib_dataset,
        token_dataset,
    )

_HOMES = {
    "Batch": "batch",
    "Part": "batch",
    "cifar100_dataset": "cifar100",
    "Dataset": "dataset",
    "MapSamples": "dataset",
    "Samples": "dataset",
    "TensorSamples": "dataset",
    "as_dataset": "dataset",
    "as_samples": "dataset",
    "digits_dataset": "digits",
    "fashion_mnist_dataset": "fashion_mnist",
    "Loader": "loader",
    "evaluation_loader": "loader",
    "Draw": "sampler",
    "GlobalSampler": "sampler",
    "Position": "sampler",
    "synthetic_dataset": "synthetic",
    "synthetic_text_dataset": "synthetic",
    "TokenSamples": "text",
    "byte_dataset": "text",
    "save_tokens": "text",
    "stdlib_dataset": "text",
    "token_dataset": "text",
}

__all__ = [
    "Batch",
    "DataError",
    "Dataset",
    "Draw",
    "GlobalSampler",
    "Loader",
    "MapSamples",
    "Part",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
