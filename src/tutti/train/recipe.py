"""Recipe: a dataclass tree that fully describes a training job. One source for flags and file.

No torch in this file, so that `tutti train --help` answers at once.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tutti.models.config import EfficientNetConfig, GPTConfig, LeNetConfig, WideResNetConfig
from tutti.parallel.options import EngineOptions, ParallelOptions, Recompute

Architecture = LeNetConfig | WideResNetConfig | EfficientNetConfig | GPTConfig


@dataclass(frozen=True)
class Data:
    """What to train on, and how it gets to the device."""

    dataset: str = "digits"
    """digits, fashion-mnist, cifar100, stdlib (text of Python's library), text, tokens, synthetic,
    or your own: package.module:function, which returns (train, test)."""
    data_dir: Path = Path("data")
    """Where the data lies, or is downloaded to: a directory, or a file of text."""
    download: bool = False
    """Fetch fashion-mnist or cifar100 into --data-dir where it is missing."""
    pixels: int = 28
    """Side of digits and synthetic images, in pixels."""
    seq_len: int = 256
    """Tokens in a text sample."""
    padded: bool = False
    """Targets hold -100 where no loss is due: real tokens are then counted over all ranks."""
    data_on_device: bool = False
    """Keep the whole data set in the device's memory."""
    workers: int = 0
    """Processes that load samples, for data sets that are heavy on Python."""


@dataclass(frozen=True)
class Batching:
    """How many samples make a step: batch × accumulation × ranks that get different samples."""

    batch: int = 32
    """Samples per rank and microbatch."""
    accumulation: int | None = None
    """Microbatches per step; gradients are synchronised once per step. A pipeline overlaps them.
    Unset: 1; in a pipeline twice its ranks, and at least as many as it has stages."""
    global_batch: int | None = None
    """Samples per step over all ranks; gives the batch per rank instead of --batch."""
    split: str = "even"
    """How a step is cut among ranks: even, measured (a slower one gets less), or shares: 2,1,1."""
    drop_last: bool = False
    """Leave out the last, shorter step of an epoch."""


@dataclass(frozen=True)
class Optimization:
    """How parameters are updated."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The optimizer, fused where torch can."""
    lr: float = 0.1
    """Learning rate, for steps of --lr-batch samples."""
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the global batch."""
    lr_batch: int | None = None
    """The batch that --lr was chosen for: what --lr-scale scales from."""
    momentum: float = 0.9
    """Momentum of SGD."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: float = 0.0
    """Weight decay, on matrices and kernels only, not on biases and norms."""
    clip: float | None = None
    """Largest global norm of the gradient."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after warm-up; it counts samples, never ranks or steps."""
    warmup: float = 0.0
    """Part of the run over which the learning rate rises, 0 to 1."""
    final_lr: float = 0.0
    """What is left of the learning rate at the end, as a part of it."""


@dataclass(frozen=True)
class Compute:
    """How the step is computed."""

    precision: Literal["float32", "bf16", "fp16", "float64"] = "float32"
    """bf16 and fp16: autocast over float32 parameters (fp16 with a loss scaler)."""
    checkpoint_activations: Recompute = "none"
    """Recompute in the backward pass instead of keeping: nothing, what is cheap to make
    (selective), or all activations of each block (full)."""
    compile: bool = False
    """torch.compile."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph: for small models, with --data-on-device."""


@dataclass(frozen=True)
class Length:
    """How long to train, and what is done along the way."""

    epochs: float = 1.0
    """Passes over the training data."""
    steps: int | None = None
    """Optimizer steps; overrides --epochs."""
    evaluate: bool = True
    """Evaluate on the test data at the end of each epoch, and at the end."""
    evaluate_every: int | None = None
    """Evaluate every so many steps instead."""
    checkpoint_every: int | None = None
    """Save a checkpoint every so many steps (default: at the end of each epoch)."""
    keep: int = 2
    """Checkpoints to keep."""
    seed: int = 0
    """Seed of weights and data order."""


@dataclass(frozen=True)
class Recipe:
    """A training job."""

    model: str = "lenet"
    """lenet, wideresnet, efficientnet, gpt, or your own: package.module:function."""
    architecture: Architecture = field(default_factory=LeNetConfig)
    """The settings of a model of ours; those that follow from the data are derived."""
    data: Data = Data()
    batching: Batching = Batching()
    optimization: Optimization = Optimization()
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    compute: Compute = Compute()
    length: Length = Length()


RECIPES = {
    "lenet": Recipe(
        model="lenet",
        architecture=LeNetConfig(),
        data=Data(dataset="digits", pixels=28),
        batching=Batching(batch=32),
        optimization=Optimization(lr=0.05, schedule="cosine", warmup=0.05),
        length=Length(epochs=15),
    ),
    "wideresnet": Recipe(
        model="wideresnet",
        architecture=WideResNetConfig(depth=16, width=8),
        data=Data(dataset="cifar100"),
        batching=Batching(batch=128),
        optimization=Optimization(
            lr=0.1,
            lr_scale="linear",
            lr_batch=128,
            weight_decay=5e-4,
            schedule="cosine",
            warmup=0.03,
        ),
        compute=Compute(precision="bf16"),
        length=Length(epochs=60),
    ),
    "efficientnet": Recipe(
        model="efficientnet",
        architecture=EfficientNetConfig(size="s", stem_stride=1),
        data=Data(dataset="cifar100"),
        batching=Batching(batch=128),
        optimization=Optimization(
            optimizer="adamw",
            lr=1e-3,
            lr_scale="sqrt",
            lr_batch=128,
            betas=(0.9, 0.999),
            weight_decay=0.05,
            clip=1.0,
            schedule="cosine",
            warmup=0.05,
        ),
        compute=Compute(precision="bf16"),
        length=Length(epochs=60),
    ),
    "gpt": Recipe(
        model="gpt",
        architecture=GPTConfig(),
        data=Data(dataset="stdlib", seq_len=256),
        batching=Batching(batch=4),
        optimization=Optimization(
            optimizer="adamw",
            lr=3e-3,
            weight_decay=0.1,
            clip=1.0,
            schedule="cosine",
            warmup=0.05,
            final_lr=0.1,
        ),
        length=Length(steps=300),
    ),
}


def with_values(recipe: Recipe, values: dict[str, object]) -> Recipe:
    """A recipe with some values replaced: {"optimization": {"lr": 0.2}, "model": "gpt"}."""
    changes: dict[str, object] = {}
    for name, value in values.items():
        part = getattr(recipe, name)
        changes[name] = replace(part, **value) if dataclasses.is_dataclass(part) else value  # type: ignore[type-var,arg-type]
    return replace(recipe, **changes)  # type: ignore[arg-type]
