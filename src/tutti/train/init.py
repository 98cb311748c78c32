"""Builds the dataset, model and optimizer of a recipe. The dataset determines some model sizes.

The model is built on the meta device. Later, parallel/apply.py allocates this rank's shards.
Functions import models of other libraries and --init-from only when a recipe uses them.
"""

import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from tutti import data
from tutti.data import DataError
from tutti.data.dataset import Dataset, Samples
from tutti.data.dataset_files import DATASETS, dataset_kind, dataset_path, has_tokenizer
from tutti.data.nested import Nested, tensors_of
from tutti.models.config import (
    EfficientNetConfig,
    GPTConfig,
    LeNetConfig,
    ModelError,
    OwnModelConfig,
    WideResNetConfig,
    split_source,
)
from tutti.models.lora_layers import LoraOptions, adapted_layers, add_adapters, is_adapter_folder
from tutti.parallel.materialize import (
    AdapterWeights,
    ModuleInit,
    SavedWeights,
    TensorSources,
    Weights,
    build_on_meta,
    build_with_buffers,
    materialize,
)
from tutti.train.recipe import Architecture, Optimization, Recipe
from tutti.train.recipe_check import (
    LOSSES,
    METRICS,
    OPTIMIZERS,
    check_function,
    check_sizes,
    metric_of,
    search_current_directory,
)
from tutti.train.task import Task
from tutti.world.errors import UsageError
from tutti.world.exchange import check_same, gather_json, hash_tensor
from tutti.world.world import World

if TYPE_CHECKING:
    from tutti.models.pretrained import HuggingFaceFolder

Result = TypeVar("Result")

# Name of a model → its settings, and the module and class to import.
_MODELS: dict[str, tuple[type[Architecture], str, str]] = {
    "lenet": (LeNetConfig, "tutti.models.lenet", "LeNet"),
    "wideresnet": (WideResNetConfig, "tutti.models.wideresnet", "WideResNet"),
    "efficientnet": (EfficientNetConfig, "tutti.models.efficientnet", "EfficientNet"),
    "gpt": (GPTConfig, "tutti.models.gpt", "GPT"),
}

PARAMETER_DTYPES: dict[str, torch.dtype | None] = {
    "float32": torch.float32,
    "bf16": torch.float32,  # with bf16 and fp16, autocast converts parameters in each operation
    "fp16": torch.float32,
    "float64": torch.float64,
    "model": None,  # parameters keep the dtype with which the model was built
}


def agree(make: Callable[[], Result]) -> Result:
    """Call `make` on every rank. If it raises a usage error on one rank, raise it on all ranks.

    Without this function, the other ranks would wait in their next collective for a rank that has
    failed, for example because only its host lacks a file.
    """
    error: str | None = None
    try:
        result = make()
    except (DataError, ModelError, UsageError) as raised:
        error = str(raised)
    errors = [(rank, text) for rank, text in enumerate(gather_json(error)) if text is not None]
    if errors:
        rank, text = errors[0]
        on_rank = "" if len(errors) > 1 or rank == 0 else f" (on rank {rank})"
        raise UsageError(f"{text}{on_rank}")
    return result


def build_meta_model(
    recipe: Recipe, dataset: Dataset | None, *, saved_weights: bool = True
) -> tuple[nn.Module, Weights, list[str]]:
    """Return the recipe's model on meta, its initial weights, and notes for the user.

    The parameters have the dtype of the recipe's precision. If `saved_weights` is False, saved
    weights are not read, because the caller will load a checkpoint. Until then, the parameters of a
    Hugging Face model are undefined.
    """
    # model_maker reads the dataset, so it must not run under torch.device("meta").
    make = model_maker(recipe, dataset)
    notes: list[str] = []
    weights: Weights | None = None
    source = recipe.init_from
    if source is not None and is_adapter_folder(source):
        source = None
    if recipe.model.startswith("hf:"):
        source = source or Path(recipe.model.partition(":")[2])
        model = build_with_buffers(make)
    elif recipe.model in _MODELS:
        with torch.device("meta"):
            model = make()
        weights = ModuleInit(model, recipe.length.seed)
    else:
        model, weights, note = build_on_meta(make, recipe.length.seed)
        notes = [note] if note else []
    if source is not None and saved_weights:
        from tutti.train.init_from import saved_weights_of

        chunks, more = saved_weights_of(model, source)
        weights, notes = SavedWeights(chunks, weights), [*notes, *more]
    weights = weights or SavedWeights({})
    dtype = PARAMETER_DTYPES[recipe.compute.precision]
    model = model if dtype is None else model.to(dtype)
    if recipe.lora is not None:
        add_adapters(model, LoraOptions.parse(recipe.lora))
        sources: TensorSources = {}
        if recipe.init_from is not None and saved_weights:
            from tutti.train.init_from import saved_adapters_of

            sources = saved_adapters_of(model, recipe.init_from)
        weights = AdapterWeights(weights, recipe.length.seed, sources)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        layers = len(adapted_layers(model))
        notes.append(
            f"LoRA: {trained:,} of {total:,} parameters ({100 * trained / total:.2g} %) are "
            f"trained, in {layers} layer{'s' * (layers != 1)}"
        )
        if recipe.model in _MODELS and recipe.init_from is None and saved_weights:
            notes.append(
                "LoRA: the frozen weights are newly initialised: add --init-from RUN to adapt a "
                "trained model"
            )
    return model, weights, notes


def build_model(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """Return the recipe's model, sized for the dataset, on torch's default device."""
    if hugging_face_folder(recipe.model):
        model, weights, _ = build_meta_model(recipe, dataset)
        materialize(model, torch.get_default_device())
        weights.fill(model)
        return model
    model = model_maker(recipe, dataset)()
    if recipe.lora is not None:
        add_adapters(model, LoraOptions.parse(recipe.lora))
    return model


def hugging_face_folder(model: str, *, weights: bool = True) -> "HuggingFaceFolder | None":
    """Return the folder of --model hf:FOLDER, and None for other models."""
    source = split_source(model)
    if source is None or source[0] != "hf":
        return None
    from tutti.models.pretrained import read_folder

    return read_folder(source[1], weights=weights)


def model_maker(recipe: Recipe, dataset: Dataset | None) -> Callable[[], nn.Module]:
    """Return a function that builds the recipe's model on the current device."""
    if recipe.model not in _MODELS:
        function = _own_model(recipe.model)

        def make() -> nn.Module:
            model = function()
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise UsageError(f"--model {recipe.model} returned {kind}, not a torch.nn.Module")
            _check_parameters(model, f"--model {recipe.model}")
            for module in model.modules():
                # Models of transformers cache keys and values unless this attribute is False. With
                # a cache, a recomputed block would append its keys to those of the first forward.
                if getattr(getattr(module, "config", None), "use_cache", False):
                    module.config.use_cache = False  # type: ignore[union-attr]
            if recipe.task.loss == "model":
                _check_labels(model, recipe.model)
            elif recipe.task.loss in LOSSES:  # the user's own loss function gets all outputs
                model.register_forward_hook(_only_logits)
            return model

        return make
    settings, module, name = _MODELS[recipe.model]
    if type(recipe.architecture) is not settings:
        raise UsageError(
            f"--model {recipe.model} does not fit the recipe: use --recipe {recipe.model}, with "
            "--dataset and other flags"
        )
    assert dataset is not None
    try:
        architecture = fit(recipe, dataset)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return partial(getattr(importlib.import_module(module), name), architecture)


def _own_model(name: str) -> Callable[[], Any]:
    source = split_source(name)
    if source is None:
        return load_function(name, "--model", tuple(_MODELS))
    from tutti.models.pretrained import build_causal_lm, build_timm, check_source, read_folder

    check_source(*source, weights=False)
    if source[0] == "timm":
        return partial(build_timm, source[1])
    return partial(build_causal_lm, read_folder(source[1], weights=False))


def _only_logits(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return the logits of a ModelOutput, of a dict, or of a tuple with a single tensor."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return outputs["logits"]
    if isinstance(logits := getattr(outputs, "logits", None), Tensor):
        return logits
    if isinstance(outputs, tuple | list) and len(outputs) == 1:
        return outputs[0]
    return outputs


def _check_parameters(model: nn.Module, flag: str) -> None:
    """Raise UsageError for parameters that the engines, optimizers or checkpoints cannot handle."""
    for name, parameter in model.named_parameters():
        problem = None
        if is_lazy(parameter):
            problem = "is lazy, so its size is unknown: give the sizes of its layer, or run one "
            problem += "forward in the function"
        elif parameter.layout != torch.strided:
            problem = f"is sparse ({parameter.layout}): use a dense parameter"
        elif parameter.is_complex():
            problem = f"is complex ({parameter.dtype}): use a real parameter with a last dim of 2, "
            problem += "and torch.view_as_complex in forward"
        if problem is not None:
            raise UsageError(f"{flag}: parameter {name} {problem}")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UsageError(f"{flag}: layer {name} has sparse gradients: build it without sparse")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"{flag}: {type(model).__name__} has no parameter that requires a gradient, so there "
            "is nothing to train"
        )


def fit(recipe: Recipe, dataset: Dataset) -> Architecture:
    """Return the architecture with the dataset's numbers of classes, channels and tokens."""
    architecture, shape = recipe.architecture, dataset.input_shape
    if isinstance(architecture, GPTConfig):
        tokens = dataset.train.batch([0])[0]
        if tokens.is_floating_point() or tokens.dim() != 2:
            raise UsageError(
                f"--model gpt needs text, but dataset {dataset.name} has none: use --dataset stdlib"
            )
        # A user's own dataset has no vocabulary size, so --vocab-size is used for it.
        vocabulary = dataset.vocabulary or architecture.vocab_size
        check_sizes(recipe, {"vocab_size": vocabulary, "max_seq_len": shape[0]}, dataset.name)
        return dataclasses.replace(
            architecture,
            vocab_size=max(vocabulary, architecture.vocab_size),
            max_seq_len=max(architecture.max_seq_len, shape[0]),
        )
    assert not isinstance(architecture, OwnModelConfig)
    if len(shape) != 3:
        problem = f"this model needs images, but dataset {dataset.name} has inputs of shape {shape}"
        raise UsageError(f"{problem}: use another --dataset")
    # A user's own dataset has no number of classes, so --classes is used for it.
    sizes = {"classes": dataset.classes or architecture.classes, "channels": shape[0]}
    if isinstance(architecture, LeNetConfig):
        sizes["image_size"] = shape[1]
    check_sizes(recipe, sizes, dataset.name)
    return dataclasses.replace(architecture, **sizes)  # type: ignore[arg-type]


def load_dataset(recipe: Recipe) -> Dataset:
    """Return the recipe's dataset, after a check of its first sample.

    The ranks of a host download a dataset only once. The random number generators are seeded before
    the user's own dataset function is called, so that a random split is the same on every rank.
    """
    dataset = _load_dataset(recipe)
    name = recipe.data.dataset
    for kind, samples in (("training", dataset.train), ("test", dataset.test)):
        if not len(samples):
            if kind == "test" and not recipe.length.evaluate:
                continue
            cure = "Return at least one sample" + (", or use --no-evaluate" * (kind == "test"))
            raise DataError(f"--dataset {name}: the {kind} set is empty. {cure}.")
        _, targets = samples.batch([0])
        if (problem := _target_problem(targets, recipe.task.loss)) is not None:
            raise DataError(f"--dataset {name}: the targets of the {kind} set are {problem}")
    return dataset


def _target_problem(targets: Any, loss: str) -> str | None:
    """Return why a loss cannot use the targets of a sample, with the cure, or None if it can."""
    if loss not in LOSSES or loss == "model":
        return None
    if not isinstance(targets, Tensor):
        return (
            f"a {type(targets).__name__}, but --loss {loss} needs one tensor. Use --loss "
            "package.module:function."
        )
    if loss == "cross_entropy" and targets.dtype != torch.int64:
        return (
            f"{targets.dtype}, but --loss cross_entropy needs class numbers of torch.int64. "
            "Convert them with .long(), or use --loss mse, bce or package.module:function."
        )
    if targets.is_complex() or (targets.dtype == torch.bool and loss == "mse"):
        return f"{targets.dtype}, but --loss {loss} needs real numbers. Convert them with .float()."
    if loss == "bce" and not bool(((targets >= 0) & (targets <= 1)).all()):
        return (
            f"from {targets.min():g} to {targets.max():g}, but --loss bce needs 0 to 1 for each "
            "label. For class numbers, use --loss cross_entropy."
        )
    return None


def _check_labels(model: nn.Module, name: str) -> None:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if "labels" not in parameters and not takes_any:
        raise UsageError(
            f"--loss model: forward of --model {name} takes no labels, only "
            f"{', '.join(parameters)}: use --loss cross_entropy or package.module:function"
        )


def build_task(recipe: Recipe, dataset: Dataset, model: nn.Module) -> Task:
    """Return the recipe's loss and metric, with the user's own functions."""
    loss, metric = recipe.task.loss, metric_of(recipe)
    return Task(
        padded=recipe.data.padded or dataset.padded,
        model=recipe.model,
        loss=loss,
        metric=metric,
        shifts_labels=type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")),
        own_loss=None if loss in LOSSES else load_function(loss, "--loss", LOSSES),
        own_metric=None if metric in METRICS else load_function(metric, "--metric", METRICS),
    )


def _load_dataset(recipe: Recipe) -> Dataset:
    options, name = recipe.data, recipe.data.dataset
    if name == "digits":
        return data.digits_dataset(options.pixels)
    if name in ("fashion-mnist", "cifar100"):
        make = data.fashion_mnist_dataset if name == "fashion-mnist" else data.cifar100_dataset
        return make(options.data_dir, download=options.download)
    if name == "stdlib":
        return data.stdlib_dataset(options.seq_len)
    kind, path = dataset_kind(name), dataset_path(name, options.data_dir)
    if kind == "tokens":
        return data.token_dataset(path, options.seq_len)
    if kind in ("text", "jsonl", "parquet"):
        return data.document_dataset(kind, path, options.seq_len, tokenizer_folder(recipe.model))
    if kind == "images":
        return data.image_folder_dataset(path, options.pixels)
    if name == "synthetic":
        sizes = recipe.architecture
        if (folder := hugging_face_folder(recipe.model, weights=False)) and folder.vocabulary:
            return data.synthetic_text_dataset(options.seq_len, folder.vocabulary)
        if isinstance(sizes, OwnModelConfig):
            raise UsageError(
                f"--dataset synthetic: the inputs of --model {recipe.model} are not known: use "
                "--dataset package.module:function"
            )
        if isinstance(sizes, GPTConfig):
            return data.synthetic_text_dataset(options.seq_len, sizes.vocab_size)
        shape = (sizes.channels, options.pixels, options.pixels)
        return data.synthetic_dataset(shape, sizes.classes)
    function = load_function(name, "--dataset", DATASETS)
    collate = load_function(options.collate, "--collate", ()) if options.collate else None
    with seeded_generators(recipe.length.seed):
        return data.as_dataset(function(), name, collate)


def tokenizer_folder(model: str) -> Path | None:
    """Return the folder of hf:FOLDER if it has a tokenizer, or None: text is then read as bytes."""
    source = split_source(model)
    folder = Path(source[1]) if source and source[0] == "hf" else None
    return folder if folder and has_tokenizer(folder) else None


def load_function(path: str, flag: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """Import the function `package.module:function`; the current directory is also searched."""
    check_function(path, flag, names)
    module_name, _, name = path.partition(":")
    search_current_directory()
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:  # raised by an import inside the module
        raise UsageError(f"{flag} {path}: {error}: install it, or check the import") from None
    except AttributeError:
        raise UsageError(f"{flag} {path}: {module_name} has no {name}") from None
    if not callable(function):
        raise UsageError(f"{flag} {path} is not a function")
    return function  # type: ignore[no-any-return]


def build_optimizer(
    model: nn.Module, options: Optimization, lr: float, capturable: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer for a model, fused if possible. Weight decay applies to matrices only.

    If `capturable`, the optimizer step will be part of a CUDA graph, so the learning rate must be
    a tensor on the device, which the graph reads at each replay.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]  # biases and the gains of norms
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate = torch.tensor(lr, device=parameters[0].device) if capturable else lr
    name = options.optimizer.lower()
    if name not in OPTIMIZERS:
        return _own_optimizer(parameters, options.optimizer, lr)
    if name == "sgd":
        # Fused SGD is not used for DTensors. torch has no sharding rule for this kernel, and needs
        # tens of seconds to derive a rule on a mesh of three axes.
        sharded = any(isinstance(p, DTensor) for p in parameters)
        return torch.optim.SGD(
            groups, lr=rate, momentum=options.momentum, fused=not sharded, foreach=False
        )
    # A fused kernel needs parameters that are all plain tensors, or all DTensors on one mesh.
    # Sharding rules may produce a mixture: then the optimizer updates one parameter at a time.
    kinds = {(isinstance(p, DTensor), getattr(p, "device_mesh", None)) for p in parameters}
    if name != "adamw":
        found = {each.lower(): each for each in dir(torch.optim)}
        used = OPTIMIZERS[name]
        arguments: dict[str, Any] = {"betas": options.betas} if "betas" in used else {}
        if "weight_decay" not in used:
            groups = [{"params": parameters}]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, found[name])(
            groups, lr=lr, foreach=None if len(kinds) < 2 else False, **arguments
        )
        return optimizer
    return torch.optim.AdamW(
        groups,
        lr=rate,
        betas=options.betas,
        fused=len(kinds) < 2,
        foreach=None if len(kinds) < 2 else False,
        capturable=capturable,
    )


def _own_optimizer(parameters: list[nn.Parameter], path: str, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of --optimizer package.module:function, after a check of its groups."""
    flag = f"--optimizer {path}"
    if not parameters:
        raise UsageError(
            f"{flag}: a pipeline stage has no parameter that requires a gradient: use --optimizer "
            "adamw or sgd, or a layout without pp"
        )
    optimizer = load_function(path, "--optimizer", tuple(OPTIMIZERS))(parameters, lr)
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        kind = type(optimizer).__name__
        raise UsageError(f"{flag} returned {kind}, not a torch.optim.Optimizer with step()")
    given = {id(parameter) for parameter in parameters}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held != given:
        raise UsageError(
            f"{flag} returned an optimizer with {len(held & given)} of the {len(given)} parameters "
            f"that the function got, and {len(held - given)} others: give all of them to the "
            "optimizer, and use requires_grad_(False) for parameters that should not be trained"
        )
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), float | int):
            raise UsageError(f"{flag} has a group whose lr is not a number: pass lr as a number")
        group["lr_factor"] = group["lr"] / lr  # a group may have its own learning rate
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr * group.get("lr_factor", 1.0)


# -- the same data on every rank -------------------------------------------------------------------
#
# Every rank makes the dataset itself. If a random split or a random tensor differed between ranks,
# the ranks would train on samples of different datasets, without any error.

_COMPARED_SAMPLES = 8


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python; on exit, restore their states."""
    states = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])


def check_same_dataset(world: World, dataset: Dataset, seed: int) -> None:
    """Raise RanksDiffer unless all ranks have the same dataset. All ranks must call this."""
    described = describe_samples(dataset.train, "training", seed)
    check_same(world, dataset=described | describe_samples(dataset.test, "test", seed))


def check_same_samples(world: World, samples: Samples, seed: int) -> None:
    """Raise RanksDiffer unless all ranks have the same samples. All ranks must call this."""
    check_same(world, dataset=describe_samples(samples, "its", seed))


def describe_samples(samples: Samples, kind: str, seed: int) -> dict[str, int]:
    """Return the number of samples, and hashes of the inputs and targets of a few samples.

    The samples are fetched twice with the same seeds. If the two inputs of a sample differ, a
    transform uses its own random number generator. Then inputs cannot be compared between ranks and
    are left out.
    """
    described = {f"{kind} samples": len(samples)}
    count = min(_COMPARED_SAMPLES, len(samples))
    indices = torch.linspace(0, len(samples) - 1, count, dtype=torch.float64).long()
    hashes = []
    try:
        for _ in range(2 if count else 0):
            with seeded_generators(seed):
                hashes.append([_hash(part) for part in samples.batch(indices)])
    except DataError as error:
        raise UsageError(str(error)) from None
    if hashes:
        described[f"{kind} targets"] = hashes[0][1]
        if hashes[0][0] == hashes[1][0]:
            described[f"{kind} inputs"] = hashes[0][0]
    return described


def _hash(value: Nested) -> int:
    hashes = [hash_tensor(tensor) for tensor in tensors_of(value)]
    # The hash of a tuple of ints is the same in every Python process.
    return hashes[0] if len(hashes) == 1 else hash(tuple(hashes))
