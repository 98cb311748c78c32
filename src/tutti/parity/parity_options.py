"""Options of a parity check, and the sizes that the check chooses.

This module does not import torch, so that `tutti parity --help` stays fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tutti.models.config import EfficientNetConfig, GPTConfig, WideResNetConfig
from tutti.parallel.layout import EngineOptions, Layout, ParallelOptions, Recompute
from tutti.parity.tolerances import Precision
from tutti.train.recipe import RECIPES, Architecture, Recipe
from tutti.train.recipe_check import check_model, check_model_and_data
from tutti.train.training_schedule import check_numbers
from tutti.world.errors import UsageError, did_you_mean

_LARGEST = 1_000_000  # maximum of --steps and of --microbatch; a larger check would take days


@dataclass(frozen=True)
class ParityOptions:
    """Options of the training runs that the parity check compares."""

    architecture: Architecture = field(default_factory=GPTConfig)
    """Sizes of the recipe's model."""
    model: str | None = None
    """Your own model: package.module:function; the function must return an nn.Module."""
    lora: str | None = None
    """Options of LoRA adapters, as in tutti train. Only the adapters are trained and compared. They
    start with random values, because zeros would hide errors."""
    dataset: str | None = None
    """Dataset, as in tutti train (default: random samples that fit the model)."""
    data_dir: Path = Path("data")
    """Directory of the dataset, if --dataset needs files."""
    seq_len: int = 256
    """Number of tokens per text sample."""
    pixels: int = 32
    """Height and width of synthetic images, in pixels."""
    padded: bool = False
    """Pad the targets of text samples with -100, by a different number of tokens in each sample."""
    steps: int = 3
    """Number of optimizer steps with each of SGD and AdamW. In every second step, the number
    of samples is not divisible by the number of ranks."""
    microbatch: int = 1
    """Number of samples in the smallest microbatch of any layout."""
    precision: Precision = "float64"
    """Precision of the parallel runs. The single-device reference always uses float64."""
    checkpoint_activations: Recompute = "full"
    """Activations that the layouts recompute in backward, if the model has repeated blocks. The
    single device recomputes none."""
    seed: int = 0
    """Random seed of the initial weights and the random samples."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def check(self) -> None:
        if self.steps < 2:
            raise UsageError(
                f"--steps must be at least 2, got {self.steps}, because only the second step tests "
                "a batch that cannot be divided evenly over the ranks"
            )
        for flag, count in (("--microbatch", self.microbatch), ("--steps", self.steps)):
            if not 1 <= count <= _LARGEST:
                raise UsageError(f"{flag} must be from 1 to {_LARGEST}, got {count}")
        if layout := self.parallel.layout:
            raise UsageError(
                f"parity takes a list of layouts: use --layouts {layout}, not --layout"
            )


def microbatches_of(layout: Layout, parallel: ParallelOptions) -> int:
    """Return the number of microbatches: one per pp stage; without pp, 2 with tp and 3 without tp.

    Few layouts have an axis of size 3, so an error by a factor of 3 points to the microbatches and
    not to an axis. With tp, only 2 microbatches are used, because DTensor needs about a second of
    CPU time for each microbatch.
    """
    if layout.pp > 1:
        return layout.pp * parallel.virtual_stages
    return 2 if layout.tp > 1 else 3


def samples_for(
    layouts: Sequence[Layout], options: ParityOptions, *, batch_norms: bool
) -> tuple[int, int]:
    """Return the number of samples of a full step and of an uneven step.

    The uneven step has 2 × ranks − 1 samples, so that in layout dpN the last rank has no sample in
    its last microbatch. With batch norms, the uneven step is enlarged until every microbatch has at
    least two samples. The full step has n × --microbatch samples. n is the smallest number above
    the number of samples in the uneven step that every layout divides evenly.
    """
    uneven = max(1, 2 * layouts[0].size - 1)
    while batch_norms and min(_smallest_microbatch(uneven, x, options) for x in layouts) < 2:
        uneven += 2
    divisors = [layout.data_ranks * microbatches_of(layout, options.parallel) for layout in layouts]
    return options.microbatch * _round_up(uneven + 1, math.lcm(*divisors)), uneven


def _smallest_microbatch(samples: int, layout: Layout, options: ParityOptions) -> int:
    """Return the number of samples in a step's smallest microbatch, summed over data ranks."""
    ranks = layout.data_ranks
    count = min(microbatches_of(layout, options.parallel), -(-samples // ranks))
    return sum((samples // ranks + (rank < samples % ranks)) // count for rank in range(ranks))


def full_size_options(name: str) -> ParityOptions:
    recipe = _recipe(name)
    pixels = 32 if recipe.data.dataset == "cifar100" else recipe.data.pixels
    return ParityOptions(recipe.architecture, seq_len=recipe.data.seq_len, pixels=pixels)


def small_options(name: str, layouts: Sequence[Layout], parallel: ParallelOptions) -> ParityOptions:
    """Return the options of a recipe shrunk to the smallest sizes that all layouts divide."""
    architecture = _recipe(name).architecture
    if isinstance(architecture, GPTConfig):
        tp = math.lcm(*(layout.tp for layout in layouts))
        stages = math.lcm(*(layout.pp for layout in layouts)) * parallel.virtual_stages
        heads = _round_up(4, tp)
        seq_len = _round_up(32, tp)
        shape = GPTConfig(
            vocab_size=_round_up(64, tp),
            max_seq_len=seq_len,
            layers=_round_up(4, stages),
            dim=heads * max(8, 64 // heads // 2 * 2),
            heads=heads,
            mlp_dim=_round_up(128, tp),
            norm_eps=architecture.norm_eps,
        )
        return ParityOptions(shape, seq_len=seq_len)
    if isinstance(architecture, WideResNetConfig):
        return ParityOptions(replace(architecture, depth=10, width=1), pixels=8)
    if isinstance(architecture, EfficientNetConfig):
        # Stochastic depth and dropout draw different numbers on one device and on many.
        small = replace(architecture, classes=10, stochastic_depth=0.0, dropout=0.0)
        return ParityOptions(small, pixels=32)
    return ParityOptions(architecture, pixels=8)


def check_workload(
    name: str, options: ParityOptions, layouts: Sequence[Layout], device: str
) -> None:
    """Raise UsageError if names, paths or numbers are wrong. Called before the ranks start."""
    recipe = recipe_with(name, options)
    length = replace(recipe.length, steps=options.steps, seed=options.seed)
    recipe = replace(recipe, engine=options.engine, parallel=options.parallel, length=length)
    built_in = options.model is None
    if options.padded and built_in and not isinstance(options.architecture, GPTConfig):
        raise UsageError("--padded needs text samples, which have one target per token")
    if not built_in and options.dataset is None:
        # The samples are random, and their sizes follow from the first layer of the model.
        check_numbers(recipe)
        check_model(recipe)
        return
    # Every rank may run the one-device checks, so every rank holds all samples.
    samples = sum(samples_for(layouts, options, batch_norms=False))
    check_model_and_data(recipe, layouts[0], samples, device)


def recipe_with(name: str, options: ParityOptions) -> Recipe:
    recipe = _recipe(name)
    data = replace(
        recipe.data,
        dataset=options.dataset or "synthetic",
        data_dir=options.data_dir,
        seq_len=options.seq_len,
        pixels=options.pixels,
    )
    model = options.model or recipe.model
    return replace(
        recipe, model=model, lora=options.lora, architecture=options.architecture, data=data
    )


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise UsageError(f"--recipe {name}: {did_you_mean(name, RECIPES)}")
    return RECIPES[name]


def _round_up(minimum: int, multiple: int) -> int:
    return -(-minimum // multiple) * multiple
