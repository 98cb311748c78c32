"""Splits the peak memory of a rank by cause:

parameters     bytes of this rank's parameters and of the model's buffers
gradients      bytes of this rank's gradients, or of DDP's buckets if gradients are views of buckets
optimizer      bytes of the optimizer's state and of the moving average of --ema
activations    bytes that autograd keeps for backward, by module
buffers        copies for communication: gathered parameters, received activations, and DDP's
               buckets if they are not counted as gradients
fragmentation  CUDA: peak of the memory that torch's allocator has reserved, minus the peak of the
               memory that tensors have used
other          the rest of the peak: temporary results, workspaces of kernels, and on a CPU the
               interpreter, its libraries and the data

The parts are counted at the moment in a step when their sum is largest. Hooks count activations and
gradients in the first two steps only. The second step is needed because the optimizer creates its
state at the end of the first step.
"""

import resource
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tutti.measure.activation_memory import (
    ActivationCounter,
    local_tensor,
    optimizer_bytes,
    storage_of,
    tensor_bytes,
)
from tutti.parallel.engine import Engine
from tutti.parallel.recompute import repeated_blocks

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "fragmentation", "other")
_MEASURED_STEPS = 2
_MODULES = 10  # number of modules in summary.json


class Split(NamedTuple):
    """Bytes of the parts that consist of tensors."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0


class MemoryByCause:
    """Counts the memory of one rank by cause, from the construction of its model to the end."""

    def __init__(self, device: torch.device, counts_activations: bool = True) -> None:
        """`counts_activations` must be False if steps are compiled or run as a CUDA graph."""
        self.device = device
        self.before_model = resident_bytes()
        self.model: nn.Module | None = None
        self.engine: Engine | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.ema: Sequence[Tensor] = ()
        self.accumulation = 1
        self.counter: StepCounter | None = None  # counts the current or the last measured step
        self.counts_activations = counts_activations
        self.step_complete = False  # whether a measured step has ended
        self._steps_left = _MEASURED_STEPS if counts_activations else 0

    def begin_model(self, model: nn.Module) -> None:
        """Record the memory before `model`, which is still on the meta device, is allocated."""
        self.before_model, self.model = resident_bytes(), model

    def begin_steps(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        accumulation: int,
        ema: Sequence[Tensor] = (),
    ) -> None:
        """Set the engine, the optimizer and the moving averages whose memory is counted."""
        self.engine, self.optimizer, self.accumulation = engine, optimizer, accumulation
        self.ema = ema
        self.model = engine.model

    def step(self) -> AbstractContextManager[Any]:
        """Return the context in which a step runs. It counts memory in the first two steps only."""
        if not self._steps_left or self.engine is None or self.optimizer is None:
            return nullcontext()
        self._steps_left -= 1
        counter = StepCounter(self.engine, self.optimizer, self.accumulation, self.ema)
        return self._counted(counter)

    @contextmanager
    def _counted(self, counter: "StepCounter") -> Iterator[None]:
        self.counter = counter
        with counter.attached():
            yield
        self.step_complete = True

    def now(self) -> Split:
        """Return the parts at this moment. Activations are 0 if no step has been measured."""
        buffers = gradients = optimizer = activations = 0
        model = self.model
        parameters = parameter_bytes(model) if model is not None else 0
        if model is not None:
            gradients = gradient_bytes(model)
        if self.engine is not None:
            buffers = tensor_bytes(self.engine.communication_buffers()) + self.engine.bucket_bytes
            if self.engine.gradients_in_buckets:
                gradients, buffers = max(gradients, buffers), 0
        if self.optimizer is not None:
            optimizer = optimizer_bytes(self.optimizer) + tensor_bytes(self.ema)
        if self.counter is not None:
            activations = self.counter.activations
        return Split(parameters, gradients, optimizer, activations, buffers)

    def at_peak(self) -> Split:
        """Return the parts at the moment in the last measured step when their sum was largest."""
        if self.counter is None:
            now = self.now()
            # Gradients are freed after each step. Their peak is estimated: gradients are as large
            # as the trained parameters.
            return now._replace(gradients=max(now.gradients, trained_bytes(self.model)))
        return self.counter.peak

    def summary(self) -> dict[str, Any]:
        """Return this rank's row of `memory` in summary.json, and a note if a part is unknown."""
        on_gpu = self.device.type == "cuda"
        total, fragmentation = peak_bytes(), 0
        if on_gpu:
            total = torch.cuda.max_memory_reserved(self.device)
            fragmentation = max(0, total - torch.cuda.max_memory_allocated(self.device))
        split, note = self.at_peak(), None
        other: int | None = total - fragmentation - sum(split)
        if other is not None and other < 0:
            note = f"the part other is unknown: the other parts exceed the peak by {-other} bytes"
            other = None
        elif not self.counts_activations:
            note = "activations are a part of other: with --compile and --cuda-graph they are not "
            note += "counted"
        modules = self.counter.peak_modules if self.counter else {}
        largest = sorted(modules.items(), key=lambda item: -item[1])[:_MODULES]
        return {
            **split._asdict(),
            "fragmentation": fragmentation,
            "other": other,
            "total": total,
            "activations_by_module": [{"module": name, "bytes": size} for name, size in largest],
            "before_model": None if on_gpu else self.before_model,
            "note": note,
        }


class StepCounter(ActivationCounter):
    """Counts activations by module, and gradients, during one step."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        accumulation: int = 1,
        ema: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.engine, self.optimizer, self.model = engine, optimizer, engine.model
        self.gradients = 0  # bytes at this moment
        self.peak = Split()  # the parts when their sum was largest
        self.peak_modules: dict[str, int] = {}
        self.entered: set[str] = set()  # names of modules whose forward has begun
        self.block_inputs: dict[str, int] = {}  # bytes of the inputs of each block
        self._gradients: dict[int, int] = {}  # id of parameter → bytes of its gradient
        self._blocks = set(map(id, repeated_blocks(self.model)))
        self._parameters = parameter_bytes(self.model)
        self._ema = tensor_bytes(ema)
        self._state = optimizer_bytes(optimizer) + self._ema
        # With one microbatch, gradients are views of DDP's buckets. With several microbatches, all
        # microbatches before the last one accumulate gradients in separate tensors.
        self._in_buckets = engine.gradients_in_buckets and accumulation == 1
        tensors = [*self.model.parameters(), *self.model.buffers(), *engine.communication_buffers()]
        self.excluded = {storage_of(tensor).data_ptr() for tensor in tensors}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context of one step, in which hooks count activations and gradients."""
        for parameter in self.model.parameters():
            self._count_gradient(parameter)
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                before = module.register_forward_pre_hook(
                    partial(self._enter, name), with_kwargs=True
                )
                after = module.register_forward_hook(self._leave, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            updated = self.optimizer.register_step_post_hook(self._on_update)
            hooks.callback(updated.remove)
            hooks.enter_context(saved_tensors_hooks(self.pack, self.unpack))
            yield
        self.consider()

    def _enter(self, name: str, module: nn.Module, *inputs: Any) -> None:
        name = name or type(module).__name__
        self.entered.add(name)
        if id(module) in self._blocks:
            tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
            self.block_inputs[name] = tensor_bytes(tensors)
        self.begin_module(name, module)

    def _leave(self, *_: Any) -> None:
        self.end_module()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._count_gradient(parameter)
        self.grown = True

    def _count_gradient(self, parameter: Tensor) -> None:
        size = 0 if parameter.grad is None else local_tensor(parameter.grad).nbytes
        self.gradients += size - self._gradients.get(id(parameter), 0)
        self._gradients[id(parameter)] = size

    def _on_update(self, *_: Any) -> None:
        # Pipeline schedules that split backward set gradients without calling parameter hooks.
        for parameter in self.model.parameters():
            self._count_gradient(parameter)
        self._state = optimizer_bytes(self.optimizer) + self._ema
        self._in_buckets, before = self.engine.gradients_in_buckets, self._in_buckets
        self.grown = True
        self.consider()
        self._in_buckets = before

    def consider(self) -> None:
        """Keep the current parts if their sum is the largest so far."""
        if not self.grown:
            return
        self.grown = False
        gradients, buckets = self.gradients, self.engine.bucket_bytes
        if self._in_buckets:
            gradients, buckets = max(gradients, buckets), 0
        buffers = tensor_bytes(self.engine.communication_buffers()) + buckets
        now = Split(self._parameters, gradients, self._state, self.activations, buffers)
        if sum(now) > sum(self.peak):
            self.peak = now
            self.peak_modules = {name: size for name, size in self.by_module.items() if size}


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's parameters and of the model's buffers."""
    return tensor_bytes([*model.parameters(), *model.buffers()])


def trained_bytes(model: nn.Module | None) -> int:
    """Return the bytes of this rank's trained parameters. Parameters on meta count, too."""
    parameters = [] if model is None else [p for p in model.parameters() if p.requires_grad]
    return sum(local_tensor(parameter).nbytes for parameter in parameters)


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's gradients, which may be views of buckets."""
    return sum(local_tensor(p.grad).nbytes for p in model.parameters() if p.grad is not None)


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: in KiB


def resident_bytes() -> int:
    """Return the memory of this process in bytes."""
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """Return the size `name` in /proc/self/status in bytes, or 0 if the file does not exist."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
