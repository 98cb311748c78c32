"""Hooks in torch while a capture runs: samples per step, other profilers, NVTX ranges.

This file imports only torch and the standard library, for the reason given in capture.py.
"""

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import profiler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerAction
from torch.profiler import profile as scheduled_profile
from torch.utils.data import dataloader

_cuda_profiler: Any = torch.cuda.profiler  # torch declares no types for these modules
_nvtx: Any = torch.cuda.nvtx
_emit_nvtx: Any = torch.autograd.profiler.emit_nvtx


def _replace(patches: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method until `patches` is closed."""
    patches.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


class BatchCounter:
    """Counts the samples of one data loader: the first loader that is used after `begin`.

    `begin` is called after the program's first step, so an evaluation before training is not
    counted. For torch's DataLoader each batch counts as its batch size; for tutti's Loader the
    samples in each batch are counted.
    """

    def __init__(self) -> None:
        self._patches = ExitStack()
        self._loader: Any = None
        self._samples: float | None = 0.0

    def begin(self) -> None:
        self._count_results(dataloader._BaseDataLoaderIter, "__next__", _torch_batch)
        module = sys.modules.get("tutti.data.loader")
        if module is not None:
            self._count_results(module.Loader, "_received", _tutti_batch)

    def end(self, steps: int) -> int | None:
        """Remove the hooks; returns samples per step of this rank, None if unknown."""
        self._patches.close()
        self._loader = None
        return round(self._samples / steps) or None if self._samples and steps else None

    def _count_results(
        self, owner: Any, name: str, inspect: Callable[[Any, Any], tuple[Any, Any]]
    ) -> None:
        original = getattr(owner, name)

        def counted(loader: Any, *arguments: Any) -> Any:
            batch = original(loader, *arguments)
            self._count(*inspect(loader, batch))
            return batch

        _replace(self._patches, owner, name, counted)

    def _count(self, loader: Any, samples: Any) -> None:
        if self._loader is None:
            self._loader = loader
        if self._loader is loader and self._samples is not None:
            self._samples = self._samples + samples if isinstance(samples, int | float) else None


def _torch_batch(iterator: Any, batch: Any) -> tuple[Any, Any]:
    # Each epoch has its own iterator; the batch sampler is the same in all epochs.
    sampler = getattr(iterator, "_index_sampler", None)
    if not getattr(iterator, "_auto_collation", False):
        return sampler, None  # the dataset makes the batches itself
    size = getattr(sampler, "batch_size", None)
    if size and getattr(sampler, "split_batches", False):  # Accelerate: a batch is for all ranks
        size /= getattr(sampler, "num_processes", 1)
    return sampler, size


def _tutti_batch(loader: Any, batch: Any) -> tuple[Any, Any]:
    return loader, batch.count


class OtherProfilers:
    """Tracks the torch profilers that the program itself starts, from `begin` to `end`.

    torch runs only one profiler at a time, and a profiler in its warm-up counts as running.
    `on_start` is called before a profiler of the program starts, so that the profiler of the
    Capture can stop. An idle profiler of the program must not mark steps, because its marks would
    appear in the trace of the Capture.
    """

    def __init__(self, on_start: Callable[[Any], None], is_ours: Callable[[Any], bool]) -> None:
        self._on_start, self._is_ours = on_start, is_ours
        self._muted: Any = None
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches = ExitStack()

    def begin(self) -> None:
        prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

        def tracked_prepare(each: Any) -> None:
            self._on_start(each)
            self._unmute()
            prepare(each)  # type: ignore[no-untyped-call]
            self._prepared.add(each)

        def tracked_leave(each: Any, *error: Any) -> Any:
            self._prepared.discard(each)
            return leave(each, *error)  # type: ignore[no-untyped-call]

        _replace(self._patches, profiler.profile, "_prepare_trace", tracked_prepare)
        _replace(self._patches, profiler.profile, "__exit__", tracked_leave)
        for name in ("start", "step"):
            muted = self._without_marks(getattr(scheduled_profile, name))
            _replace(self._patches, scheduled_profile, name, muted)

    def end(self) -> None:
        """Remove the hooks. Safe to call again."""
        self._patches.close()

    def any_active(self) -> bool:
        """Whether a profiler runs or warms up; call this before the Capture's profiler starts."""
        return bool(self._prepared) or profiler._is_profiler_enabled

    def _without_marks(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap `method` so that an idle profiler of the program marks no step."""

        def wrapped(each: Any) -> None:
            idle = getattr(each, "profiler", None) not in self._prepared
            if self._is_ours(each) or not idle or not each.record_steps:
                method(each)
                return
            self._muted, each.record_steps = each, False
            try:
                method(each)
            finally:
                self._unmute()

        return wrapped

    def _unmute(self) -> None:
        if self._muted is not None:
            self._muted.record_steps, self._muted = True, None


class NvtxRanges:
    """NVTX ranges for Nsight Systems: steps, operators and every record_function.

    The class has the three methods of torch.profiler.profile that a Capture calls. Nsight and
    torch.profiler need the same tracing interface of the GPU, which only one of them can use: with
    NVTX ranges there is no torch trace. `nsys profile --capture-range=cudaProfilerApi` collects
    only the recorded steps.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction], shapes: bool) -> None:
        self._schedule = schedule
        self._emit = _emit_nvtx(record_shapes=shapes)
        self._step = 0
        self._emitting = False
        self._handle: Any = None

    def start(self) -> None:
        if self._schedule(self._step) != ProfilerAction.RECORD:
            return
        if not self._emitting:
            _cuda_profiler.start()
            self._emit.__enter__()
            self._emitting = True
        _nvtx.range_push(f"ProfilerStep#{self._step}")

    def step(self) -> None:
        if self._emitting:
            _nvtx.range_pop()
        self._step += 1
        self.start()

    def stop(self) -> None:
        if self._emitting:
            _nvtx.range_pop()
            self._emitting = False
            _cuda_profiler.stop()
            # This call may be inside the range of an optimizer step. torch reports an error if a
            # range ends after emit_nvtx has ended, so emit_nvtx ends at the next forward.
            self._handle = register_module_forward_pre_hook(self.end)

    def end(self, *_: object) -> None:
        """Stop emitting ranges. Safe to call again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._emit.__exit__(None, None, None)
