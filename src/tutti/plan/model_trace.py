"""Traces a model: runs one microbatch on meta tensors, and records its operators and memory.

`parallel/apply.py` parallelizes the model with torch's fake process group, which does not
communicate. So the trace records the same operators and tensors as a training step. For every unit
(a block, the embedding, the head), the trace records the operators, the bytes that are kept for
backward, and the peak bytes of forward and backward.

In a sequence of equal blocks, only three blocks are traced: the first, a middle and the last block.
The trace of the middle block is used for all blocks between the first and the last. Bytes, FLOPs
and dims are linear functions of the number of samples, so traces with two microbatch sizes
determine the values for every microbatch size.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tutti.data.dataset import Dataset
from tutti.data.nested import Nested, call_with, map_tensors
from tutti.models.lora_layers import LoraOptions, add_adapters
from tutti.parallel.apply import Techniques, apply, check
from tutti.parallel.layout import Layout, Recompute
from tutti.parallel.materialize import Weights, build_with_buffers
from tutti.parallel.pipeline.block_units import find_units
from tutti.parallel.pipeline.stages import layer_units
from tutti.parallel.recompute import repeated_blocks
from tutti.parallel.tensor import loss_context
from tutti.plan.device_operators import DeviceKind, DeviceOperators, workspace_bytes
from tutti.plan.workload import (
    ActivationMemory,
    Operation,
    OperationKind,
    Parameter,
    Unit,
    Workload,
    block_bytes,
)
from tutti.train.init import PARAMETER_DTYPES, build_meta_model, build_task, model_maker
from tutti.train.recipe import Recipe
from tutti.train.step import AUTOCAST, as_loss_dtype, as_model_dtype
from tutti.train.task import Task
from tutti.world.errors import UsageError
from tutti.world.world import World

# The two traced microbatch sizes, which determine the linear functions of the number of samples.
# Size 1 is not used, because torch skips some copies of tensors with a dim of size 1.
_SIZES = (2, 3)
_KEPT_BLOCKS = 3  # number of traced blocks in a sequence of equal blocks
_POINTS = 6  # maximum length of `ActivationMemory.backward_peaks`
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
_MATMULS = ("mm", "addmm", "bmm", "baddbmm")


class ModelTracer:
    """Makes workloads of one recipe's model. Traces are cached."""

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        device: DeviceKind = "cuda",
        allocator: bool = True,
    ) -> None:
        """If `allocator` is true, count block sizes of torch's CUDA allocator, not tensor sizes."""
        self.recipe, self.dataset, self.device = recipe, dataset, device
        self.allocator = allocator and device == "cuda"
        self.inputs, self.targets = dataset.train.batch([0])
        self._traces: dict[tuple[int, int, bool], _Traced] = {}
        self._workloads: dict[tuple[int, int, bool], Workload] = {}

    def workload(self, tp: int = 1, microbatch: int = 1, sharded: bool = False) -> Workload:
        """Return the workload of a tp rank.

        If `sharded` is true, FSDP2 shards the parameters, and blocks compute with 16-bit parameters
        if the precision is 16-bit. Raises UsageError if the model cannot be traced, or if tensor
        parallelism over `tp` ranks cannot split the model.
        """
        sharded = sharded and self._gathers_narrow
        key = (tp, microbatch, sharded)
        if key not in self._workloads:
            first, second = (self._trace(tp, size, sharded) for size in _SIZES)
            self._workloads[key] = _workload(first, second, microbatch)
        return self._workloads[key]

    @cached_property
    def template(self) -> tuple[nn.Module, Task, dict[str, list[str]]]:
        """(Model on meta, task, result of `shorten_model`).

        The model is already shortened.
        """
        model = model_without_weights(self.recipe, self.dataset).train()
        for owner in model.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    owner._buffers[name] = buffer.to("meta")
        task = build_task(self.recipe, self.dataset, model)
        return model, task, shorten_model(model)

    @cached_property
    def _gathers_narrow(self) -> bool:
        """Whether FSDP2 gathers the parameters of blocks in the dtype of autocast."""
        if self.recipe.compute.precision not in AUTOCAST:
            return False
        blocks = repeated_blocks(self.template[0])
        modules = [module for block in blocks for module in block.modules()]
        # Batch norms with 16-bit inputs need float32 weights, so FSDP2 gathers float32 parameters
        # in models with batch norms.
        return bool(modules) and not any(isinstance(module, _NormBase) for module in modules)

    def traced(self, tp: int, microbatch: int, sharded: bool = False) -> Workload:
        """Return a workload that is traced with exactly this microbatch size. Used by tests."""
        trace = self._trace(tp, microbatch, sharded)
        return _workload(trace, trace, microbatch)

    def _trace(self, tp: int, microbatch: int, sharded: bool) -> "_Traced":
        key = (tp, microbatch, sharded)
        if key not in self._traces:
            with _meta_world(tp) as world:
                self._traces[key] = _Tracing(self, world, tp, microbatch, sharded).run()
        return self._traces[key]


def model_without_weights(recipe: Recipe, dataset: Dataset | None) -> nn.Module:
    """Return the recipe's model with its parameters on meta. No weights are initialized or read.

    In training, the constructor of a user's own module may initialize weights in real memory. A
    trace needs no weights, so the constructor runs on the meta device if possible.
    """
    if ":" not in recipe.model or recipe.model.startswith("hf:"):
        return build_meta_model(recipe, dataset, saved_weights=False)[0]
    make = model_maker(recipe, dataset)
    try:
        with torch.device("meta"):
            model = make()
    except (RuntimeError, NotImplementedError, ValueError):
        # The constructor reads values of tensors, so it cannot run on meta. `build_with_buffers`
        # moves each parameter to meta when the constructor registers it.
        model = build_with_buffers(make)
    dtype = PARAMETER_DTYPES[recipe.compute.precision]
    model = model if dtype is None else model.to(dtype)
    if recipe.lora is not None:
        add_adapters(model, LoraOptions.parse(recipe.lora))
    return model


@contextmanager
def _meta_world(ranks: int) -> Iterator[World]:
    """Context manager: a world of `ranks` ranks on the meta device, without communication."""
    if dist.is_initialized():
        raise UsageError(
            "tutti plan creates its own process group, but a process group already exists in this "
            "process: make the plan before torch.distributed is initialized"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield World(
            rank=0,
            size=ranks,
            local_rank=0,
            local_size=ranks,
            node=0,
            nodes=1,
            host="",
            device=torch.device("meta"),
            backend="fake",
            launcher="",
            master="",
            cpus="",
            threads=1,
            ranks_on_device=1,
            reasons={},
            _rendezvous=cast(Any, None),
            _failures=cast(Any, None),
        )
    finally:
        dist.destroy_process_group()


class _NoWeights(Weights):
    """Leaves the parameter values undefined, because a trace reads no values."""

    def fill(self, model: nn.Module) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


@dataclass
class _UnitTrace:
    """The records of one unit from one forward and backward of the model."""

    name: str
    is_block: bool
    repeats: list[str]
    """The names of all units that use this trace."""
    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    recomputed: list[Operation] = field(default_factory=list)
    kept: int = 0
    forward_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    backward_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    gradients: np.ndarray = field(default_factory=lambda: np.zeros(0))
    output_bytes: int = 0


@dataclass
class _Traced:
    """The traced units for every recomputation mode, and the sizes of the model."""

    microbatch: int
    modes: dict[Recompute, list[_UnitTrace]]
    parameters: list[tuple[Parameter, ...]]
    buffers: list[int]
    shared_buffers: int
    input_bytes: int
    uncuttable: str
    head: Workload


class _Tracing:
    """One trace: one tp size, one microbatch size, all recomputation modes."""

    def __init__(
        self, tracer: ModelTracer, world: World, tp: int, microbatch: int, sharded: bool
    ) -> None:
        self.tracer, self.world, self.tp = tracer, world, tp
        self.microbatch, self.sharded = microbatch, sharded
        self.recipe = tracer.recipe
        self.autocast = AUTOCAST.get(self.recipe.compute.precision)

    def run(self) -> _Traced:
        modes: dict[Recompute, list[_UnitTrace]] = {}
        template, task, repeats = self.tracer.template
        uncuttable, names = _unit_names(copy.deepcopy(template), self._example(template))
        supported: tuple[Recompute, ...] = ("none", "selective", "full")
        if not repeated_blocks(template):
            supported = ("none",)
        # With tp, the first run also executes operators that fill DTensor's caches. So the mode
        # "none" runs twice, and the second trace replaces the first.
        first: tuple[Recompute, ...] = ("none",) if self.tp > 1 else ()
        for mode in first + supported:
            model = self._copy()
            modes[mode] = self._run_once(model, task, names, repeats, mode)
        stored = copy.deepcopy(template)
        self._apply(stored, "none")
        parameters, buffers, shared = _parameters_of(stored, names, repeats)
        head = Workload(
            (),
            self.microbatch,
            self.tp,
            self.recipe.compute.precision,
            model=self.recipe.model,
            sharded=self.sharded,
            modes=supported,
        )
        inputs = (self._batch(self.tracer.inputs), self._batch(self.tracer.targets))
        size = sum(_storage_bytes(each) for each in tree_leaves(inputs) if isinstance(each, Tensor))
        of_units = [tuple(each) for each in parameters]
        return _Traced(self.microbatch, modes, of_units, buffers, shared, size, uncuttable, head)

    def _copy(self) -> nn.Module:
        """Return a copy of the template, with parameters in the dtype in which blocks compute."""
        model = copy.deepcopy(self.tracer.template[0])
        if self.sharded:
            for block in repeated_blocks(model):
                for parameter in block.parameters():
                    parameter.data = parameter.data.to(self.autocast)
        return model

    def _apply(self, model: nn.Module, mode: Recompute) -> bool:
        """Parallelize the model in place. Return whether sequence parallelism is used."""
        parallel = replace(self.recipe.parallel, layout=None)
        if self.recipe.task.loss != "cross_entropy":
            parallel = replace(parallel, loss_parallel=False)
        on_cuda = self.tracer.device == "cuda"
        if on_cuda and self.recipe.compute.compile and parallel.sequence_parallel:
            # async_tp only changes how the compiler overlaps operators on CUDA. The trace records
            # the same operators without it.
            parallel = replace(parallel, async_tp=False)
        mesh = Layout(tp=self.tp).mesh(replace(self.world, device=torch.device("cpu")))
        assert mesh.device_mesh is not None  # DTensor does not support the device type meta
        mesh.world = self.world
        example = self._example(model)
        techniques = Techniques(parallel, recompute=mode, autocast=self.autocast, example=example)
        techniques = check(model, mesh, techniques)
        apply(model, mesh, techniques, _NoWeights())
        return techniques.splits_sequence

    def _example(self, model: nn.Module) -> Nested:
        on_meta = map_tensors(lambda tensor: tensor.to("meta"), self.tracer.inputs)
        return as_model_dtype(on_meta, model)

    def _batch(self, value: Nested) -> Nested:
        def enlarge(tensor: Tensor) -> Tensor:
            shape = (self.microbatch, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return map_tensors(enlarge, value)

    def _run_once(
        self,
        model: nn.Module,
        task: Task,
        names: list[list[str]],
        repeats: dict[str, list[str]],
        mode: Recompute,
    ) -> list[_UnitTrace]:
        blocks = {id(block) for block in repeated_blocks(model)}
        units = []
        for unit in names:
            found = dict(model.named_modules())
            is_block = any(id(found.get(name)) in blocks for name in unit)
            copies = next((repeats[name] for name in unit if name in repeats), [unit[0]])
            units.append(_UnitTrace(unit[0], is_block, copies))
        self._apply(model, mode)
        inputs = as_model_dtype(self._batch(self.tracer.inputs), model)
        targets = as_loss_dtype(self._batch(self.tracer.targets), model)
        ledger = _Ledger(units, self.tracer.device, self.tracer.allocator)
        ledger.attach(model, names)
        autocast = self.autocast
        operators = DeviceOperators(self.tracer.device, autocast)
        try:
            with ledger, operators, loss_context(self.tp > 1):
                arguments = task.model_inputs(inputs, targets, model)
                ledger.begin()
                loss = task.loss_sums(ledger.counted(call_with(model, arguments)), targets)[0]
                loss = loss / 1.0
                with torch.no_grad():
                    seed = torch.ones_like(loss)
                ledger.end_forward()
                # Tensor.backward would disable the TorchFunctionMode `operators`, but the
                # recomputed forward needs it.
                _engine_run_backward(
                    (loss,),
                    (seed,),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
                del loss
                ledger.end()
        except UsageError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UsageError(
                f"--model {self.recipe.model} cannot be traced on meta tensors, which have no "
                f"values ({reason[:200]}): use a model whose forward does not depend on tensor "
                "values, or measure with tutti train --benchmark"
            ) from error
        return units


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Ledger(TorchDispatchMode):
    """Records every operator, memory allocation and memory release of one microbatch."""

    def __init__(self, units: list[_UnitTrace], device: DeviceKind, allocator: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units, self._device, self._allocator = units, device, allocator
        self._unit, self._backward = 0, False
        # Three lists with one entry per event (an allocation or a release). `_where` has the unit
        # index u in forward and −1 − u in backward, `_number` the number of the allocation, and
        # `_delta` the change in bytes.
        self._where: list[int] = []
        self._number: list[int] = []
        self._delta: list[int] = []
        self._alive: dict[int, tuple[int, Any]] = {}  # address of storage → number, weak reference
        self._sizes: list[int] = []
        self._owner: list[int] = []  # for each allocation, the unit that allocated it
        self._ignored: set[int] = set()
        self._accumulated: dict[int, int] = {}  # allocation → event at which it became a gradient
        self._forward_end = 0
        self._hooks: list[Any] = []
        self._keep: list[Any] = []

    def attach(self, model: nn.Module, names: list[list[str]]) -> None:
        """Register hooks that set the current unit. Operators are recorded in the current unit."""
        tensors = [*model.parameters(), *model.buffers()]
        self._keep = [_local(tensor).untyped_storage() for tensor in tensors]
        self._ignored = {storage._cdata for storage in self._keep}
        modules = dict(model.named_modules())
        for number, unit in enumerate(names):
            for name in unit:
                if (module := modules.get(name)) is not None:
                    hook = module.register_forward_pre_hook(
                        partial(self._enter, number), with_kwargs=True, prepend=True
                    )
                    self._hooks.append(hook)
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def begin(self) -> None:
        """Discard the events that were recorded before the forward pass."""
        self._where, self._number, self._delta = [], [], []

    def counted(self, outputs: Any) -> Any:
        """Record the bytes of the model's outputs, and return the outputs."""
        tensors = [_local(each) for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        self.units[-1].output_bytes = sum(each.numel() * each.element_size() for each in tensors)
        return outputs

    def end_forward(self) -> None:
        """Mark the end of forward and loss."""
        self._forward_end = len(self._where)
        self._backward = True

    def end(self) -> None:
        """Mark the end of backward, and compute the memory of the units."""
        for hook in self._hooks:
            hook.remove()
        _summarise(
            self.units,
            np.array(self._where, dtype=np.int64),
            np.array(self._number, dtype=np.int64),
            np.array(self._delta, dtype=np.float64),
            np.array(self._owner, dtype=np.int64),
            self._accumulated,
            self._forward_end,
        )
        self._alive.clear()

    def _enter(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._backward or unit == self._unit:
            return
        before, self._unit = self._unit, unit
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.is_floating_point():
                size = _local(value)
                self.units[before].output_bytes = size.numel() * size.element_size()
                if value.requires_grad:
                    # When the gradient of a unit's input is complete, the unit's backward has ended
                    # and the previous unit's backward begins.
                    value.register_hook(partial(self._leave_backward, before))  # type: ignore[no-untyped-call]
                return

    def _leave_backward(self, before: int, gradient: Tensor) -> None:
        self._unit = before

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            entry = self._alive.get(_local(parameter.grad).untyped_storage()._cdata)
            if entry is not None:
                self._accumulated.setdefault(entry[0], len(self._where))

    def _event(self, number: int, delta: int) -> None:
        self._where.append(-1 - self._unit if self._backward else self._unit)
        self._number.append(number)
        self._delta.append(delta)

    def _freed(self, address: int, _: Any) -> None:
        entry = self._alive.pop(address, None)
        if entry is not None:
            self._event(entry[0], -self._sizes[entry[0]])

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._alive or address in self._ignored or not storage.nbytes():
            return
        number = len(self._sizes)
        size = block_bytes(storage.nbytes()) if self._allocator else storage.nbytes()
        self._sizes.append(size)
        self._owner.append(self._unit)
        self._alive[address] = number, weakref.ref(storage, partial(self._freed, address))
        self._event(number, size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types):
            return NotImplemented  # so that the operators on the local tensors are recorded
        kwargs = kwargs or {}
        if func is _CONDITION and args[0].dtype == torch.bool:
            return True  # the model asks, for example, whether no sample is padded
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        fresh = False
        for each in outputs:
            storage = each.untyped_storage()
            address = storage._cdata
            if address not in self._alive and address not in self._ignored:
                self._allocate(storage)
                fresh = True
        name = _name_of(func)
        if self._device == "cuda" and (size := workspace_bytes(name, args, outputs)):
            number = len(self._sizes)
            self._sizes.append(size)
            self._owner.append(self._unit)
            self._event(number, size)
            self._event(number, -size)
        if (fresh or func._schema.is_mutable) and name not in _FREE:
            inputs = _tensors(args) + _tensors(kwargs.values())
            operation = _operation(func, name, args, kwargs, inputs, outputs, result)
            if operation is not None:
                self._record(operation)
        return result

    def _record(self, operation: Operation) -> None:
        unit = self.units[self._unit]
        if not self._backward:
            unit.forward.append(operation)
        elif torch.is_grad_enabled():  # only the recomputed forward enables gradients
            unit.recomputed.append(operation)
        else:
            unit.backward.append(operation)


_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "wait_tensor")
_CONDITION = torch.ops.aten._local_scalar_dense.default


@cache
def _name_of(operator: Any) -> str:
    name: str = operator._schema.name.partition("::")[2]
    return name


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in an argument or result, which may be nested tuples and lists."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, str | int | float | None):
        return []
    try:
        return [tensor for value in values for tensor in _tensors(value)]
    except TypeError:  # a dtype or a device
        return []


def _operation(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    result: Any,
) -> Operation | None:
    """Return the record of an operator, or None if the operator starts no kernel."""
    moved = float(sum(each.numel() * each.element_size() for each in (*inputs, *outputs)))
    floating = [each.dtype for each in (*outputs, *inputs) if each.is_floating_point()]
    dtype = _NAMES.get(floating[0], "float32") if floating else "float32"
    namespace = func._schema.name.partition("::")[0]
    if namespace in ("_c10d_functional", "c10d_functional", "_dtensor"):
        kind = _COLLECTIVES.get(name)
        if kind is None:
            return None
        # As in nccl-tests, the message size of an all_gather is the size of its output, and the
        # message size of a reduce_scatter is the size of its input.
        sized = inputs[0] if kind == "reduce_scatter" else outputs[0]
        size = float(sized.numel() * sized.element_size())
        return Operation(kind, "collective", dtype, 0.0, size, axis="tp")
    flops = 0.0
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        flops = float(formula(*args, **kwargs, out_val=result))
    shape: tuple[int, ...] = ()
    kind_of: OperationKind = "memory"
    if name in _MATMULS:
        kind_of = "matmul"
        left, right = (args[1], args[2]) if name in ("addmm", "baddbmm") else (args[0], args[1])
        batch = left.shape[0] if left.dim() == 3 else 1
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
    elif "convolution" in name:
        kind_of = "convolution"
    elif "scaled_dot_product" in name or "flash_attention" in name:
        kind_of = "attention"
        first = 1 if name.endswith("backward") else 0
        query, key = args[first], args[first + 1]
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.shape[3])
    return Operation(name, kind_of, dtype, flops, moved, shape)


def _summarise(
    units: list[_UnitTrace],
    where: np.ndarray,
    number: np.ndarray,
    delta: np.ndarray,
    owner: np.ndarray,
    accumulated: Mapping[int, int],
    forward_end: int,
) -> None:
    """Set the memory fields of every unit from the recorded events."""
    events = len(where)
    count = len(units)
    # Bytes that are allocated in forward and still alive at its end are kept for backward.
    at_end = np.zeros(len(owner))
    np.add.at(at_end, number[:forward_end], delta[:forward_end])
    kept = np.zeros(count)
    np.add.at(kept, owner, at_end)
    earlier = np.concatenate(([0.0], np.cumsum(kept)))[:count]
    # Before a gradient is complete, its bytes count as temporary results. After this event, they
    # count as gradients.
    is_gradient = np.zeros(len(owner), dtype=bool)
    is_gradient[list(accumulated)] = True
    complete_at = np.full(len(owner), events + 1)
    for allocation, event in accumulated.items():
        complete_at[allocation] = event
    without = np.where(is_gradient[number] & (np.arange(events) >= complete_at[number]), 0.0, delta)
    complete = np.zeros(events + 1)
    sizes = np.zeros(len(owner))
    positive = delta > 0
    sizes[number[positive]] = delta[positive]
    for allocation, event in accumulated.items():
        complete[event:] += sizes[allocation]
    live = np.cumsum(without) - complete[:events]
    for index, unit in enumerate(units):
        unit.kept = int(kept[index])
        forward = live[:forward_end][where[:forward_end] == index]
        unit.forward_bytes = forward - earlier[index]
        chosen = np.flatnonzero(where == -1 - index)
        unit.backward_bytes = live[chosen] - earlier[index]
        before = complete[chosen[0]] if len(chosen) else 0.0
        unit.gradients = complete[chosen] - before


# -- units -----------------------------------------------------------------------------------------


def _unit_names(model: nn.Module, example: Nested) -> tuple[str, list[list[str]]]:
    """Return the reason why the model cannot be cut into stages (or `""`), and the units.

    A unit is a list of module names.
    """
    try:
        sequential = isinstance(model, nn.Sequential)
        if sequential or getattr(model, "cuttable", False):
            return "", layer_units(model)
        if not isinstance(example, Tensor):
            raise UsageError("the batch has several input tensors, but a pipeline needs one tensor")
        flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
        training = {module: module.training for module in model.modules()}
        try:
            names = find_units(model, example).names
        finally:
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)
            for module, mode in training.items():
                module.training = mode
        return "", names
    except UsageError as error:
        return str(error), _block_units(model)


def _block_units(model: nn.Module) -> list[list[str]]:
    """Return the units of a model that cannot be cut into stages.

    The units are the blocks, the layers before the blocks, and the layers after the blocks.
    """
    blocks = {id(block) for block in repeated_blocks(model)}
    names: list[list[str]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for each in names for unit in each)
        own = next(module.parameters(recurse=False), None) is not None
        if id(module) in blocks:
            names.append([name])
        elif own and not inside:
            if names and not any(_is_block(model, each, blocks) for each in names[-1:]):
                names[-1].append(name)
            else:
                names.append([name])
    return names or [[""]]


def _is_block(model: nn.Module, names: Sequence[str], blocks: set[int]) -> bool:
    return any(id(model.get_submodule(name)) in blocks for name in names)


def shorten_model(model: nn.Module) -> dict[str, list[str]]:
    """Shorten each sequence of equal blocks to `_KEPT_BLOCKS` blocks, in place.

    Returns {name of a remaining middle block: names of all blocks that use its trace}.
    """
    blocks = {id(block) for block in repeated_blocks(model)}
    repeats: dict[str, list[str]] = {}
    for path, container in list(model.named_modules()):
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        children = [(key, child) for key, child in container.named_children()]
        if not children or not all(id(child) in blocks for _, child in children):
            continue
        kinds = [_kind(child) for _, child in children]
        kept: list[tuple[str, nn.Module]] = []
        middles: list[tuple[int, list[str]]] = []  # position in `kept`, block names
        start = 0
        while start < len(children):
            end = start
            while end < len(children) and kinds[end] == kinds[start]:
                end += 1
            run = children[start:end]
            if len(run) > _KEPT_BLOCKS:
                names = [f"{path}.{key}" if path else key for key, _ in run[1:-1]]
                middles.append((len(kept) + 1, names))
                run = [run[0], run[1], run[-1]]
            kept += run
            start = end
        if len(kept) == len(children):
            continue
        renumbers = not isinstance(container, nn.ModuleDict)
        container._modules = {
            str(index) if renumbers else key: child for index, (key, child) in enumerate(kept)
        }
        for position, names in middles:
            key = list(container._modules)[position]
            repeats[f"{path}.{key}" if path else key] = names
    return repeats


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return the properties that determine a block's operators. Equal blocks have equal values."""
    values = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and key not in ("layer_idx", "training")
    ]
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()]
    return repr(block), tuple(values), tuple(shapes)


def _parameters_of(
    model: nn.Module, names: list[list[str]], repeats: dict[str, list[str]]
) -> tuple[list[list[Parameter]], list[int], int]:
    """Return the parameters and buffer bytes of each unit, and the bytes of other buffers."""
    parameters: list[list[Parameter]] = [[] for _ in names]
    buffers = [0] * len(names)
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = _owner_of(name, names) or 0
        local = _local(parameter.data)
        sharing = first_name.setdefault(id(parameter), name)
        parameters[owner].append(
            Parameter(
                name,
                local.numel(),
                local.element_size(),
                parameter.requires_grad,
                local.shape[0] if local.dim() else 1,
                "" if sharing == name else sharing,
            )
        )
    shared = 0
    for name, buffer in model.named_buffers():
        found = _owner_of(name, names)
        size = block_bytes(buffer.numel() * buffer.element_size())
        if found is None:
            shared += size
        else:
            buffers[found] += size
    return parameters, buffers, shared


def _owner_of(name: str, units: Sequence[Sequence[str]]) -> int | None:
    for index, unit in enumerate(units):
        if any(name == part or name.startswith(f"{part}.") for part in unit):
            return index
    return None


# -- from traces to workloads ----------------------------------------------------------------------


def _workload(first: _Traced, second: _Traced, microbatch: int) -> Workload:
    """Return the workload of a microbatch size, interpolated from traces of two sizes."""
    span = second.microbatch - first.microbatch
    factor = (microbatch - first.microbatch) / span if span else 0.0

    def scale(low: float, high: float) -> float:
        return low + (high - low) * factor

    units: list[Unit] = []
    for index, low in enumerate(first.modes["none"]):
        high = second.modes["none"][index]
        memory = {
            mode: _memory(traces[index], second.modes[mode][index], scale)
            for mode, traces in first.modes.items()
        }
        recomputed: dict[Recompute, tuple[Operation, ...]] = {
            mode: _operations(traces[index].recomputed, second.modes[mode][index].recomputed, scale)
            for mode, traces in first.modes.items()
        }
        traced = Unit(
            low.name,
            _operations(low.forward, high.forward, scale),
            _operations(low.backward, high.backward, scale),
            recomputed,
            (),
            memory,
            round(scale(low.output_bytes, high.output_bytes)),
            low.is_block,
        )
        traced = replace(
            traced,
            parameters=first.parameters[index],
            buffer_bytes=first.buffers[index],
        )
        for name in low.repeats:
            units.append(traced if name == low.name else _renamed(traced, name))
    flops = sum(each.flops for unit in units for each in (*unit.forward, *unit.backward))
    return replace(
        first.head,
        units=tuple(units),
        microbatch=microbatch,
        input_bytes=round(scale(first.input_bytes, second.input_bytes)),
        model_flops=flops * first.head.tp,
        shared_buffer_bytes=first.shared_buffers,
        uncuttable=first.uncuttable,
    )


def _renamed(unit: Unit, name: str) -> Unit:
    parameters = [
        replace(each, name=name + each.name.removeprefix(unit.name)) for each in unit.parameters
    ]
    return replace(unit, name=name, parameters=tuple(parameters))


def _operations(
    low: Sequence[Operation], high: Sequence[Operation], scale: Callable[[float, float], float]
) -> tuple[Operation, ...]:
    if len(low) != len(high):
        return tuple(low)
    return tuple(
        replace(
            a,
            flops=scale(a.flops, b.flops),
            bytes=scale(a.bytes, b.bytes),
            shape=tuple(round(scale(*sizes)) for sizes in zip(a.shape, b.shape, strict=True)),
        )
        for a, b in zip(low, high, strict=True)
    )


def _memory(
    low: _UnitTrace, high: _UnitTrace, scale: Callable[[float, float], float]
) -> ActivationMemory:
    def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if len(a) == len(b):
            return np.array(scale(a, b))  # type: ignore[arg-type]
        return np.array([scale(a.max(initial=0.0), b.max(initial=0.0))])

    forward = combine(low.forward_bytes, high.forward_bytes)
    backward = combine(low.backward_bytes, high.backward_bytes)
    gradients = low.gradients if len(low.gradients) == len(backward) else np.zeros(len(backward))
    return ActivationMemory(
        round(scale(low.kept, high.kept)),
        math.ceil(forward.max(initial=0.0)),
        _peaks(backward, gradients),
    )


def _peaks(live: np.ndarray, gradients: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the points that can be the peak of a unit's backward, at most `_POINTS`.

    A point can be the peak unless another point has at least as many live bytes and at least as
    many bytes of gradients.
    """
    order = np.lexsort((-gradients, -live))
    front: list[tuple[int, int]] = []
    most = -1.0
    for index in order:
        if gradients[index] > most:
            most = gradients[index]
            front.append((math.ceil(live[index]), int(most)))
    if len(front) > _POINTS:
        # Keep the first and the last point, and the points with the largest sums.
        sums = sorted(front[1:-1], key=lambda point: -sum(point))[: _POINTS - 2]
        front = [front[0], *[point for point in front[1:-1] if point in sums], front[-1]]
    return tuple(front) or ((0, 0),)
