"""Samples for a model that nobody described: its first layer says what it takes, its outputs what
they are compared with."""

import torch
from torch import Tensor, nn

from tutti.data import TensorSamples
from tutti.parity.options import ParityOptions
from tutti.train.task import IGNORED
from tutti.world.errors import UsageError


def fitting_noise(model: nn.Module, count: int, options: ParityOptions) -> TensorSamples:
    """Random inputs that the model's first layer takes, random targets among its outputs."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    inputs = _inputs(model, count, options, generator)
    try:
        outputs = model(inputs[:2])
    except Exception as error:
        raise UsageError(
            f"--model {options.model} does not take {_shape(inputs)}, which its first layer "
            f"suggests ({type(error).__name__}: {error}): give --dataset package.module:function"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != 2:
        raise UsageError(
            f"--model {options.model} gives no logits with samples first and classes last: wrap it "
            "in a module that does"
        )
    shape = (count, *outputs.shape[1:-1])
    return TensorSamples(inputs, torch.randint(outputs.shape[-1], shape, generator=generator))


def with_padding(samples: TensorSamples) -> TensorSamples:
    """The same samples, of which each counts a different part: from one target to all of them."""
    targets = samples.targets.clone()
    if targets.dim() != 2:
        raise UsageError("--padded is for text, whose samples have a target for each token")
    length = targets.shape[1]
    counted = 1 + torch.arange(len(targets)) * 5 % length
    targets[torch.arange(length) >= counted[:, None]] = IGNORED
    return TensorSamples(samples.inputs, targets)


def _inputs(
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
        f"--model {options.model} begins with {kind}, which does not say what it takes: give "
        "--dataset package.module:function"
    )


def _shape(inputs: Tensor) -> str:
    kind = "numbers" if inputs.is_floating_point() else "tokens"
    return f"{kind} of shape {tuple(inputs.shape[1:])}"
