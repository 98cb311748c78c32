"""Splits the peak memory of a program on this rank by cause. The program is not changed.

The causes are the same as for tutti train (see train/memory.py). torch's global hooks find the
tensors: parameters belong to the outermost modules that the program calls, and optimizer state
belongs to the optimizers that it steps. Communication buffers are DDP's buckets and the parameters
that FSDP2 has gathered.

The hooks count memory for two steps with activations, and are then removed. This file imports only
torch and the standard library, because it is loaded into programs whose environment may not have
tutti.
"""

import resource
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING or not __name__.startswith("tutti_capture."):
    from tutti.measure.activation_memory import (
        ActivationCounter,
        gathered_by_fsdp,
        local_tensor,
        optimizer_bytes,
        storage_of,
        tensor_bytes,
    )
else:  # the program's environment may not have tutti
    from .activation_memory import (
        ActivationCounter,
        gathered_by_fsdp,
        local_tensor,
        optimizer_bytes,
        storage_of,
        tensor_bytes,
    )

_COUNTED_STEPS = 2  # two, because the optimizer creates its state at the end of the first step
_MODULES = 10  # maximum number of modules in `activations_by_module`
_COUNTED = ("parameters", "gradients", "optimizer", "activations", "buffers")


class ProgramMemory(ActivationCounter):
    """Counts the memory of a program by cause, from `begin` until two steps are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = dict.fromkeys(_COUNTED, 0)  # the parts at the moment when their sum was largest
        self.peak_modules: dict[str, int] = {}
        self.steps = 0  # number of optimizer steps in which activations were counted
        self._hooks = ExitStack()
        self._roots: list[nn.Module] = []  # the outermost modules that the program has called
        self._names: dict[int, str] = {}  # id of a module → its name within the outermost module
        self._optimizers: list[torch.optim.Optimizer] = []
        self._gradients: dict[int, int] = {}  # id of a parameter → bytes of its gradient
        self._saw_activations = False
        self._saved_tensors = saved_tensors_hooks(self.pack, self.unpack)
        self._is_last = False  # whether torch calls `pack` and not a later hook of the program
        self._ended = False

    def begin(self) -> None:
        """Register the module hooks and autograd hooks. The caller must call `on_update`."""
        hooks = self._hooks
        hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        self._saved_tensors.__enter__()

    def end(self) -> None:
        """Remove the hooks. Later calls do nothing."""
        if self._ended:
            return
        self.grown = True
        self.consider()
        self._hooks.close()
        self._roots.clear()
        self._optimizers.clear()
        # torch can remove only the saved-tensor hooks that were added last. If the program has
        # added its own hooks later, the hooks of this class stay, and `pack` returns every tensor
        # unchanged.
        self._is_last = False
        probe = torch.ones((), requires_grad=True)
        with torch.enable_grad():
            probe * probe
        self._ended = True
        if self._is_last:
            self._saved_tensors.__exit__()

    def pack(self, tensor: Tensor) -> Any:
        self._is_last = True
        return tensor if self._ended else super().pack(tensor)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self.stack and not isinstance(module, torch.jit.ScriptModule):
            self._begin_forward(module)
        self.begin_module(self._names.get(id(module), type(module).__name__), module)

    def _leave(self, *_: Any) -> None:
        if self.stack:  # empty if an outer forward began before the hooks were added
            self.end_module()

    def _begin_forward(self, root: nn.Module) -> None:
        """Begin the forward of an outermost module."""
        if not any(root is other for other in self._roots):
            self._roots.append(root)
            for name, module in root.named_modules():
                name = name.removeprefix("module.") if name != "module" else ""
                self._names[id(module)] = name or type(module).__name__
            tensors = [*root.parameters(), *root.buffers()]
            self.excluded |= {storage_of(t).data_ptr() for t in tensors if not t.is_meta}
            for parameter in root.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                    self._hooks.callback(hook.remove)
        self._gradients.clear()  # the program may have freed gradients since then
        for each in self._parameters():
            self._count_gradient(each)

    def _parameters(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        groups = (
            group["params"] for optimizer in self._optimizers for group in optimizer.param_groups
        )
        for parameters in (*(root.parameters() for root in self._roots), *groups):
            for parameter in parameters:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def _on_gradient(self, parameter: Tensor) -> None:
        self._count_gradient(parameter)
        self.grown = True

    def _count_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        self._gradients[id(parameter)] = 0 if gradient is None else local_tensor(gradient).nbytes

    @property
    def complete(self) -> bool:
        """Whether enough steps have been counted."""
        return self.steps >= _COUNTED_STEPS

    def on_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count memory at the end of an optimizer step."""
        if self._ended:
            return
        if not any(optimizer is other for other in self._optimizers):
            self._optimizers.append(optimizer)
        for parameter in self._parameters():
            self._count_gradient(parameter)
        self.grown = True
        self.consider()
        # In its first steps, tutti train counts memory with its own hooks. They hide the
        # activations from the hooks of this class, so these steps are not counted.
        if self._saw_activations and optimizer is self._optimizers[0]:
            self.steps += 1
            self._saw_activations = False

    def consider(self) -> None:
        """Store the current parts as the peak if their sum is the largest so far."""
        if not self.grown:
            return
        self.grown = False
        self._saw_activations |= self.activations > 0
        buffers = [buffer for root in self._roots for buffer in root.buffers()]
        gradients, buckets = sum(self._gradients.values()), 0
        for root in self._roots:
            if isinstance(root, DistributedDataParallel):
                size = sum(p.nbytes for p in root.parameters() if p.requires_grad)
                if root.gradient_as_bucket_view:
                    gradients = max(gradients, size)  # gradients are views of the buckets
                else:
                    buckets += size
        gathered = [tensor for root in self._roots for tensor in gathered_by_fsdp(root)]
        now = {
            "parameters": tensor_bytes([*self._parameters(), *buffers]),
            "gradients": gradients,
            "optimizer": sum(map(optimizer_bytes, self._optimizers)),
            "activations": self.activations,
            "buffers": tensor_bytes(gathered) + buckets,
        }
        if sum(now.values()) > sum(self.peak.values()):
            self.peak = now
            self.peak_modules = {name: size for name, size in self.by_module.items() if size}

    def summary(self, device: torch.device | None, process_peak: int) -> dict[str, Any]:
        """Return the parts of the peak memory of the GPU, or of the process if `device` is None."""
        total, fragmentation = process_peak, 0
        if device is not None:
            total = torch.cuda.max_memory_reserved(device)
            fragmentation = max(0, total - torch.cuda.max_memory_allocated(device))
        other: int | None = total - fragmentation - sum(self.peak.values())
        note = None
        if other is not None and other < 0:
            note = f"the part 'other' is unknown: the other parts exceed the peak by {-other} bytes"
            other = None
        largest = sorted(self.peak_modules.items(), key=lambda item: -item[1])[:_MODULES]
        return {
            **self.peak,
            "fragmentation": fragmentation,
            "other": other,
            "total": total,
            "activations_by_module": [{"module": name, "bytes": size} for name, size in largest],
            "note": note,
        }


def process_peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
