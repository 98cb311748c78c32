"""Ranges for Nsight Systems, in the steps that would be recorded otherwise.

Nsight and torch.profiler both want the GPU's one tracing interface, and torch has one profiler at
a time: with ranges there is no trace of torch's. Like capture.py, this file imports torch alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerAction

_profiler: Any = torch.cuda.profiler  # torch gives these no types
_nvtx: Any = torch.cuda.nvtx
_emit_nvtx: Any = torch.autograd.profiler.emit_nvtx


class NvtxRanges:
    """Steps, operators and every record_function (tutti's names of collectives, too) as ranges.

    Has the three methods of torch.profiler.profile that a Capture calls. `nsys profile
    --capture-range=cudaProfilerApi` collects the recorded steps alone.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction], shapes: bool) -> None:
        self._schedule = schedule
        self._emit = _emit_nvtx(record_shapes=shapes)
        self._step = 0
        self._emitting = False
        self._handle: Any = None

    def start(self) -> None:
        """The first step begins."""
        if self._schedule(self._step) != ProfilerAction.RECORD:
            return
        if not self._emitting:
            _profiler.start()
            self._emit.__enter__()
            self._emitting = True
        _nvtx.range_push(f"ProfilerStep#{self._step}")

    def step(self) -> None:
        """A step ends, the next begins."""
        if self._emitting:
            _nvtx.range_pop()
        self._step += 1
        self.start()

    def stop(self) -> None:
        """The last step ends."""
        if self._emitting:
            _nvtx.range_pop()
            self._emitting = False
            _profiler.stop()
            # An optimizer's step may be a range around this very call, and torch complains of a
            # range that outlives the emitting of them: it ends with the next forward.
            self._handle = register_module_forward_pre_hook(self.end)

    def end(self, *_: object) -> None:
        """No more ranges. Safe to call again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._emit.__exit__(None, None, None)
