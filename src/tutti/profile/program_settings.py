"""Reads the DDP, FSDP2 and DataLoader settings of a running program, and changes them for a trial.

This file imports only torch and the standard library, because `tutti profile -- COMMAND` loads the
file into programs whose environment may not have tutti.
"""

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree
from torch.utils.data import DataLoader

# `other_buckets` in the settings lists the buckets that DDP would make for each of these values of
# bucket_cap_mb. If several values give the same buckets, only the smallest value is listed.
_BUCKET_SIZES = (0.1, 0.5, 1, 2, 5, 10, 25, 50, 100, 200)
_MIB = 1 << 20  # DDP's bucket_cap_mb counts MiB
_MAX_LOADS = 256  # maximum number of measured data loader calls
_SITE = "_tutti_constructed_at"
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_c10d: Any = dist  # torch declares no types for some functions


def watch_constructors(changes: dict[str, Any]) -> None:
    """Record where the program constructs DDP and DataLoader, and apply `changes` for a trial.

    `changes` may have the keys `ddp` and `loader` (constructor arguments), `loader_at` (FILE:LINE
    of the only constructor call to which `loader` applies), `no_sync` (the number of backward
    passes per step; only the last pass communicates), and `fsdp` (`reshard_after_forward` or
    `forward_prefetch`).
    """
    _wrap_constructor(DistributedDataParallel, changes.get("ddp", {}), None)
    _wrap_constructor(DataLoader, changes.get("loader", {}), changes.get("loader_at"))
    create_iterator = DataLoader._get_iterator

    def created(loader: Any) -> Any:
        iterator = create_iterator(loader)
        # LoaderTimes receives only the iterator, not the loader.
        iterator.__dict__[_SITE] = loader.__dict__.get(_SITE)
        return iterator

    loader_class: Any = DataLoader
    loader_class._get_iterator = created
    if passes := changes.get("no_sync"):
        _synchronize_last_pass_only(passes)
    if fsdp := changes.get("fsdp"):
        _change_fsdp_after_first_step(fsdp)


def _wrap_constructor(kind: Any, arguments: dict[str, Any], only_at: str | None) -> None:
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(instance: Any, *positional: Any, **named: Any) -> None:
        site = _calling_site()
        if only_at in (None, site):
            names = construct.__code__.co_varnames[1 : construct.__code__.co_argcount]
            given = dict(zip(names, positional, strict=False)) | named
            positional, named = (), given | arguments
        construct(instance, *positional, **named)
        # The value is written to __dict__, because DataLoader and nn.Module restrict __setattr__.
        instance.__dict__.setdefault(_SITE, site)

    kind.__init__ = constructed


def _calling_site() -> str | None:
    """Return FILE:LINE of the innermost frame outside of torch and of this file, or None."""
    frame = sys._getframe(2)
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        if file != os.path.abspath(__file__) and not file.startswith(_TORCH + os.sep):
            inside = os.path.relpath(file)
            return f"{file if inside.startswith('..') else inside}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _synchronize_last_pass_only(passes: int) -> None:
    """Make DDP communicate only in the last of the `passes` backward passes of a step.

    Passes are counted in DDP's forward. An optimizer step resets the count.
    """
    ddp_class: Any = DistributedDataParallel
    forward, calls = ddp_class.forward, [0]

    def reset(*_: object) -> None:
        calls[0] = 0

    @functools.wraps(forward)
    def counted(ddp: Any, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(ddp, *inputs, **named)
        calls[0] += 1
        ddp.require_backward_grad_sync = calls[0] % passes == 0
        try:  # the flag is read in forward and determines whether backward communicates
            return forward(ddp, *inputs, **named)
        finally:
            ddp.require_backward_grad_sync = True

    ddp_class.forward = counted
    register_optimizer_step_post_hook(reset)


def _change_fsdp_after_first_step(settings: dict[str, Any]) -> None:
    changed = False

    def change(*_: object) -> None:
        nonlocal changed
        if changed:
            return
        changed = True  # the hook stays: torch must not lose a hook while it calls them
        modules = _fsdp_modules()
        for number, module in enumerate(modules):
            if "reshard_after_forward" in settings:
                module.set_reshard_after_forward(settings["reshard_after_forward"])
            if settings.get("forward_prefetch"):
                module.set_modules_to_forward_prefetch(modules[number + 1 : number + 2])

    register_optimizer_step_post_hook(change)


def read_settings(loads: "LoaderTimes") -> dict[str, Any]:
    """Return the program's settings, for the advice. Called before the recording."""
    settings: dict[str, Any] = {"ddp": [], "fsdp": [], "loader": loads.settings()}
    if not (dist.is_available() and dist.is_initialized()):
        return settings
    # torch has no stable interface for some of these settings.
    with contextlib.suppress(Exception):
        settings["ddp"] = [_ddp_settings(ddp) for ddp in _instances(DistributedDataParallel)]
    with contextlib.suppress(Exception):
        settings["fsdp"] = [unit for module in _fsdp_modules() for unit in _fsdp_units(module)]
    return settings


def _instances(kind: type) -> list[Any]:
    # isinstance would read `__class__` of the program's objects, and this may have side effects.
    return [instance for instance in gc.get_objects() if issubclass(type(instance), kind)]


def _ddp_settings(ddp: Any) -> dict[str, Any]:
    logged = ddp._get_ddp_logging_data()
    seen: set[int] = set()
    parameters = []
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            if id(parameter) not in seen:
                parameters.append(parameter)
            seen.add(id(parameter))
    finds_unused = bool(logged["find_unused_parameters"])
    rebuilt = logged.get("rebuilt_per_bucket_param_indices", "")
    present = [list(map(int, bucket.split())) for bucket in rebuilt.split(",") if bucket.strip()]
    order = list(
        map(int, filter(None, logged.get("prev_iteration_grad_ready_order_indices", "").split(",")))
    )
    if sorted(order) != list(range(len(parameters))):
        order = [index for bucket in present for index in bucket]
    cap = ddp.bucket_bytes_cap
    limits = (_c10d._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else cap, cap)
    plans: dict[str, list[list[int]]] = {}
    has_one_cap = not getattr(ddp, "bucket_bytes_cap_list", None)  # torch 2.13 also allows a list
    if has_one_cap and sorted(order) == list(range(len(parameters))):

        def buckets(first: int, size: int) -> list[list[int]]:
            if rebuilt or not finds_unused:
                # DDP rebuilds the buckets in the order in which gradients became ready.
                tensors = [parameters[index] for index in order]
                found, _ = _c10d._compute_bucket_assignment_by_size(
                    tensors, [first, size], [False] * len(order), order
                )
                return [list(map(int, bucket)) for bucket in found]
            # With find_unused_parameters, DDP keeps the buckets that the constructor assigned.
            first_and_size = [first, size] if first < size else [size]
            found, _ = _c10d._compute_bucket_assignment_by_size(
                parameters, first_and_size, [False] * len(parameters)
            )
            return [list(map(int, bucket)) for bucket in reversed(found)]

        present = buckets(*limits)
        different: dict[Any, float] = {}
        total = sum(p.numel() * p.element_size() for p in parameters)
        for size in sorted({*_BUCKET_SIZES, float(-(-total // _MIB))}):
            plan = buckets(int(size * _MIB), int(size * _MIB))
            different.setdefault(tuple(map(tuple, plan)), size)
        different.pop(tuple(map(tuple, present)), None)
        plans = {f"{size:g}": list(map(list, plan)) for plan, size in different.items()}
    return {
        "constructed_at": ddp.__dict__.get(_SITE),
        "bytes": [p.numel() * p.element_size() for p in parameters],
        "ready_order": order,
        "bucket_cap_mb": limits[1] / _MIB,
        "buckets": present,
        "other_buckets": plans,
        "find_unused_parameters": finds_unused,
        "has_unused": bool(logged.get("unused_parameter_size", 0)),
        "gradient_as_bucket_view": bool(logged["gradient_as_bucket_view"]),
        "static_graph": bool(ddp.static_graph),
    }


def _fsdp_modules() -> list[Any]:
    """Return the FSDP2 modules in the registration order of the root module."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    found = _instances(kind) if kind is not None else []
    roots = [module for module in found if module._get_fsdp_state()._is_root]
    return [child for root in roots for child in root.modules() if isinstance(child, kind)]


def _fsdp_units(module: Any) -> Iterable[dict[str, Any]]:
    state = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        yield {
            "name": group._module_fqn or "",
            "bytes": sum(p._orig_size.numel() * p.orig_dtype.itemsize for p in group.fsdp_params),
            "reshard_after_forward": bool(group._reshard_after_forward),
            "forward_prefetch": bool(state._states_to_forward_prefetch),
        }


class LoaderTimes:
    """Measures how long the training loop waits for its data loader, without the profiler.

    `next_batch` is called in place of the iterator's `__next__`. Only the first loader that the
    program uses is measured.
    """

    def __init__(self) -> None:
        self._sampler: Any = None
        self._iterator: dict[str, Any] = {}
        self._waited: list[float] = []
        self._cpu: list[float] = []
        self._starved: list[bool] = []
        self._process_cpu: list[float] = []
        self._batch_bytes = 0
        self._active = True

    def next_batch(self, original: Callable[..., Any], iterator: Any, *arguments: Any) -> Any:
        sampler = getattr(iterator, "_index_sampler", None)
        is_other = sampler is None or (self._sampler is not None and self._sampler is not sampler)
        if not self._active or is_other or len(self._waited) >= _MAX_LOADS:
            return original(iterator, *arguments)
        starved = False
        with contextlib.suppress(Exception):  # the attributes depend on the torch version
            starved = self._is_starved(iterator)
        began, cpu = time.perf_counter(), time.thread_time()
        batch = original(iterator, *arguments)
        self._waited.append(time.perf_counter() - began)
        self._cpu.append(time.thread_time() - cpu)
        self._starved.append(starved)
        self._process_cpu.append(time.process_time())
        if self._sampler is None:
            self._sampler = sampler
            self._iterator = {
                "workers": int(getattr(iterator, "_num_workers", 0)),
                "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
                "constructed_at": iterator.__dict__.get(_SITE),
            }
            tensors = filter(torch.is_tensor, _pytree.tree_leaves(batch))
            self._batch_bytes = sum(t.numel() * t.element_size() for t in tensors)
        return batch

    def _is_starved(self, iterator: Any) -> bool:
        """Return whether the next batch is not ready, so the program has to wait for the batch."""
        if not getattr(iterator, "_num_workers", 0):
            return True
        received = iterator._task_info.get(iterator._rcvd_idx, ())
        return len(received) < 2 and bool(iterator._data_queue.empty())

    def settings(self) -> dict[str, Any] | None:
        """End the measurement. Return the settings and times of the loader.

        Returns None if the program has not used a loader.
        """
        self._active = False
        if self._sampler is None:
            return None
        cpu = [after - before for before, after in pairwise(self._process_cpu)]
        return self._iterator | {
            "waited_s": self._waited,
            "cpu_s": self._cpu,
            "starved": sum(self._starved) / len(self._starved),
            # CPU seconds of all threads of this process between two batches.
            "process_cpu_s": median(cpu) if cpu else None,
            "batch_bytes": self._batch_bytes,
        }
