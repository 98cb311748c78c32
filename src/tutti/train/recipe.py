"""Recipe: a dataclass tree that describes a training job completely, and its TOML file.

The flags of `tutti train`, the keys of recipe.toml and the reference pages are generated from these
dataclasses. This module does not import torch, so that `tutti train --help` is fast.
"""

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from tutti.models.config import (
    EfficientNetConfig,
    GPTConfig,
    HuggingFaceConfig,
    LeNetConfig,
    OwnModelConfig,
    WideResNetConfig,
)
from tutti.parallel.layout import EngineOptions, ParallelOptions, Recompute
from tutti.world.errors import UsageError, closest_name, did_you_mean

Architecture = LeNetConfig | WideResNetConfig | EfficientNetConfig | GPTConfig | OwnModelConfig


@dataclass(frozen=True)
class Data:
    """The dataset, and how samples are loaded."""

    dataset: str = "digits"
    """Dataset: `digits`, `fashion-mnist`, `cifar100`, `stdlib` (the source text of Python's
    standard library) or `synthetic`; your own files as `text:PATH`, `jsonl:PATH`, `parquet:PATH`,
    `tokens:FOLDER` or `images:FOLDER`; or `package.module:function`, a function that returns
    (train, test)."""
    collate: str | None = None
    """`package.module:function`, a function that converts a list of samples of your own map-style
    dataset into (inputs, targets). Default: torch's default_collate."""
    data_dir: Path = Path("data")
    """Directory of `fashion-mnist` and `cifar100`, and of `text` and `tokens` without a path."""
    download: bool = False
    """Download `fashion-mnist` or `cifar100` into --data-dir if it is missing."""
    pixels: int = 28
    """Height and width in pixels of `digits`, `synthetic` and `images:FOLDER`."""
    seq_len: int = 256
    """Number of tokens per text sample."""
    padded: bool = False
    """Targets that are -100 are padding. The loss is the mean over all other targets of all
    ranks."""
    data_on_device: bool = False
    """Keep the whole dataset in device memory."""
    workers: int = 0
    """Number of DataLoader worker processes per rank. Useful if samples take long to load or
    transform."""


@dataclass(frozen=True)
class TaskOptions:
    """The loss and the metric of the task."""

    loss: str = "cross_entropy"
    """Loss: `cross_entropy` (for class indices), `mse` (for regression), `bce` (binary cross
    entropy of logits, for several labels per sample), `model` (the loss that the model returns if
    it gets labels, as Hugging Face models do), or `package.module:function`, a function (outputs,
    targets) that returns one loss per sample or a pair (losses, weights)."""
    metric: str | None = None
    """Evaluation metric: `accuracy`, `mse`, `mae`, `none`, or `package.module:function`, a function
    (outputs, targets) that returns one value per sample or a pair (values, weights). Default:
    `accuracy` with the losses `cross_entropy` and `bce`, else `none`."""


@dataclass(frozen=True)
class Batching:
    """Samples per step: batch × accumulation × data-parallel ranks."""

    batch: int = 32
    """Number of samples per rank and microbatch."""
    accumulation: int | None = None
    """Number of microbatches per step. Gradients are summed over replicas once per step. With the
    axis `shard`, they are reduce-scattered after each microbatch. Default: 1, or with the axis
    `pp`, the larger of 2 × pp and the number of pipeline stages."""
    global_batch: int | None = None
    """Number of samples per step, over all ranks. If set, --batch is ignored."""
    split: str = "even"
    """How the samples of a step are divided among ranks: `even`, `measured` (slower ranks get fewer
    samples), or one share per rank, such as `2,1,1`."""
    drop_last: bool = False
    """Skip the last step of an epoch if it has fewer samples than the other steps."""


@dataclass(frozen=True)
class Optimization:
    """Optimizer and learning rate."""

    optimizer: str = "sgd"
    """Optimizer: `sgd`, `adamw`, another class of torch.optim (`adadelta`, `adafactor`, `adagrad`,
    `adam`, `adamax`, `asgd`, `nadam`, `radam`, `rmsprop`, `rprop`), or `package.module:function`, a
    function (parameters, lr) that returns a torch.optim.Optimizer."""
    lr: float = 0.1
    """Peak learning rate. With --lr-scale, this is the rate for a global batch of --lr-batch
    samples."""
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate by the ratio global batch / --lr-batch (`linear`), by the square root
    of this ratio (`sqrt`), or not at all (`none`)."""
    lr_batch: int | None = None
    """Global batch for which --lr was tuned. Required by --lr-scale linear and sqrt."""
    momentum: float = 0.9
    """Momentum of SGD."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW, Adam, Adamax, NAdam and RAdam."""
    weight_decay: float = 0.0
    """Weight decay of parameters with two or more dims. Biases and normalization parameters have no
    weight decay."""
    clip: float | None = None
    """Maximum gradient norm, computed over all parameters. Gradients with a larger norm are scaled
    down to it. Default: no clipping."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate after the warm-up, as a function of the number of samples."""
    warmup: float = 0.0
    """Fraction of the run (at least 0, below 1) in which the learning rate rises linearly from
    0."""
    final_lr: float = 0.0
    """Learning rate at the end of the run, as a fraction of the peak learning rate."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999. Evaluation, prediction
    and export use the averaged weights. Default: no average."""


@dataclass(frozen=True)
class Compute:
    """Precision, activation checkpointing and compilation."""

    precision: Literal["float32", "bf16", "fp16", "float64", "model"] = "float32"
    """Precision. `float32` and `float64`: parameters and computation have this dtype. `bf16` and
    `fp16`: autocast with float32 parameters (`fp16` with a loss scaler). `model`: parameters keep
    the dtype with which the model was built, and the model computes in this dtype."""
    checkpoint_activations: Recompute = "none"
    """Activations to recompute in the backward pass: `none`, `selective` (activations that are
    cheap to compute), or `full` (all activations of each block)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph. Useful for small models. Requires
    --data-on-device."""


@dataclass(frozen=True)
class Length:
    """Length of the run, evaluation and checkpoints."""

    epochs: float = 1.0
    """Number of passes over the training data."""
    steps: int | None = None
    """Number of optimizer steps. If set, --epochs is ignored."""
    evaluate: bool = True
    """Evaluate on the test data after each epoch and at the end."""
    evaluate_every: int | None = None
    """Evaluate every N steps instead of after each epoch."""
    checkpoint_every: int | None = None
    """Save a checkpoint every N steps instead of after each epoch."""
    keep: int = 2
    """Number of checkpoints to keep. Older checkpoints are removed."""
    keep_best: str | None = None
    """Also save and keep the checkpoint with the best test score. The score is the test loss
    (`loss`), a metric by name (such as `accuracy`), or your own metric function (`max:NAME` or
    `min:NAME`)."""
    patience: int | None = None
    """End the run after N consecutive evaluations without a better score of --keep-best."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""


@dataclass(frozen=True)
class Recipe:
    """A training job."""

    model: str = "lenet"
    """Model: `lenet`, `wideresnet`, `efficientnet`, `gpt`, `hf:FOLDER` (a Hugging Face causal
    language model that save_pretrained wrote into FOLDER), `timm:NAME`, or
    `package.module:function`."""
    init_from: Path | None = None
    """Initial weights: a run directory, or a directory with model.safetensors. Names and shapes
    must match the model. With --lora, a directory with a peft adapter is also possible. Default:
    the weights of hf:FOLDER, or newly initialised weights."""
    lora: str | None = None
    """Freeze the model and train LoRA adapters. The value is a list of options, such as
    `rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj`. Every option can be omitted. `targets`
    are names of linear layers, or ends of such names. The default `all-linear` means every linear
    layer except the output layer of a language model. The other defaults are rank 16, alpha 2 ×
    rank, dropout 0."""
    architecture: Architecture = field(default_factory=LeNetConfig)
    """Sizes of a built-in model. The numbers of classes, channels and tokens are taken from the
    dataset."""
    data: Data = Data()
    task: TaskOptions = TaskOptions()
    batching: Batching = Batching()
    optimization: Optimization = Optimization()
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    compute: Compute = Compute()
    length: Length = Length()


def with_values(recipe: Recipe, values: dict[str, object]) -> Recipe:
    """Return a copy with some values replaced: {"optimization": {"lr": 0.2}, "model": "gpt"}."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        section: Any = getattr(recipe, name)
        changes[name] = replace(section, **value) if isinstance(value, dict) else value
    return replace(recipe, **changes)


def default_recipe(model: str) -> str:
    """Return the name of the recipe that is used for a model if no recipe is given."""
    return "hf" if model.startswith("hf:") else "own" if ":" in model else "lenet"


def built_in_recipe(recipe: Recipe) -> str:
    """Return the name of the built-in recipe with the same type of model, for `base` in a file."""
    kind = type(recipe.architecture)
    return next(name for name, known in RECIPES.items() if type(known.architecture) is kind)


def without_overridden(recipe: Recipe, given: Collection[str]) -> Recipe:
    """Return the recipe without values that would override the `given` flags.

    If `epochs` is given, the recipe's number of steps is removed. If `batch` is given, the recipe's
    global batch is removed.
    """
    if "epochs" in given and "steps" not in given:
        recipe = with_values(recipe, {"length": {"steps": None}})
    if "batch" in given and "global_batch" not in given:
        recipe = with_values(recipe, {"batching": {"global_batch": None}})
    return recipe


def with_flags(recipe: Recipe, flags: Mapping[str, object]) -> Recipe:
    """Return a copy with some values replaced, by the names of the flags: {"lr": 0.2}."""
    sections: dict[str, Any] = {}
    for name, value in flags.items():
        path = _flag_paths(recipe).get(name)
        if path is None:
            close = closest_name(name, _flag_paths(recipe))
            hint = "see tutti train --help" if close is None else f"did you mean {close}?"
            raise UsageError(f"the recipe has no value {name}: {hint}")
        section, _, field_name = path.rpartition(".")
        target = getattr(recipe, section) if section else recipe
        hint_type = get_type_hints(type(target))[field_name]
        checked = _checked(_NONE if value is None else _toml_value(value), hint_type, name)
        if section:
            sections.setdefault(section, {})[field_name] = checked
        else:
            sections[field_name] = checked
    try:
        return without_overridden(with_values(recipe, sections), flags.keys())
    except ValueError as error:  # raised by the dataclass's own check of its values
        raise UsageError(str(error)) from None


def _flag_paths(recipe: Recipe) -> dict[str, str]:
    """Map the name of each flag to its key in the recipe: `lr` to `optimization.lr`."""
    paths: dict[str, str] = {}
    for section, values in dataclasses.asdict(recipe).items():
        inner = values if isinstance(values, dict) else {}
        paths |= {name: f"{section}.{name}" for name in inner} or {section: section}
    return paths


def read_recipe(name: str) -> Recipe:
    """Return a built-in recipe by name, or read a recipe from a TOML file."""
    return read_recipe_and_ranks(name)[0]


def read_recipe_and_ranks(name: str) -> tuple[Recipe, int | None]:
    """Return a recipe, and the number of ranks in its file, or None if the file has no number.

    In a file, `base = "gpt"` names the built-in recipe whose values the file changes, and
    `ranks = 2` sets the default of --ranks. An unknown key raises UsageError, which suggests a
    known key.
    """
    if name in RECIPES:
        return RECIPES[name], None
    path = Path(name)
    if path.suffix != ".toml":
        hint = did_you_mean(name, RECIPES)
        raise UsageError(f"no recipe {name!r}: {hint} (or use a file that ends in .toml)")
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"--recipe {path} cannot be read ({error.strerror}). Check the path."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--recipe {path}: {error}") from None
    base = content.pop("base", None)
    if base not in RECIPES:
        known = ", ".join(f'"{recipe}"' for recipe in RECIPES)
        found = "there is no base" if base is None else f"{base!r} is not a recipe"
        raise UsageError(f"--recipe {path}: {found}. Begin the file with base = one of {known}.")
    ranks = _checked(content.pop("ranks", _NONE), int | None, f"{path}: ranks")
    if ranks is not None and ranks < 1:
        raise UsageError(f"--recipe {path}: ranks must be at least 1, got {ranks}")
    recipe: Recipe = _apply(RECIPES[base], content, str(path))
    return recipe, ranks


def write_recipe(recipe: Recipe, base: str, ranks: int | None = None) -> str:
    """Return all values of the recipe, and the number of ranks of the run, as TOML text."""
    head = {"base": base} if ranks is None else {"base": base, "ranks": ranks}
    return tomli_w.dumps({**head, **_toml_value(dataclasses.asdict(recipe))})


_NONE = "none"  # represents None, because TOML has no null


def _toml_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _toml_value(item) for key, item in value.items()}
    if value is None:
        return _NONE
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _apply(
    target: Any, values: dict[str, Any], where: str, prefix: str = "", recipe: Any = None
) -> Any:
    """Return `target`, a recipe or a section of `recipe`, with the values of a TOML table."""
    hints = get_type_hints(type(target))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            raise UsageError(
                f"{where}: no key {prefix}{key}: {_suggest(key, prefix, recipe or target)}"
            )
        current = getattr(target, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: {prefix}{key} is a section. Write [{prefix}{key}].")
            changes[key] = _apply(current, value, where, f"{key}.", target)
        else:
            changes[key] = _checked(value, hints[key], f"{where}: {prefix}{key}")
    try:
        return replace(target, **changes)
    except ValueError as error:  # raised by the dataclass's own check of its values
        raise UsageError(f"{where}: {error}") from None


def _suggest(key: str, prefix: str, recipe: Recipe) -> str:
    """Return a suggestion for an unknown key: this key in another section, or a similar key."""
    here: list[str] = []  # keys of the section with the unknown key
    paths: dict[str, str] = {}  # maps every key to its full name: `lr` to `optimization.lr`
    for section, values in dataclasses.asdict(recipe).items():
        inner = list(values) if isinstance(values, dict) else []
        here += inner if prefix == f"{section}." else [section] * (not prefix)
        paths |= {section: section, **{name: f"{section}.{name}" for name in inner}}
    if key not in paths and (near := closest_name(key, here)) is not None:
        return f"did you mean {prefix}{near}?"
    name = key if key in paths else closest_name(key, paths)
    return f"choose from {', '.join(here)}" if name is None else f"did you mean {paths[name]}?"


def _checked(value: Any, kind: Any, key: str) -> Any:
    """Convert a TOML value to the field's type. A float field also accepts an integer."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [member for member in get_args(kind) if member is not type(None)]
        if len(kinds) < len(get_args(kind)) and value == _NONE:
            return None
        return _checked(value, kinds[0], key)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{key} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_checked(item, get_args(kind)[0], key) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise UsageError(f"{key} must be a {getattr(kind, '__name__', kind)}, got {value!r}")
    return value


def _built_in_recipes() -> dict[str, Recipe]:
    file = Path(__file__).with_name("recipes.toml")
    kinds: tuple[type[Architecture], ...] = (LeNetConfig, WideResNetConfig, EfficientNetConfig)
    kinds += (GPTConfig, OwnModelConfig, HuggingFaceConfig)
    return {
        name: _apply(Recipe(model=name, architecture=kind()), values, f"{file}: {name}")
        for kind, (name, values) in zip(kinds, tomllib.loads(file.read_text()).items(), strict=True)
    }


RECIPES = _built_in_recipes()
