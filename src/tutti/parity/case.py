"""Case: the weights, the samples and the steps that one device and every layout are given alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tutti.data import TensorSamples
from tutti.parity.options import ParityOptions, recipe_of
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
    microbatches: int
    batch_norms: bool
    """Whether a microbatch's samples see each other: then who is with whom matters."""
    padded: bool
    roles: dict[str, str]
    aliases: dict[str, str]

    @property
    def counts(self) -> list[int]:
        """The samples of each step: whole, uneven, whole, …"""
        uneven = len(self.samples) - self.batch
        return [uneven if number % 2 else self.batch for number in range(self.options.steps)]

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """All inputs and targets of a step."""
        part = slice(self.batch, None) if number % 2 else slice(None, self.batch)
        return self.samples.inputs[part], self.samples.targets[part]


def make_case(recipe: str, options: ParityOptions, ranks: int, microbatches: int) -> Case:
    """The case of these options for layouts of so many ranks.

    An even step divides by ranks × microbatches, whatever the layout. The uneven one has one
    sample less than two for every rank: with a rank for each part of the batch, the last has
    nothing to do in its last microbatch.
    """
    options.check()
    settings = recipe_of(recipe, options)
    batch = options.microbatch * ranks * microbatches
    uneven = max(1, 2 * ranks - 1)
    if options.model is not None and options.dataset is None:
        torch.manual_seed(options.seed)
        samples = fitting_noise(build_model_of_ones_own(settings.model), batch + uneven, options)
        dataset = None
    else:
        dataset = load_dataset(settings)
        samples = _first(dataset.train, batch + uneven, dataset.name)
    if options.padded:
        samples = _padded(samples)

    def make_model() -> nn.Module:
        torch.manual_seed(options.seed)
        if dataset is None:
            return _without_dropout(build_model_of_ones_own(settings.model))
        return _without_dropout(build_model(settings, dataset))

    model = make_model()
    return Case(
        options=options,
        make_model=make_model,
        samples=samples,
        batch=batch,
        microbatches=microbatches,
        batch_norms=any(isinstance(layer, _BatchNorm) for layer in model.modules()),
        padded=bool((samples.targets == IGNORED).any()),
        roles=roles_of(model),
        aliases=aliases_of(model),
    )
