"""Case: the weights, the samples and the steps that one device and every layout are given alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tutti.data import Dataset, TensorSamples
from tutti.parallel.blocks import repeated_blocks
from tutti.parallel.layout import Layout
from tutti.parallel.options import Recompute
from tutti.parity.noise import fitting_noise, with_padding
from tutti.parity.options import ParityOptions, microbatches_of, recipe_of, samples_for
from tutti.parity.roles import aliases_of, roles_of
from tutti.train.datasets import load_dataset
from tutti.train.models import build_model
from tutti.train.task import IGNORED
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Case:
    """One training, to be done on one device and under layouts."""

    options: ParityOptions
    make_model: Callable[[], nn.Module]
    """The model with its first weights: the same at every call, on every rank."""
    samples: TensorSamples
    """Those of a whole step, then those of an uneven one."""
    batch: int
    """Samples of a whole step, over all ranks."""
    batch_norms: bool
    """Whether a microbatch's samples see each other: then who is with whom matters."""
    by_microbatch: bool
    """Whether it matters how a step is cut: batch norms, or buffers that every forward changes."""
    padded: bool
    recompute: Recompute
    roles: dict[str, str]
    aliases: dict[str, str]

    def microbatches(self, layout: Layout) -> int:
        """Of each step, under this layout."""
        return microbatches_of(layout, self.options.parallel)

    @property
    def counts(self) -> list[int]:
        """The samples of each step: whole, uneven, whole, …"""
        uneven = len(self.samples) - self.batch
        return [uneven if number % 2 else self.batch for number in range(self.options.steps)]

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """All inputs and targets of a step."""
        part = slice(self.batch, None) if number % 2 else slice(None, self.batch)
        return self.samples.inputs[part], self.samples.targets[part]


def make_case(recipe: str, options: ParityOptions, layouts: Sequence[Layout]) -> Case:
    """The case of these options, the same for all of the layouts.

    A whole step divides by data ranks × microbatches under every layout, the uneven one does not.
    """
    options.check()
    settings = recipe_of(recipe, options)
    dataset = load_dataset(settings)

    def make_model() -> nn.Module:
        torch.manual_seed(options.seed)
        return _without_chance(build_model(settings, dataset))

    model = make_model()
    batch_norms = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    batch, uneven = samples_for(layouts, options, batch_norms=batch_norms)
    if options.model is not None and options.dataset is None:
        samples = fitting_noise(model, batch + uneven, options)
    else:
        samples = _first(dataset, batch + uneven)
    if options.padded:
        samples = with_padding(samples)
    return Case(
        options=options,
        make_model=make_model,
        samples=samples,
        batch=batch,
        batch_norms=batch_norms,
        by_microbatch=batch_norms or _leaves_marks(model, samples),
        padded=bool((samples.targets == IGNORED).any()),
        recompute=options.checkpoint_activations if repeated_blocks(model) else "none",
        roles=roles_of(model),
        aliases=aliases_of(model),
    )


def _first(dataset: Dataset, count: int) -> TensorSamples:
    if len(dataset.train) < count:
        raise UsageError(
            f"--dataset {dataset.name} has {len(dataset.train)} samples, this needs {count}: use "
            "fewer --ranks, a smaller --microbatch or another data set"
        )
    return TensorSamples(*dataset.train.batch(range(count)))


@torch.no_grad()
def _leaves_marks(model: nn.Module, samples: TensorSamples) -> bool:
    """Whether a forward in training changes any buffer of the model."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not before:
        return False
    model.train()(samples.inputs[:2])
    return any(not torch.equal(before[name], now) for name, now in model.named_buffers())


def _without_chance(model: nn.Module) -> nn.Module:
    """No dropout: one device and many draw different numbers, and both are right."""
    for layer in model.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    return model
