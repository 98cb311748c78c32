"""From a recipe and a data set to a model: sizes that follow from the data are derived."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from tutti.data.dataset import Dataset
from tutti.models import (
    GPT,
    EfficientNet,
    EfficientNetConfig,
    GPTConfig,
    LeNet,
    LeNetConfig,
    WideResNet,
    WideResNetConfig,
)
from tutti.train.recipe import Architecture, Recipe
from tutti.world.errors import UsageError, did_you_mean

_MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "lenet": LeNet,
    "wideresnet": WideResNet,
    "efficientnet": EfficientNet,
    "gpt": GPT,
}


def build_model(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """The recipe's model, sized for the data set; on the CPU, weights from torch's generator."""
    if recipe.model not in _MODELS:
        model = load_function(recipe.model, "--model", tuple(_MODELS))()
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {recipe.model} returned {type(model).__name__}, no module")
        return model
    if _MODELS[recipe.model] is not _model_of(recipe.architecture):
        raise UsageError(
            f"--model {recipe.model}: the recipe has the settings of another model: use --recipe "
            f"{recipe.model}, with --dataset and other flags on top"
        )
    try:
        return _MODELS[recipe.model](fit(recipe.architecture, dataset))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _model_of(architecture: Architecture) -> type[nn.Module]:
    return {
        LeNetConfig: LeNet,
        WideResNetConfig: WideResNet,
        EfficientNetConfig: EfficientNet,
        GPTConfig: GPT,
    }[type(architecture)]


def fit(architecture: Architecture, dataset: Dataset) -> Architecture:
    """The architecture with the sizes that the data set decides: classes, channels, vocabulary."""
    shape = dataset.input_shape
    if isinstance(architecture, GPTConfig):
        tokens = dataset.train.batch([0])[0]
        if tokens.is_floating_point() or tokens.dim() != 2:
            raise UsageError(f"model gpt needs text, data set {dataset.name} is none: use stdlib")
        longest = max(architecture.max_seq_len, shape[0])
        return dataclasses.replace(
            architecture,
            # One's own data does not say how many tokens it knows: then --vocab-size does.
            vocab_size=max(dataset.vocabulary or 0, architecture.vocab_size),
            max_seq_len=longest,
        )
    if len(shape) != 3:
        raise UsageError(f"this model needs images, data set {dataset.name} has inputs of {shape}")
    # One's own data does not say how many classes it has: then --classes does.
    sizes = {"classes": dataset.classes or architecture.classes, "channels": shape[0]}
    if isinstance(architecture, LeNetConfig):
        sizes["image_size"] = shape[1]
    return dataclasses.replace(architecture, **sizes)  # type: ignore[arg-type]


def load_function(path: str, flag: str, known: tuple[str, ...]) -> Callable[[], Any]:
    """The function at `package.module:function`, also from the current directory."""
    module_name, colon, name = path.partition(":")
    if not colon:
        hint = did_you_mean(path, known)
        raise UsageError(f"{flag} {path}: {hint} Your own is package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{flag} {path}: {error}: run from where the module can be seen") from None
    except AttributeError:
        raise UsageError(f"{flag} {path}: {module_name} has no {name}") from None
    if not callable(found):
        raise UsageError(f"{flag} {path} is no function")
    return found  # type: ignore[no-any-return]
