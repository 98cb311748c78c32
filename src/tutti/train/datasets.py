"""From a recipe to its data set, by name or from one's own function."""

import sys
from collections.abc import Callable

from tutti.data import (
    Dataset,
    as_dataset,
    byte_dataset,
    cifar100_dataset,
    digits_dataset,
    fashion_mnist_dataset,
    stdlib_dataset,
    synthetic_dataset,
    synthetic_text_dataset,
    token_dataset,
)
from tutti.models.config import GPTConfig
from tutti.train.models import load_function
from tutti.train.recipe import Recipe


def load_dataset(recipe: Recipe) -> Dataset:
    """The recipe's data set. Ranks of a host that download at once fetch it once."""
    name = recipe.data.dataset
    if name in _BY_NAME:
        return _BY_NAME[name](recipe)
    return as_dataset(load_function(name, "--dataset", tuple(_BY_NAME))(), name)


def _fashion_mnist(recipe: Recipe) -> Dataset:
    data = recipe.data
    return fashion_mnist_dataset(data.data_dir, download=data.download, note=_note)


def _cifar100(recipe: Recipe) -> Dataset:
    data = recipe.data
    return cifar100_dataset(data.data_dir, download=data.download, note=_note)


def _synthetic(recipe: Recipe) -> Dataset:
    shape = recipe.architecture
    if isinstance(shape, GPTConfig):
        return synthetic_text_dataset(recipe.data.seq_len, shape.vocab_size)
    size = recipe.data.pixels
    return synthetic_dataset((shape.channels, size, size), shape.classes)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_BY_NAME: dict[str, Callable[[Recipe], Dataset]] = {
    "digits": lambda recipe: digits_dataset(recipe.data.pixels),
    "fashion-mnist": _fashion_mnist,
    "cifar100": _cifar100,
    "stdlib": lambda recipe: stdlib_dataset(recipe.data.seq_len),
    "text": lambda recipe: byte_dataset(recipe.data.data_dir, recipe.data.seq_len),
    "tokens": lambda recipe: token_dataset(recipe.data.data_dir, recipe.data.seq_len),
    "synthetic": _synthetic,
}
