"""Builds the dataset, model and optimizer of a recipe. The dataset determines some model sizes.

The model is built on the meta device. Later, parallel/apply.py allocates this rank's shards.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from tutti import data
from tutti.data import DataError
from tutti.data.dataset import Dataset
from tutti.data.dataset_files import DATASETS, dataset_kind, dataset_path, has_tokenizer
from tutti.models.config import (
    EfficientNetConfig,
    GPTConfig,
    LeNetConfig,
    OwnModelConfig,
    WideResNetConfig,
)
from tutti.models.lora_layers import (
    MATRICES,
    LoraOptions,
    adapted_layers,
    adapter_layer,
    add_adapters,
    check_adapter_fits,
    is_adapter_folder,
    read_adapter,
)
from tutti.models.pretrained import (
    HuggingFaceFolder,
    ModelError,
    SavedTensor,
    build_causal_lm,
    build_timm,
    check_source,
    read_folder,
    saved_tensors,
    split_source,
    tensor_sources,
    tied_names,
)
from tutti.parallel.materialize import (
    AdapterWeights,
    FileChunk,
    ModuleInit,
    SavedWeights,
    TensorSources,
    Weights,
    build_on_meta,
    build_with_buffers,
    materialize,
)
from tutti.parallel.mesh import Box
from tutti.train.checkpoint.format import saved_steps, step_name
from tutti.train.checkpoint.load import chunks_of, this_rank, verify
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
from tutti.train.same_data import seeded_generators
from tutti.train.task import Task
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

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
        chunks, more = _saved_weights(model, source)
        weights, notes = SavedWeights(chunks, weights), [*notes, *more]
    weights = weights or SavedWeights({})
    dtype = PARAMETER_DTYPES[recipe.compute.precision]
    model = model if dtype is None else model.to(dtype)
    if recipe.lora is not None:
        add_adapters(model, LoraOptions.parse(recipe.lora))
        sources: TensorSources = {}
        if recipe.init_from is not None and saved_weights:
            sources = _saved_adapters(model, recipe.init_from)
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


def _saved_weights(model: nn.Module, source: Path) -> tuple[TensorSources, list[str]]:
    """Return where each weight is stored in `source` (a run or a folder), and notes."""
    if not (source / "recipe.toml").is_file():
        sources, notes = tensor_sources(model, saved_tensors(source), str(source))
        return {name: _chunks(each) for name, each in sources.items()}, notes
    path, saved = _saved_run(source)
    chunks = {
        name: chunks_of(path, saved[first])
        for first, names in tied_names(model).items()
        for name in names
        if first in saved
    }
    for name, tensor in model.named_parameters():
        shape = tuple(saved[name]["shape"]) if name in chunks else None
        if shape != tuple(tensor.shape):
            found = f"has no {name}" if shape is None else f"has {name} of shape {shape}"
            raise UsageError(
                f"--init-from {source} {found}, but the model has {name} of shape "
                f"{tuple(tensor.shape)}: use a run of the same model"
            )
    buffers = [name for name, _ in model.named_buffers() if name in saved]
    chunks |= {name: chunks_of(path, saved[name]) for name in buffers}
    return chunks, []


def _saved_run(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint of a run, and its tensors by their names in the base model."""
    steps = saved_steps(source / "checkpoints")
    path = source / "checkpoints" / step_name(max(steps, default=0))
    # Every rank verifies a part of the files. `agree` raises the error of one rank on all ranks.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    index = verify(path, this_rank(), ranks)
    if isinstance(index, str):
        raise UsageError(f"--init-from {source}: {path.name} is damaged: {index}")
    return path, {
        name.removeprefix("model.").replace(".base_layer.", "."): each
        for name, each in index["tensors"].items()
        if name.startswith("model.")  # not the state of the optimizer, and not moving averages
    }


def _saved_adapters(model: nn.Module, source: Path) -> TensorSources:
    """Return the chunks of each LoRA matrix in `source`: an adapter folder, or a run with --lora.

    `model` has adapters. The result is empty if `source` has no adapters.
    """
    names = {
        f"{name}.{matrix}": adapter_layer(layer, matrix).weight
        for name, layer in adapted_layers(model)
        for matrix in MATRICES
    }
    chunks: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    if is_adapter_folder(source):
        adapter = read_adapter(source, "--init-from")
        check_adapter_fits(adapter, model)
        chunks = {name: _chunks(tensor) for name, tensor in adapter.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    elif (source / "recipe.toml").is_file():
        path, saved = _saved_run(source)
        for key, each in saved.items():
            name = key.removesuffix(".default.weight")
            if name.endswith(MATRICES):
                chunks[name], shapes[name] = chunks_of(path, each), tuple(each["shape"])
    for name in sorted({*names, *shapes}) if shapes else ():
        expected = tuple(names[name].shape) if name in names else None
        if shapes.get(name) != expected:
            has, needed = (
                "no such matrix" if shape is None else f"shape {shape}"
                for shape in (shapes.get(name), expected)
            )
            raise UsageError(
                f"--init-from {source} has {has} for {name}, but --lora gives it {needed}: use the "
                "rank and the targets of the saved adapter"
            )
    return chunks


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


def hugging_face_folder(model: str, *, weights: bool = True) -> HuggingFaceFolder | None:
    """Return the folder of --model hf:FOLDER, and None for other models."""
    source = split_source(model)
    return read_folder(source[1], weights=weights) if source and source[0] == "hf" else None


def _chunks(source: SavedTensor | Callable[[], Tensor]) -> list[FileChunk] | Callable[[], Tensor]:
    if not isinstance(source, SavedTensor):
        return source
    whole = Box((0,) * len(source.shape), source.shape)
    return [FileChunk(source.file, source.key, whole)]


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
