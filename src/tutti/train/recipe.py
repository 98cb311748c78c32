"""Recipe: a dataclass tree that fully describes a training job, and its TOML file.

The flags of `tutti train`, the keys of recipe.toml and the reference pages all come from these
dataclasses. This module does not import torch, so `tutti train --help` stays fast.
"""

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from tutti.models.config import EfficientNetConfig, GPTConfig, LeNetConfig, WideResNetConfig
from tutti.parallel.layout import EngineOptions, ParallelOptions, Recompute
from tutti.world.errors import UsageError, did_you_mean

Architecture = LeNetConfig | WideResNetConfig | EfficientNetConfig | GPTConfig


@dataclass(frozen=True)
class Data:
    """The data set, and how samples reach the device."""

    dataset: str = "digits"
    """digits, fashion-mnist, cifar100, stdlib (source text of Python's standard library), text,
    tokens, synthetic, or package.module:function, a function that returns (train, test)."""
    data_dir: Path = Path("data")
    """Directory of the data set (also the download target), or a text file."""
    download: bool = False
    """Download fashion-mnist or cifar100 into --data-dir if it is missing."""
    pixels: int = 28
    """Height and width of digits and synthetic images, in pixels."""
    seq_len: int = 256
    """Tokens per text sample."""
    padded: bool = False
    """Targets of -100 are padding: the loss is divided by the other targets of all ranks."""
    data_on_device: bool = False
    """Keep the whole data set in device memory."""
    workers: int = 0
    """Loader processes, for data sets whose samples are expensive to produce in Python."""


@dataclass(frozen=True)
class Batching:
    """Samples per step: batch × accumulation × data-parallel ranks."""

    batch: int = 32
    """Samples per rank and microbatch."""
    accumulation: int | None = None
    """Microbatches per step; gradients are synchronised once per step, and a pipeline overlaps its
    microbatches. Unset: 1, or with pp the larger of 2 × pp and the number of stages."""
    global_batch: int | None = None
    """Samples per step over all ranks; sets the batch per rank instead of --batch."""
    split: str = "even"
    """How a step is divided among ranks: even, measured (slower ranks get fewer samples), or
    explicit shares such as 2,1,1."""
    drop_last: bool = False
    """Skip the last, smaller step of an epoch."""


@dataclass(frozen=True)
class Optimization:
    """Optimizer and learning rate."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The optimizer; torch's fused kernel is used where available."""
    lr: float = 0.1
    """Learning rate, for steps of --lr-batch samples."""
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with the global batch."""
    lr_batch: int | None = None
    """The global batch that --lr was tuned for; --lr-scale scales from it."""
    momentum: float = 0.9
    """Momentum of SGD."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of parameters with two or more dims (not biases and norms)."""
    clip: float | None = None
    """Maximum global norm of the gradient."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning-rate decay after warm-up, as a function of the samples seen."""
    warmup: float = 0.0
    """Fraction of the run over which the learning rate rises linearly, 0 to 1."""
    final_lr: float = 0.0
    """Learning rate at the end, as a fraction of the peak."""


@dataclass(frozen=True)
class Compute:
    """Precision, activation checkpointing and compilation."""

    precision: Literal["float32", "bf16", "fp16", "float64"] = "float32"
    """bf16 and fp16 use autocast over float32 parameters (fp16 with a loss scaler)."""
    checkpoint_activations: Recompute = "none"
    """Activations to recompute in backward: none, the cheap ones (selective), or all of each block
    (full)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph; for small models with --data-on-device."""


@dataclass(frozen=True)
class Length:
    """Length of the run, evaluation and checkpoints."""

    epochs: float = 1.0
    """Passes over the training data."""
    steps: int | None = None
    """Optimizer steps; overrides --epochs."""
    evaluate: bool = True
    """Evaluate on the test data after each epoch and at the end."""
    evaluate_every: int | None = None
    """Evaluate every N steps instead of every epoch."""
    checkpoint_every: int | None = None
    """Save a checkpoint every N steps (default: after each epoch)."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    seed: int = 0
    """Seed of the initial weights and the data order."""


@dataclass(frozen=True)
class Recipe:
    """A training job."""

    model: str = "lenet"
    """lenet, wideresnet, efficientnet, gpt, or package.module:function."""
    architecture: Architecture = field(default_factory=LeNetConfig)
    """Sizes of a built-in model; classes, channels and vocabulary follow from the data set."""
    data: Data = Data()
    batching: Batching = Batching()
    optimization: Optimization = Optimization()
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    compute: Compute = Compute()
    length: Length = Length()


def with_values(recipe: Recipe, values: dict[str, object]) -> Recipe:
    """Return a recipe with some values replaced: {"optimization": {"lr": 0.2}, "model": "gpt"}."""
    changes: dict[str, object] = {}
    for name, value in values.items():
        part = getattr(recipe, name)
        changes[name] = replace(part, **value) if dataclasses.is_dataclass(part) else value  # type: ignore[type-var,arg-type]
    return replace(recipe, **changes)  # type: ignore[arg-type]


def read_recipe(name: str) -> Recipe:
    """Return a built-in recipe by name, or read a recipe from a TOML file.

    In a file, `base = "gpt"` names the built-in recipe whose values the file changes. An unknown
    key is an error that suggests the nearest known key.
    """
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if path.suffix != ".toml":
        hint = did_you_mean(name, RECIPES)
        raise UsageError(f"no recipe {name!r}: {hint} (or a file that ends in .toml)")
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--recipe {path}: {error.strerror}: check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--recipe {path}: {error}") from None
    base = content.pop("base", None)
    if base not in RECIPES:
        known = ", ".join(f'"{each}"' for each in RECIPES)
        raise UsageError(f'--recipe {path}: base = {base!r}: write base = "NAME", one of {known}')
    recipe: Recipe = _apply(RECIPES[base], content, str(path), "")
    return recipe


def write_recipe(recipe: Recipe, base: str) -> str:
    """Return the whole recipe as TOML text."""
    return tomli_w.dumps({"base": base, **_toml_value(dataclasses.asdict(recipe))})


_NONE = "none"  # TOML has no null: an unset value is written as this string


def _toml_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _toml_value(each) for key, each in value.items()}
    if value is None:
        return _NONE
    return str(value) if isinstance(value, Path) else value


def _apply(target: Any, values: dict[str, Any], where: str, prefix: str) -> Any:
    hints = get_type_hints(type(target))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
            raise UsageError(f"{where}: no key {prefix}{key}: did you mean {prefix}{near[0]}?")
        current = getattr(target, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: {prefix}{key} is a section: write [{prefix}{key}]")
            changes[key] = _apply(current, value, where, f"{prefix}{key}.")
        else:
            changes[key] = _checked(value, hints[key], f"{where}: {prefix}{key}")
    try:
        return replace(target, **changes)
    except ValueError as error:  # raised by the dataclass's own check of its values
        raise UsageError(f"{where}: {error}") from None


def _checked(value: Any, kind: Any, what: str) -> Any:
    """Return a TOML value as the field's type; an integer is accepted for a float field."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        if len(kinds) < len(get_args(kind)) and value == _NONE:
            return None
        return _checked(value, kinds[0], what)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{what} = {value!r}: use one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_checked(each, get_args(kind)[0], what) for each in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise UsageError(f"{what} = {value!r}: expected {getattr(kind, '__name__', kind)}")
    return value


def _built_in_recipes() -> dict[str, Recipe]:
    file = Path(__file__).with_name("recipes.toml")
    kinds = (LeNetConfig, WideResNetConfig, EfficientNetConfig, GPTConfig)
    return {
        name: _apply(Recipe(model=name, architecture=kind()), values, f"{file}: {name}", "")
        for kind, (name, values) in zip(kinds, tomllib.loads(file.read_text()).items(), strict=True)
    }


RECIPES = _built_in_recipes()
