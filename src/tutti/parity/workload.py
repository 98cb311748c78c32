"""Workload: the weights, samples and steps that the single device and every layout share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tutti.data import Dataset, TensorSamples
from tutti.parallel.layout import Layout, Recompute
from tutti.parallel.recompute import repeated_blocks
from tutti.parity.parity_options import ParityOptions, microbatches_of, recipe_with, samples_for
from tutti.train.init import build_model, load_dataset
from tutti.train.step import IGNORED
from tutti.world.errors import UsageError

_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, _BatchNorm)
_HEADS = ("head", "lm_head", "output", "classifier", "fc")


@dataclass(frozen=True)
class Workload:
    """A short training, which is run on one device and under each layout."""

    options: ParityOptions
    make_model: Callable[[], nn.Module]
    """Returns the model with its initial weights, identical in every call and on every rank."""
    samples: TensorSamples
    """The samples of a full step, followed by those of an uneven step."""
    batch: int
    """Samples of a full step, over all ranks."""
    batch_norms: bool
    """Whether the model has batch norms: the samples of a microbatch then affect each other."""
    by_microbatch: bool
    """Whether the result depends on how a step is divided into microbatches, because of batch norms
    or of buffers that every forward changes."""
    padded: bool
    recompute: Recompute
    roles: dict[str, str]
    aliases: dict[str, str]

    def microbatches(self, layout: Layout) -> int:
        return microbatches_of(layout, self.options.parallel)

    @property
    def counts(self) -> list[int]:
        """The samples of each step: full, uneven, full, …"""
        uneven = len(self.samples) - self.batch
        return [uneven if number % 2 else self.batch for number in range(self.options.steps)]

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        part = slice(self.batch, None) if number % 2 else slice(None, self.batch)
        return self.samples.inputs[part], self.samples.targets[part]


def make_workload(recipe_name: str, options: ParityOptions, layouts: Sequence[Layout]) -> Workload:
    """Make the workload of these options, the same for all layouts.

    Under every layout, the samples of a full step are divisible by data ranks × microbatches, and
    those of an uneven step are not.
    """
    options.check()
    recipe = recipe_with(recipe_name, options)
    dataset = load_dataset(recipe)

    def make_model() -> nn.Module:
        torch.manual_seed(options.seed)
        model = build_model(recipe, dataset)
        for layer in model.modules():
            # Dropout is disabled: the masks on one device and on several devices differ.
            if isinstance(layer, _DropoutNd):
                layer.p = 0.0
        return model

    model = make_model()
    batch_norms = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    batch, uneven = samples_for(layouts, options, batch_norms=batch_norms)
    if options.model is not None and options.dataset is None:
        samples = random_samples(model, batch + uneven, options)
    else:
        samples = _first_samples(dataset, batch + uneven)
    if options.padded:
        samples = _with_padding(samples)
    return Workload(
        options=options,
        make_model=make_model,
        samples=samples,
        batch=batch,
        batch_norms=batch_norms,
        by_microbatch=batch_norms or _forward_changes_buffers(model, samples),
        padded=bool((samples.targets == IGNORED).any()),
        recompute=options.checkpoint_activations if repeated_blocks(model) else "none",
        roles=parameter_roles(model),
        aliases=first_names(model),
    )


def _first_samples(dataset: Dataset, count: int) -> TensorSamples:
    if len(dataset.train) < count:
        raise UsageError(
            f"--dataset {dataset.name} has {len(dataset.train)} samples, this check needs {count}: "
            "use fewer --ranks, a smaller --microbatch or another data set"
        )
    return TensorSamples(*dataset.train.batch(range(count)))


@torch.no_grad()
def _forward_changes_buffers(model: nn.Module, samples: TensorSamples) -> bool:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not before:
        return False
    model.train()(samples.inputs[:2])
    return any(not torch.equal(before[name], now) for name, now in model.named_buffers())


def random_samples(model: nn.Module, count: int, options: ParityOptions) -> TensorSamples:
    """Return random inputs that the model's first layer accepts, and targets among its outputs."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    inputs = _random_inputs(model, count, options, generator)
    try:
        outputs = model(inputs[:2])
    except Exception as error:
        kind = "numbers" if inputs.is_floating_point() else "tokens"
        raise UsageError(
            f"--model {options.model} does not accept {kind} of shape {tuple(inputs.shape[1:])}, "
            f"derived from its first layer ({type(error).__name__}: {error}): give --dataset "
            "package.module:function"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != 2:
        raise UsageError(
            f"--model {options.model} must return logits with samples first and classes last: wrap "
            "it in a module that does"
        )
    shape = (count, *outputs.shape[1:-1])
    return TensorSamples(inputs, torch.randint(outputs.shape[-1], shape, generator=generator))


def _random_inputs(
    model: nn.Module, count: int, options: ParityOptions, generator: torch.Generator
) -> Tensor:
    first = next((m for m in model.modules() if list(m.parameters(recurse=False))), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, (count, options.seq_len), generator=generator)
    if isinstance(first, nn.Linear):
        return torch.randn(count, first.in_features, generator=generator)
    if isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        side = [options.pixels] * len(first.kernel_size)
        return torch.randn(count, first.in_channels, *side, generator=generator)
    kind = "no layer" if first is None else f"a {type(first).__name__}"
    raise UsageError(
        f"--model {options.model} begins with {kind}, from which its input cannot be derived: give "
        "--dataset package.module:function"
    )


def _with_padding(samples: TensorSamples) -> TensorSamples:
    """Pad the targets: the number of counted targets differs between samples, from 1 to all."""
    targets = samples.targets.clone()
    if targets.dim() != 2:
        raise UsageError("--padded is for text, whose samples have a target for each token")
    length = targets.shape[1]
    counted = 1 + torch.arange(len(targets)) * 5 % length
    targets[torch.arange(length) >= counted[:, None]] = IGNORED
    return TensorSamples(samples.inputs, targets)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Return each parameter's role: embedding, norm, head, or its module's path without numbers."""
    aliases = first_names(model)
    roles = {}
    for path, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            if aliases[name] in roles:
                roles[aliases[name]] = "tied embedding"
            elif isinstance(module, nn.Embedding):
                roles[name] = "embedding"
            elif isinstance(module, _NORMS):
                roles[name] = "norm"
            elif path in _HEADS:
                roles[name] = "head"
            else:  # blocks.3.attention.wq → attention.wq
                words = [word for word in path.split(".") if not word.isdecimal()]
                roles[name] = ".".join(words[-2:]) or own
    return roles


def first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of every parameter to its first name; a tied parameter has several."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
