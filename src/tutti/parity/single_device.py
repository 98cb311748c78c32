"""The workload (weights, samples and steps), and the reference: a float64 loop on one device.

Layouts are compared with this loop, so it shares no code with engines or with tutti's own step. It
processes the whole batch at once, minimises the mean loss over all targets, and uses torch's
clipping and optimizers.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.data import TensorSamples
from tutti.data.nested import Nested, call_with, count_rows, map_tensors
from tutti.models.lora_layers import adapted_layers, adapter_layer
from tutti.parallel.layout import Layout, Recompute
from tutti.parallel.recompute import repeated_blocks
from tutti.parallel.rng import dropout_probabilities
from tutti.parity import parity_options
from tutti.parity.parity_options import ParityOptions
from tutti.parity.tolerances import TOLERANCES
from tutti.train.init import build_model, load_dataset
from tutti.train.step import as_model_dtype
from tutti.train.task import IGNORED, class_dim
from tutti.world.errors import UsageError

OptimizerName = Literal["sgd", "adamw"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw")
MOMENTUM = 0.9
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, _BatchNorm)
_HEADS = ("head", "lm_head", "output", "classifier", "fc")


@dataclass(frozen=True)
class Workload:
    """A short training run, which is repeated on one device and under each layout.

    make_model: returns the model with its initial weights, identical in every call and on every
    rank. samples: the samples of a full step, then the samples of an uneven step. batch: the number
    of samples in a full step, over all ranks. by_microbatch: whether the result depends on how a
    step is divided into microbatches, because of batch norms or of buffers that every forward
    changes.
    """

    options: ParityOptions
    make_model: Callable[[], nn.Module]
    samples: TensorSamples
    batch: int
    batch_norms: bool
    by_microbatch: bool
    padded: bool
    recompute: Recompute
    roles: dict[str, str]
    aliases: dict[str, str]

    def microbatches(self, layout: Layout) -> int:
        return parity_options.microbatches_of(layout, self.options.parallel)

    @property
    def counts(self) -> list[int]:
        """The number of samples in each step: full, uneven, full, …"""
        uneven = len(self.samples) - self.batch
        return [uneven if number % 2 else self.batch for number in range(self.options.steps)]

    def example(self, device: torch.device) -> Nested:
        """Return one input with its batch dim."""
        return map_tensors(lambda tensor: tensor[:1].to(device), self.samples.inputs)

    def step(self, number: int) -> tuple[Nested, Tensor]:
        part = slice(self.batch, None) if number % 2 else slice(None, self.batch)
        return rows(self.samples.inputs, part), self.samples.targets[part]


def rows(value: Nested, selected: slice | Tensor) -> Nested:
    """Return these rows of every tensor."""
    return map_tensors(lambda tensor: tensor[selected], value)


def make_workload(recipe_name: str, options: ParityOptions, layouts: Sequence[Layout]) -> Workload:
    """Make the workload of these options. It is the same for all layouts."""
    options.check()
    recipe = parity_options.recipe_with(recipe_name, options)
    dataset = load_dataset(recipe)

    def make_model() -> nn.Module:
        torch.manual_seed(options.seed)
        model = build_model(recipe, dataset)
        # Dropout is disabled, because its masks differ between one device and several.
        for layer, name in list(dropout_probabilities(model)):
            setattr(layer, name, 0.0)
        for _, layer in adapted_layers(model):
            # With the usual zeros in lora_B, the first gradient of lora_A would be zero.
            nn.init.normal_(adapter_layer(layer, "lora_B").weight, std=0.02)
        if hasattr(model, "set_experts_implementation"):
            # By default, transformers uses a grouped matrix product, which has no float64 version.
            model.set_experts_implementation("batched_mm")  # type: ignore[operator]
        return model

    model = make_model()
    batch_norms = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    batch, uneven = parity_options.samples_for(layouts, options, batch_norms=batch_norms)
    if options.model is not None and options.dataset is None:
        samples = random_samples(model, batch + uneven, options)
    elif len(dataset.train) >= batch + uneven:
        samples = TensorSamples(*dataset.train.batch(range(batch + uneven)))
    else:
        raise UsageError(
            f"--dataset {dataset.name} has {len(dataset.train)} samples, but this check needs "
            f"{batch + uneven}: use fewer --ranks, a smaller --microbatch or another dataset"
        )
    with torch.no_grad():
        outputs = call_with(model, as_model_dtype(rows(samples.inputs, slice(2)), model))
    class_dim(outputs, samples.targets[:2], recipe.model)
    if options.padded:
        targets = samples.targets.clone()
        if targets.dim() != 2:
            raise UsageError("--padded needs text samples, which have one target per token")
        # The samples have different numbers of targets that are not padding, from 1 to all targets.
        length = targets.shape[1]
        counted = 1 + torch.arange(len(targets)) * 5 % length
        targets[torch.arange(length) >= counted[:, None]] = IGNORED
        samples = TensorSamples(samples.inputs, targets)
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


@torch.no_grad()
def _forward_changes_buffers(model: nn.Module, samples: TensorSamples) -> bool:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not before:
        return False
    call_with(model.train(), as_model_dtype(rows(samples.inputs, slice(2)), model))
    return any(not torch.equal(before[name], after) for name, after in model.named_buffers())


def random_samples(model: nn.Module, count: int, options: ParityOptions) -> TensorSamples:
    """Return random inputs that the model's first layer accepts, and random class numbers."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    # A module that has parameters of its own beside its layers, such as the class token of a ViT,
    # does not say what its input is. Its first layer does.
    layers = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((module for module in model.modules() if isinstance(module, layers)), None)
    flag = ""
    inputs: Nested
    if isinstance(first, nn.Embedding):
        config = getattr(model, "config", None)
        longest = getattr(config, "max_position_embeddings", None) or options.seq_len
        shape = (count, min(options.seq_len, longest))
        inputs = torch.randint(first.num_embeddings, shape, generator=generator)
        flag = "another --seq-len or "
        if getattr(config, "is_encoder_decoder", False):
            targets = torch.randint(first.num_embeddings, shape, generator=generator)
            inputs = {"input_ids": inputs, "decoder_input_ids": targets}
    elif isinstance(first, nn.Linear):
        inputs = torch.randn(count, first.in_features, generator=generator)
    elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        side = [options.pixels] * len(first.kernel_size)
        inputs = torch.randn(count, first.in_channels, *side, generator=generator)
        flag = "another --pixels or "
    else:
        raise UsageError(
            f"--model {options.model} has no embedding, linear layer or convolution, from which "
            "its input could be derived: add --dataset package.module:function"
        )
    try:
        outputs = call_with(model, as_model_dtype(rows(inputs, slice(2)), model))
    except Exception as error:
        sample = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        kind = "numbers" if sample.is_floating_point() else "tokens"
        raise UsageError(
            f"--model {options.model} does not accept {kind} of shape {tuple(sample.shape[1:])}, "
            f"derived from its first layer ({type(error).__name__}: {_first_line(error)}): use "
            f"{flag}--dataset package.module:function"
        ) from None
    rest = outputs.shape[1:-1] if isinstance(outputs, Tensor) else ()
    class_dim(outputs, torch.zeros(2, *rest, dtype=torch.int64), str(options.model))
    targets = torch.randint(outputs.shape[-1], (count, *rest), generator=generator)
    return TensorSamples(inputs, targets)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Return each parameter's role: embedding, norm, head, or its module's path without numbers."""
    aliases = first_names(model)
    roles = {}
    for path, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            if aliases[name] in roles:
                roles[aliases[name]] = "tied embedding"
            elif isinstance(module, nn.Embedding):
                roles[name] = "embedding"
            elif isinstance(module, _NORMS):
                roles[name] = "norm"
            elif path in _HEADS:
                roles[name] = "head"
            else:  # blocks.3.attention.wq → attention.wq
                parts = [p for p in path.split(".") if not p.isdecimal() and p != "default"]
                roles[name] = ".".join(parts[-2:]) or attribute
    return roles


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of each parameter to its first name. A tied parameter has several names."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@dataclass(frozen=True)
class Scales:
    """Hyperparameters derived from the size of the gradients, so that each has an effect."""

    clip: float  # a tenth of the norm of the first gradient, so that every step is clipped
    sgd_lr: float  # with this rate a step moves the parameters by a hundredth of their norm
    adamw_lr: float
    # AdamW divides by √v + eps. With the usual 1e-8, an element whose gradient is rounding error
    # would move by a whole learning rate in a random direction. Here eps is a fraction of the root
    # mean square of all gradients (in float64, one hundredth). It prevents such movements and
    # hardly changes other updates.
    eps: float


@dataclass(frozen=True)
class StepRecord:
    """The results of one step. Tensors are keyed by parameter name."""

    loss: float
    gradients: dict[str, Tensor]  # before clipping
    norm: float
    updates: dict[str, Tensor]  # parameters after the step minus the initial parameters
    buffers: dict[str, Tensor]  # after the step, as float64


def derive_scales(workload: Workload, device: torch.device) -> Scales:
    """Derive the scales from the first gradient of the full batch."""
    model = workload.make_model().to(device, torch.float64)
    _backward(model, *_step(workload, 0, device), microbatches=None)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not math.isfinite(float(gradient_norm)):
        raise UsageError(
            f"{workload.options.model or 'the model'}: on one device, the gradient of the first "
            "step is not finite, so nothing can be compared: check the model and its inputs"
        )
    clip = 0.1 * float(gradient_norm)
    weights = float(nn.utils.get_total_norm([p.detach() for p in parameters]))
    count = sum(p.numel() for p in parameters)
    eps = TOLERANCES[workload.options.precision].eps * clip / math.sqrt(count)
    return Scales(clip, sgd_lr=0.01 * weights / clip, adamw_lr=1e-3, eps=eps)


def train_single_device(
    workload: Workload, name: OptimizerName, scales: Scales, layout: Layout, device: torch.device
) -> Iterator[StepRecord]:
    """Train on one device. Yield the record of each step.

    The layout matters only if the result of the workload depends on the microbatches.
    """
    model = workload.make_model().to(device, torch.float64).train()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = {n: p.detach().clone() for n, p in parameters.items()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=scales.sgd_lr, momentum=MOMENTUM, foreach=False)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=scales.adamw_lr, betas=BETAS, eps=scales.eps, foreach=False
        )
    for number, samples in enumerate(workload.counts):
        microbatches = None
        if workload.by_microbatch:
            count = workload.microbatches(layout)
            microbatches = global_microbatches(samples, layout.data_ranks, count)
        optimizer.zero_grad()
        loss = _backward(model, *_step(workload, number, device), microbatches)
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in parameters.items()
        }
        norm = nn.utils.clip_grad_norm_(parameters.values(), scales.clip)
        optimizer.step()
        updates = {n: p.detach() - start[n] for n, p in parameters.items()}
        yield StepRecord(loss, gradients, float(norm), updates, buffers_of(model))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers in float64. A shared buffer appears under each of its names."""
    named = model.named_buffers(remove_duplicate=False)
    return {n: b.detach().double().clone() for n, b in named if b.numel() and not b.is_complex()}


def global_microbatches(samples: int, data_ranks: int, microbatches: int) -> list[Tensor]:
    """Return the sample indices of each microbatch over all ranks.

    A synchronised batch norm computes its statistics over these samples. The samples are divided
    evenly among ranks, and the samples of a rank evenly among microbatches. If a division has a
    remainder, the first ranks or microbatches get one more sample each.
    """
    count = min(microbatches, -(-samples // data_ranks))
    ranks = [part.tensor_split(count) for part in torch.arange(samples).tensor_split(data_ranks)]
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def _backward(
    model: nn.Module, inputs: Nested, targets: Tensor, microbatches: list[Tensor] | None
) -> float:
    """Compute the gradients of the mean loss over targets without padding. Return this mean."""
    count = (targets != -100).sum()
    total = 0.0
    for indices in microbatches or [torch.arange(count_rows(inputs))]:
        outputs = call_with(model, rows(inputs, indices))
        outputs = outputs.movedim(class_dim(outputs, targets[indices], ""), -1)
        loss = F.cross_entropy(outputs.flatten(0, -2), targets[indices].flatten(), reduction="sum")
        (loss / count).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach() / count)
    return total


class OneDeviceChecks:
    """Repeats the first step on one device, to find why no layout can agree with one device."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload, self._device = workload, device
        self.loss, self._gradient = self._step(self._model())
        self.gradient_norm = float(self._gradient.norm())

    def cause(self) -> str | None:
        """Return the first reason that is found, or None."""
        if difference := self._difference(self._model()):
            return (
                f"two steps on one device, with the same weights, samples and seeds, differ by "
                f"{difference:.1g}: forward depends on the time, or on state outside of the model"
            )
        if difference := self._difference(self._model(), seed=1):
            return (
                f"two steps on one device, with the same weights and samples, but with other "
                f"seeds, differ by {difference:.1g}: forward draws random numbers, which a layout "
                "cannot repeat. Switch them off for this check (dropout layers are off)."
            )
        model = self._model()
        self._step(model)
        if difference := self._difference(model):
            return (
                f"a second step on one device, without an update, differs by {difference:.1g}: "
                "forward changes the model, for example by counting its calls"
            )
        if self._workload.batch_norms:
            # Batch norms couple samples, but this is not a cause: layouts synchronise batch norms.
            return None
        samples = self._workload.counts[0]
        try:
            difference = self._difference(self._model(), microbatches=samples)
        except Exception:  # the model does not accept a single sample
            return None
        if 0 < difference <= TOLERANCES["float32"].gradient:
            return (
                f"on one device, {samples} microbatches of one sample and one batch of {samples} "
                f"differ by {difference:.1g}, the rounding error of float32: forward converts "
                "activations to float32. Use --precision float32."
            )
        if difference:
            return (
                f"on one device, {samples} microbatches of one sample and one batch of {samples} "
                f"differ by {difference:.1g}: the samples of a batch are coupled, for example by a "
                "mean over the batch. Compute each sample's output from this sample alone."
            )
        return None

    def _model(self) -> nn.Module:
        return self._workload.make_model().to(self._device, torch.float64).train()

    def _step(self, model: nn.Module, seed: int = 0, microbatches: int = 1) -> tuple[float, Tensor]:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        model.zero_grad()
        inputs, targets = _step(self._workload, 0, self._device)
        parts = list(torch.arange(len(targets)).tensor_split(microbatches))
        loss = _backward(model, inputs, targets, parts)
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = [p.new_zeros(p.numel()) if p.grad is None else p.grad for p in trained]
        return loss, torch.cat([gradient.flatten() for gradient in gradients])

    def _difference(self, model: nn.Module, seed: int = 0, microbatches: int = 1) -> float:
        """Return the relative difference from the first step; 0 if rounding explains it."""
        loss, gradient = self._step(model, seed, microbatches)
        scale = float(self._gradient.abs().max()) or 1.0
        of_loss = abs(loss - self.loss) / (abs(self.loss) or 1.0)
        difference = max(of_loss, float((gradient - self._gradient).abs().max()) / scale)
        return 0.0 if difference <= TOLERANCES["float64"].gradient else difference


def _step(workload: Workload, number: int, device: torch.device) -> tuple[Nested, Tensor]:
    inputs, targets = workload.step(number)
    inputs = map_tensors(
        lambda t: t.to(device, torch.float64 if t.is_floating_point() else None), inputs
    )
    return inputs, targets.to(device)
