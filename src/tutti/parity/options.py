"""What a parity check can be told, and the sizes it chooses itself. No torch in this file."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tutti.models.config import EfficientNetConfig, GPTConfig, WideResNetConfig
from tutti.parallel.layout import Layout
from tutti.parallel.options import EngineOptions, ParallelOptions, Recompute
from tutti.parity.tolerance import Precision
from tutti.train.recipe import RECIPES, Architecture, Recipe
from tutti.world.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class ParityOptions:
    """The training that is done twice."""

    architecture: Architecture = field(default_factory=GPTConfig)
    """The settings of the recipe's model."""
    model: str | None = None
    """Your own model in the recipe's place: package.module:function, which returns it."""
    dataset: str | None = None
    """Data, as of tutti train; unset: noise that fits the model's first and last layer."""
    data_dir: Path = Path("data")
    """Where the data lies, if --dataset names a set that needs files."""
    seq_len: int = 256
    """Tokens in a sample of text."""
    pixels: int = 32
    """Side of synthetic images, in pixels."""
    padded: bool = False
    """Text only: targets of -100 at the end of samples, more in some than in others."""
    steps: int = 3
    """Optimizer steps with each of SGD and AdamW; the second has fewer samples than the others."""
    microbatch: int = 1
    """Samples in the smallest microbatch of any layout; all layouts take the same steps."""
    precision: Precision = "float64"
    """What the layouts compute in; one device always computes in float64."""
    checkpoint_activations: Recompute = "full"
    """What the layouts recompute in backward, if the model has blocks; one device recomputes
    nothing."""
    seed: int = 0
    """Seed of weights and noise."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def check(self) -> None:
        """Refuse what cannot be compared."""
        if self.steps < 2:
            raise UsageError(f"--steps {self.steps}: use 2 or more, the second is the uneven one")
        if self.microbatch < 1:
            raise UsageError(f"--microbatch {self.microbatch}: use 1 or more")
        if self.parallel.layout is not None:
            raise UsageError(
                f"--layout {self.parallel.layout}: parity takes a list: use --layouts "
                f"{self.parallel.layout}"
            )


def microbatches_of(layout: Layout, parallel: ParallelOptions) -> int:
    """Microbatches of a step: as many as a pipeline has stages, so that it fills; else 2 or 3.

    3 is the size of few axes: gradients that are 3 × too large are not blamed on dp2. Under tp,
    where each costs DTensor a second on the CPU, 2 must do.
    """
    if layout.pp > 1:
        return layout.pp * parallel.virtual_stages
    return 2 if layout.tp > 1 else 3


def samples_for(
    layouts: Sequence[Layout], options: ParityOptions, *, batch_norms: bool
) -> tuple[int, int]:
    """Samples of a whole step, the fewest that every layout can cut evenly; and of an uneven one.

    The uneven one has one sample less than two for every rank: with a rank for each part of the
    batch, the last has nothing to do in its last microbatch. A batch norm needs two samples in
    every microbatch, so that it may have more.
    """
    uneven = max(1, 2 * layouts[0].size - 1)
    while batch_norms and min(_fewest(uneven, each, options) for each in layouts) < 2:
        uneven += 2
    pieces = [layout.data_ranks * microbatches_of(layout, options.parallel) for layout in layouts]
    return options.microbatch * _up(uneven + 1, math.lcm(*pieces)), uneven


def _fewest(samples: int, layout: Layout, options: ParityOptions) -> int:
    """Samples in the smallest microbatch of a step, over all data ranks."""
    ranks = layout.data_ranks
    runs = min(microbatches_of(layout, options.parallel), -(-samples // ranks))
    return sum((samples // ranks + (rank < samples % ranks)) // runs for rank in range(ranks))


def options_of(name: str) -> ParityOptions:
    """A recipe at its own size."""
    recipe = _recipe(name)
    return ParityOptions(
        architecture=recipe.architecture,
        seq_len=recipe.data.seq_len,
        pixels=32 if recipe.data.dataset == "cifar100" else recipe.data.pixels,
    )


def small_options_of(
    name: str, layouts: Sequence[Layout], parallel: ParallelOptions
) -> ParityOptions:
    """A recipe shrunk as far as the layouts allow: what divides by tp and pp stays divisible."""
    architecture = _recipe(name).architecture
    if isinstance(architecture, GPTConfig):
        split = math.lcm(*(layout.tp for layout in layouts))
        stages = math.lcm(*(layout.pp for layout in layouts)) * parallel.virtual_stages
        heads = _up(4, split)
        seq_len = _up(32, split)
        shape = GPTConfig(
            vocab_size=_up(64, split),
            max_seq_len=seq_len,
            layers=_up(4, stages),
            dim=heads * max(8, 64 // heads // 2 * 2),
            heads=heads,
            mlp_dim=_up(128, split),
            norm_eps=architecture.norm_eps,
        )
        return ParityOptions(architecture=shape, seq_len=seq_len)
    if isinstance(architecture, WideResNetConfig):
        return ParityOptions(architecture=replace(architecture, depth=10, width=1), pixels=8)
    if isinstance(architecture, EfficientNetConfig):
        # Random depth is not the same on one device and on many, and nobody expects it to be.
        shape_ = replace(architecture, classes=10, stochastic_depth=0.0, dropout=0.0)
        return ParityOptions(architecture=shape_, pixels=32)
    return ParityOptions(architecture=architecture, pixels=8)


def recipe_of(name: str, options: ParityOptions) -> Recipe:
    """The recipe whose model and data are compared."""
    recipe = _recipe(name)
    data = dataclasses.replace(
        recipe.data,
        dataset=options.dataset or "synthetic",
        data_dir=options.data_dir,
        seq_len=options.seq_len,
        pixels=options.pixels,
    )
    return replace(
        recipe,
        model=options.model or recipe.model,
        architecture=options.architecture,
        data=data,
    )


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise UsageError(f"--recipe {name}: {did_you_mean(name, RECIPES)}")
    return RECIPES[name]


def _up(least: int, multiple: int) -> int:
    """The smallest multiple that is no less."""
    return -(-least // multiple) * multiple
