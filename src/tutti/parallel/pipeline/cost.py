"""What each layer costs: counted in FLOPs, or measured in seconds.

Counted: the products of matrices of a forward pass; backward has two for each, one for the
gradient of the input and one for that of the weights, so a training step costs three times as much.
Nothing is computed: the count runs on a copy without memory (torch's meta device). It does not see
what is bound by memory: norms, activations, an embedding's look-up.

Measured: seconds of forward and backward on this device, on a real example. Every rank must cut
in the same places, so all of them use what rank 0 has measured.
"""

import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.flop_counter import FlopCounterMode

from tutti.parallel.pipeline.layers import view
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

_BACKWARD = 2  # times the FLOPs of forward
_REPEATS = 5


@torch.no_grad()
def counted(model: nn.Module, units: list[list[str]], example: torch.Tensor) -> list[float]:
    """FLOPs of forward and backward of each unit of layers, on inputs like the example."""
    ghost = _without_memory(model)
    for norm in ghost.modules():
        if isinstance(norm, _NormBase):
            norm.eval()  # in training, one sample can be too few, and other ranks are to be asked
    x = example.to("meta")
    known: dict[object, tuple[float, torch.Tensor]] = {}
    costs = []
    for names in units:
        # The blocks of a transformer are alike: one of them is enough.
        alike = (_kinds(ghost, names), x.shape, x.dtype)
        if alike not in known:
            known[alike] = _count(view(ghost, names), names, x)
        cost, x = known[alike]
        costs.append(cost)
    return costs


def measured(model: nn.Module, units: list[list[str]], example: torch.Tensor) -> list[float]:
    """Seconds of forward and backward of each unit of layers, as rank 0 sees them."""
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.cat([example, example]) if len(example) == 1 else example  # for batch norms
    costs = []
    for names in units:
        stage = view(model, names)
        seconds = []
        for _ in range(1 + _REPEATS):
            given = x.detach().requires_grad_(x.is_floating_point())
            began = now(x.device)
            output = stage(given)
            wanted = [each for each in (given, *stage.parameters()) if each.requires_grad]
            if wanted and output.requires_grad:  # not a frozen embedding
                # Not backward(): nothing may be left in .grad.
                torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
            seconds.append(now(x.device) - began)
        costs.append(statistics.median(seconds[1:]))  # the first one warms up
        x = output
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])  # running statistics of batch norms
    first: list[float] = gather_json(costs)[0]
    return first


def _count(stage: nn.Module, names: list[str], x: torch.Tensor) -> tuple[float, torch.Tensor]:
    try:
        with FlopCounterMode(display=False) as counter:
            output = stage(x)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"--balance counted: the FLOPs of {names[0]} cannot be counted without running it "
            f"({error}): use --balance measured or --balance even"
        ) from error
    return float((1 + _BACKWARD) * counter.get_total_flops()), output


def _kinds(model: nn.Module, names: list[str]) -> object:
    """Equal for layers of the same classes, settings (as they print them) and shapes."""
    modules = [model.get_submodule(name) for name in names]
    shapes = [[parameter.shape for parameter in module.parameters()] for module in modules]
    return repr(modules), repr(shapes)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy on the meta device, made without copying the weights first."""
    ghosts: dict[int, object] = {}
    for parameter in model.parameters():
        ghosts[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        ghosts[id(buffer)] = buffer.to("meta")
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, dist.ProcessGroup):  # of a joint batch norm: there are no copies
                ghosts[id(value)] = value
    return copy.deepcopy(model, ghosts)


def now(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
