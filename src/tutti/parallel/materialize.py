"""Builds a model on the meta device, and allocates and fills its weights after parallelization.

    build_on_meta(make, seed)     creates parameters on the meta device, which has no memory
    apply.py                      cuts into stages, splits and shards the model, still on meta
    materialize(model, device)    allocates memory for this rank's shards
    weights.fill(model)           for one module at a time: initialises the whole module on the
                                  host, copies this rank's shards of the module, frees the module

Therefore a rank never holds more than its shards and one whole module. The seed of a module is
derived from the run's seed and the module's name, so the weights do not depend on the layout.

If the model has the method `init_module`, `model.init_module(name, module)` initialises a module.
Otherwise the module's `reset_parameters()` does. Weights that a constructor sets in another way
(pretrained weights, `nn.Parameter(torch.randn(…))`, a custom init loop) cannot be reproduced one
module at a time. In this case, every rank builds the whole model in host memory and copies its
shards from there.

`SavedWeights` reads the weights of a checkpoint from safetensors files. Each rank reads only the
slices that it needs, one tensor at a time.
"""

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from tutti.models.lora_layers import MATRICES, adapted_layers, adapter_layer, without_adapters
from tutti.parallel.layout import AXES
from tutti.parallel.mesh import Box, Mesh, local_shard, replicated_axes, shard_and_box
from tutti.parallel.rng import mixed_seed
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.exchange import gather_json, hash_tensor

_RESETS = ("reset_parameters", "_reset_parameters")
_IN_PLACE_OPERATORS = tuple(
    f"__i{name}__"
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
)


class Weights(ABC):
    """The initial weights of a model that was built on the meta device."""

    @abstractmethod
    def fill(self, model: nn.Module) -> None:
        """Write the initial values into every materialised parameter and buffer of the model.

        `model` may be a part of the whole model. Its modules have the names of the whole model.
        """

    def release(self) -> None:
        """Free memory that is no longer needed after all weights are filled."""
        return


class ModuleInit(Weights):
    """Weights that are initialised for each module separately, with one seed per module."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """`model` is the whole model on the meta device, with the dtypes of its constructor."""
        self._seed = seed
        # Values are drawn in the constructor's dtypes, so that runs in float64 and in float32 start
        # with equal weights.
        self._dtypes = {
            name: tensor.dtype
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
            if tensor.is_meta
        }

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        init_module = getattr(model, "init_module", None)
        filled: set[int] = set()
        with torch.random.fork_rng(devices=[]):
            for name, module in model.named_modules():
                targets, values = {}, {}
                for key, tensor in _own_tensors(module):
                    if dtype := self._dtypes.get(f"{name}.{key}".removeprefix(".")):
                        targets[key] = tensor
                        values[key] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
                new = [key for key, tensor in targets.items() if id(tensor) not in filled]
                if not new:
                    continue  # no tensors, or only tied tensors that are already filled
                torch.default_generator.manual_seed(mixed_seed("weights", self._seed, name))
                with _replaced(module, values):
                    if init_module is not None:
                        init_module(name, module)
                    else:
                        _reset_of(module)()
                for key in new:
                    copy_shard(values[key], targets[key])
                    filled.add(id(targets[key]))


class CopiedWeights(Weights):
    """The existing weights of a model. `take_weights` has moved them out of the model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            copy_shard(self._tensors[name], parameter)

    def release(self) -> None:
        self._tensors.clear()


class FileChunk(NamedTuple):
    """A rectangular part of a tensor, and the safetensors file and key that contain its bytes."""

    file: Path
    key: str
    box: Box


TensorSources = Mapping[str, Sequence[FileChunk] | Callable[[], Tensor]]
"""Maps the name of each parameter or buffer to its chunks in files. If the files contain the tensor
in a different form, the name is mapped to a function that returns the whole tensor."""


class SavedWeights(Weights):
    """Weights in safetensors files. Each rank reads only the slices of its shards."""

    def __init__(self, sources: TensorSources, others: Weights | None = None) -> None:
        """`others` initialises the tensors that are not in the files, for example buffers."""
        self._sources = sources
        self._others = others

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        if self._others is not None:
            self._others.fill(model)
        tensors = [
            (tensor, self._sources[name])
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named()
            if name in self._sources
        ]
        read_shards((tensor, source) for tensor, source in tensors if not callable(source))
        for tensor, source in tensors:
            if callable(source):
                copy_shard(source(), tensor)

    def release(self) -> None:
        if self._others is not None:
            self._others.release()


class AdapterWeights(Weights):
    """Weights of a model with LoRA adapters. `base` fills the frozen layers.

    lora_A is initialised like a linear layer, with one seed per layer. lora_B is 0. If there are
    adapter files, their values are used instead.
    """

    def __init__(self, base: Weights, seed: int, sources: TensorSources | None = None) -> None:
        """`sources` maps names such as `layers.0.q_proj.lora_A` to chunks in files."""
        self._base = base
        self._seed = seed
        self._sources = sources or {}

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        with without_adapters(model):
            self._base.fill(model)
        saved = []
        with torch.random.fork_rng(devices=[]):
            for name, layer in adapted_layers(model):
                for matrix in MATRICES:
                    weight = adapter_layer(layer, matrix).weight
                    if source := self._sources.get(f"{name}.{matrix}"):
                        saved.append((weight, source))
                        continue
                    whole = torch.zeros(weight.shape, device="cpu")
                    if matrix == "lora_A":
                        seed = mixed_seed("weights", self._seed, f"{name}.{matrix}")
                        torch.default_generator.manual_seed(seed)
                        nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
                    copy_shard(whole, weight)
        read_shards((weight, source) for weight, source in saved if not callable(source))

    def release(self) -> None:
        self._base.release()


# After this many bytes have been read, the files are closed, to release their mapped pages.
_MAX_MAPPED_BYTES = 64 << 20


@torch.no_grad()
def read_shards(
    targets: Iterable[tuple[Tensor, Sequence[FileChunk]]],
    open_file: Callable[[Path], Any] = lambda path: safe_open(path, framework="pt"),
) -> None:
    """Read this rank's shard of each target tensor from the chunks that intersect the shard."""
    files: dict[Path, Any] = {}
    mapped_bytes = 0
    for tensor, chunks in targets:
        local, box = shard_and_box(tensor)
        for chunk in chunks if local.numel() else ():
            spans = [
                (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*chunk.box, *box, strict=True)
            ]
            if any(start >= end for start, end in spans):
                continue
            if mapped_bytes > _MAX_MAPPED_BYTES:
                files, mapped_bytes = {}, 0
            if chunk.file not in files:
                files[chunk.file] = open_file(chunk.file)
            source = files[chunk.file].get_slice(chunk.key)[_slices(spans, chunk.box)]
            local[_slices(spans, box)].copy_(source)
            mapped_bytes += source.nbytes


def _slices(spans: list[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    """Convert spans (positions in the full tensor) to slices of the data in `box`."""
    pairs = zip(spans, box.offsets, strict=True)
    return tuple(slice(start - offset, end - offset) for (start, end), offset in pairs)


def build_on_meta(
    make: Callable[[], nn.Module], seed: int
) -> tuple[nn.Module, Weights, str | None]:
    """Build a model with its parameters on the meta device, and its buffers on the CPU.

    Returns the model, its weights and a note. If every rank has to build the whole model, the note
    gives the reason. Otherwise the note is None.
    """
    torch.manual_seed(seed)
    reason: str | None
    try:
        with warnings.catch_warnings(), _MetaConstruction() as construction:
            warnings.simplefilter("ignore")  # for example "loading into meta parameters is a no-op"
            model = make()
        reason = construction.cannot_reproduce(model)
    except UsageError:
        raise
    except Exception as error:
        # The constructor may read values of parameters, but meta tensors have no values. If the
        # error has a different cause, the second call of `make` raises it again.
        reason = f"its constructor does not work on the meta device ({type(error).__name__})"
    else:
        _refuse_lazy(model)
        if hasattr(model, "init_module"):
            reason = None
            if not all(parameter.is_meta for parameter in model.parameters()):
                with torch.device("meta"):
                    model = make()
        if reason is None:
            return model, ModuleInit(model, seed), None
    torch.manual_seed(seed)
    model = make()
    _refuse_lazy(model)
    weights = take_weights(model)
    return model, weights, f"every rank first builds the whole model in host memory: {reason}"


def build_with_buffers(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with its parameters on meta, and with real buffers from its constructor."""
    hook = register_module_parameter_registration_hook(_move_to_meta)
    try:
        return make()
    finally:
        hook.remove()


def take_weights(model: nn.Module) -> CopiedWeights:
    """Move the parameters out of a model, in place. Afterwards the model is on meta."""
    named = model.named_parameters(remove_duplicate=False)
    tensors = {name: parameter.detach() for name, parameter in named}
    parameters = list(model.parameters())  # keeps tensors alive, so that ids stay unique
    _replace(model, {id(p): _parameter_like(p, p.detach().to("meta")) for p in parameters})
    return CopiedWeights(tensors)


def is_on_meta(model: nn.Module) -> bool:
    """Return whether all parameters are on meta. Raise UsageError if only some of them are."""
    on_meta = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if len(set(on_meta.values())) > 1:
        name = next(name for name, is_meta in on_meta.items() if is_meta)
        raise UsageError(
            f"parameter {name} is on the meta device, but other parameters are not: build either "
            "the whole model under torch.device('meta'), or nothing"
        )
    return any(on_meta.values())


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for this rank's shard of every meta parameter and buffer, in place.

    The values are undefined afterwards. `Module.to_empty` is not used, because it would untie tied
    parameters.
    """
    replacements: dict[int, Tensor] = {}
    tensors = [*model.parameters(), *model.buffers()]  # kept alive, so that ids stay unique
    for tensor in tensors:
        if tensor.is_meta:
            memory = torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            replacements[id(tensor)] = _parameter_like(tensor, memory) if is_parameter else memory
    _replace(model, replacements)
    # This moves the buffers that were not on meta. It also makes FSDP record and pad the new
    # shards.
    model.to(device)


@torch.no_grad()
def copy_shard(whole: Tensor, target: Tensor) -> None:
    """Copy this rank's shard of a whole tensor into a parameter or buffer."""
    local, box = shard_and_box(target)
    if local.numel() == 0:
        return
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, start, size)
    local.copy_(whole)


def check_replicas_equal(model: nn.Module, mesh: Mesh) -> None:
    """Raise RanksDiffer if replicas of a parameter differ. Call this function on every rank.

    Ranks that hold the same parameter or the same shard compare hashes. No parameter is gathered.
    """
    hashes: dict[str, dict[str, str]] = {}  # {replicated axes: {parameter: hash of its values}}
    for name, tensor in model.named_parameters():
        axes = " ".join(replicated_axes(tensor, mesh))
        hashes.setdefault(axes, {})[name] = str(hash_tensor(local_shard(tensor)))
    # Each set of parameters with the same replicated axes has one combined hash, to keep the
    # exchange small. The hashes of single parameters are exchanged only if combined hashes differ.
    reports = gather_json({axes: mixed_seed(values) for axes, values in hashes.items()})
    differing = [
        (axes, group[0], rank)
        for axes in sorted({axes for report in reports for axes in report})
        for group in _replica_groups(mesh, axes.split())
        for rank in group
        if reports[rank].get(axes) != reports[group[0]].get(axes)
    ]
    if not differing:
        return
    axes, first, rank = differing[0]
    details = gather_json([mesh.world.host, hashes])
    host, found = details[rank][0], details[rank][1].get(axes, {})
    expected = details[first][1].get(axes, {})
    names = [name for name, value in expected.items() if found.get(name) != value]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise RanksDiffer(
        f"the parameters of rank {rank} on {host} differ from the replicas on rank {first} in "
        f"{', '.join(names[:3])}{more}: set the same seed on every rank before the model is built"
    )


def _replica_groups(mesh: Mesh, axes: list[str]) -> list[list[int]]:
    """Return the groups of ranks that differ only on these axes."""
    dims = [AXES.index(axis) for axis in axes]
    other_dims = [dim for dim in range(len(AXES)) if dim not in dims]
    size = math.prod(mesh.ranks.shape[dim] for dim in dims)
    groups: list[list[int]] = mesh.ranks.permute(*other_dims, *dims).reshape(-1, size).tolist()
    return groups


class _MetaConstruction(TorchFunctionMode):
    """Context in which parameters move to meta as soon as a module registers them.

    Records which tensors are written in place, and whether a `reset_parameters()` writes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written_by_reset: set[int] = set()  # storages written by a reset_parameters()
        self._written_elsewhere: set[int] = set()  # storages written by any other code
        self._keep: list[Any] = []  # keeps tensors alive, so that storage ids stay unique

    def __enter__(self) -> "_MetaConstruction":
        self._hook = register_module_parameter_registration_hook(_move_to_meta)
        self._previous_profile = sys.getprofile()
        sys.setprofile(self._observe_call)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        sys.setprofile(self._previous_profile)
        self._hook.remove()

    def _observe_call(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record calls of torch.nn.init, because some of its functions ignore meta tensors."""
        code = frame.f_code
        if event == "call" and code.co_filename == nn.init.__file__ and code.co_name.endswith("_"):
            self._record(frame.f_locals.get("tensor"), frame)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._record(kwargs.get("out"), sys._getframe(1))
        if _is_in_place(func):
            self._record(args[0] if args else kwargs.get("tensor"), sys._getframe(1))
        return func(*args, **kwargs)

    def _record(self, target: Any, frame: FrameType | None) -> None:
        if not (isinstance(target, Tensor) and target.is_meta):
            return
        self._keep.append(target)
        storage = target.untyped_storage()._cdata
        while frame is not None and frame.f_code.co_name not in _RESETS:
            frame = frame.f_back
        module = None if frame is None else frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            self._written_by_reset.add(storage)
            if storage in [tensor.untyped_storage()._cdata for _, tensor in _own_tensors(module)]:
                return
        self._written_elsewhere.add(storage)

    def cannot_reproduce(self, model: nn.Module) -> str | None:
        """Return why weights cannot be initialised one module at a time, or None if they can."""
        for name, module in model.named_modules():
            for key, tensor in _own_tensors(module):
                full_name = f"{name}.{key}".removeprefix(".")
                if not tensor.is_meta:
                    if isinstance(tensor, nn.Parameter):
                        kind = type(tensor).__name__
                        return f"{full_name}, a {kind}, could not be moved to the meta device"
                    continue  # a buffer that the constructor computed on the CPU
                storage = tensor.untyped_storage()._cdata
                if storage in self._written_elsewhere:
                    return f"{full_name} is set outside of its module's reset_parameters()"
                if storage not in self._written_by_reset:
                    return f"{full_name} is not set by a reset_parameters()"
        return None


def _move_to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
    if type(parameter) is not nn.Parameter or parameter.is_meta:
        return parameter  # a meta parameter must stay the same object, because it may be tied
    return _parameter_like(parameter, parameter.detach().to("meta"))


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__set__":  # a property is set; only `tensor.data = …` writes values
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE_OPERATORS
    return name.endswith("_") and name not in ("requires_grad_", "detach_")


def _reset_of(module: nn.Module) -> Callable[[], None]:
    for name in _RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    raise UsageError(
        f"{type(module).__name__} on the meta device cannot be initialised: add a method "
        "reset_parameters() to it, or build the model with real weights"
    )


@contextmanager
def _replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Context manager: `tensors` replace the module's own parameters and buffers."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for key, tensor in tensors.items():
        if parameters.get(key) is not None:
            module._parameters[key] = nn.Parameter(tensor, tensor.is_floating_point())
        else:
            module._buffers[key] = tensor
    try:
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _replace(model: nn.Module, replacements: dict[int, Any]) -> None:
    """Replace each parameter and buffer whose id is a key of `replacements`."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                tensors[key] = replacements.get(id(tensor), tensor)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of the module itself, without its children."""
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(key, tensor) for key, tensor in both if tensor is not None]


def _parameter_like(parameter: Tensor, data: Tensor) -> nn.Parameter:
    result = nn.Parameter(data, parameter.requires_grad)
    result.__dict__.update(parameter.__dict__)
    return result


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(
                f"{name} belongs to a lazy module, whose size is unknown before the first forward: "
                "set its sizes, or run one forward in the function that makes the model"
            )
