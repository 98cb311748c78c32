"""Capture runs torch.profiler for a few steps on each rank, and writes one trace file per rank.

This file, program_memory.py and program_settings.py import only torch and the standard library,
because `tutti profile -- COMMAND` loads them into programs whose environment may not have tutti.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import resource
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler as autograd_profiler
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, ProfilerActivity
from torch.utils.data import dataloader

# The import is relative, because the package is named tutti_capture in programs without tutti.
from .program_memory import ProgramMemory, process_peak_bytes
from .program_settings import LoaderTimes, read_settings

_OTHER_PROFILER = "the program runs its own torch.profiler. Remove that profiler."
# How long a rank waits for the traces of the other ranks before it ends the program.
_END_TIMEOUT_SECONDS = 60.0
# Maximum number of flight recorder entries that are kept in a trace. The recorder entry of a gloo
# collective has the group and the sequence number. The trace events of the collective have neither.
_RECORDER_ENTRIES = 20_000
# Heap bytes that are prepared for the profiler's events: per recorded step, and the maximum for all
# steps. In measurements, the events of one step took up to 9 MB.
_HEAP_BYTES_PER_STEP, _MAX_HEAP_BYTES = 16 << 20, 256 << 20
_HEAP_BLOCK_BYTES = 64 << 10  # malloc may use mmap instead of the heap for 128 kB or more
# torch declares no types for some functions of these modules.
_enable_record_function: Any = getattr(torch._C._autograd, "_enable_record_function", None)
_cuda: Any = torch.cuda
_profile: Any = torch.profiler.profile


class Capture:
    """Records `active` steps after `wait` + `warmup` steps, and writes `rankN.json.gz`.

    with tutti.profile("traces") as p:
        for batch in loader:
            train(batch)
            p.step()

    `shapes` records tensor shapes. If it is None, shapes are recorded only for programs that
    compute on CPUs, because message sizes are otherwise unknown there. `tensorboard` is a folder to
    which the traces are also copied, with file names for TensorBoard's profile plugin. `nvtx` marks
    the steps for Nsight Systems instead of recording them, and needs CUDA. `batch` is the number of
    samples per step of this rank. If `batch` is None, the samples of the program's data loader are
    counted. `stop` ends the program when all ranks have written their traces. `replace` overwrites
    an existing trace. If `replace` is False and a command trains more than once, the first trace is
    kept.

    `interleave` is only used for programs that compute on CPUs. It is the maximum number of `wait`
    steps that are moved between the recorded steps. Operators are not recorded in the moved steps.
    The speed of a machine changes within seconds, so only unrecorded steps that alternate with
    recorded steps show how much recording slows a step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        wait: int = 6,
        warmup: int = 2,
        active: int = 5,
        shapes: bool | None = None,
        memory: bool = False,
        stacks: bool = False,
        tensorboard: str | os.PathLike[str] | None = None,
        nvtx: bool = False,
        batch: int | None = None,
        stop: bool = False,
        replace: bool = True,
        interleave: int = 0,
    ) -> None:
        if active < 1 or wait < 0 or warmup < 0:
            raise ValueError(
                f"wait and warmup must be at least 0, and active must be at least 1, got "
                f"wait={wait}, warmup={warmup}, active={active}"
            )
        if nvtx and not torch.cuda.is_available():
            raise ValueError("nvtx=True needs CUDA, but CUDA is not available. Remove nvtx=True.")
        # At its default log level, Kineto prints to standard error when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.directory = Path(directory)
        self.wait, self.warmup, self.active = wait, warmup, active
        self.shapes, self.memory, self.stacks = shapes, memory, stacks
        self.tensorboard = None if tensorboard is None else Path(tensorboard)
        self.nvtx, self.stop, self.replace = nvtx, stop, replace
        self.interleave = interleave
        self._unrecorded_between: set[int] = set()  # numbers of the steps that `interleave` moved
        self.path: Path | None = None  # the path of the trace, once it is written
        self._profiler: torch.profiler.profile | _NvtxRanges | None = None
        self._steps = 0
        self._hooks = ExitStack()  # closing it removes all hooks in torch
        self._batch, self._batch_counter = batch, _BatchCounter(self._hooks)
        self._program_profilers = _ProgramProfilers(self)
        self._device: torch.device | None = None  # the GPU that the program uses, if any
        # The times of the unrecorded steps (`wait`) and of the recorded steps (`active`).
        self._unrecorded, self._recorded = _StepTimes(), _StepTimes()
        self._program_settings: dict[str, Any] = {}
        # The peak memory in bytes before the recording, the heap bytes added for the recording, and
        # the seconds of one page fault.
        self._peak_before, self._touched, self._page_fault_s = 0, 0, 0.0
        self._step_start: Any = None  # None if the current step is not timed
        self._leading_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._forward_calls: _ForwardCalls | None = None  # not None if forward calls mark the steps
        self._program_memory = ProgramMemory() if memory else None

    def __enter__(self) -> "Capture":
        if _cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._program_profilers.begin()
        if (memory := self._program_memory) is not None:
            memory.begin()
            _after_updates(memory.on_update, self._hooks)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Mark the end of a training step."""
        if self._profiler is None:
            return
        if self._program_memory is not None and self._program_memory.complete:
            self._program_memory.end()
        if self._step_start is not None:
            steps = self._recorded if self._is_recorded(self._steps) else self._unrecorded
            start, faults, cpu = self._step_start
            steps.add(
                self._steps,
                start,
                _now(self._device),
                page_faults=_page_faults() - faults,
                cpu_s=time.thread_time() - cpu,
            )
        self._steps += 1
        if self._steps == self.wait:
            self._before_recording()
        if self._steps < self._last_step:
            _record_operators(True)  # the range of the next step is always recorded
            self._profiler.step()
            if self._steps in self._unrecorded_between:
                _record_operators(False)
            self._begin_step()
        else:
            self.close()
            if self.stop:
                self._end_program()

    def close(self) -> None:
        """Stop the profiler and write the trace, if steps were recorded. Later calls do nothing."""
        self._hooks.close()
        if self._unrecorded_between:
            _record_operators(True)
        if self._program_memory is not None:
            self._program_memory.end()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._batch = self._batch or self._batch_counter.samples_per_step(self._steps)
        first, last = self.wait + self.warmup, self._steps
        if isinstance(profiler, _NvtxRanges):
            if last > first and self._rank == 0:
                _report(f"steps {first} to {last - 1} are marked for Nsight Systems")
        elif last > first:
            # This call comes before stop(), because metadata that is added later is not written.
            profiler.add_metadata_json("tutti", json.dumps(self._metadata(), default=str))
        profiler.stop()  # calls _write if steps were recorded

    def follow_program(self) -> "Capture":
        """Find the steps of a program through torch's global hooks, without changing the program.

        Each optimizer step ends a step. In a program without an optimizer (inference), each call of
        the outermost module begins a step. Nothing is recorded before the first step, so processes
        that neither train nor run inference are not affected.
        """
        self._program_profilers.begin()
        if self._program_memory is not None:
            self._never_raise(self._program_memory.begin)
        _after_updates(self._on_optimizer_step, self._hooks)
        self._forward_calls = _ForwardCalls(self)
        atexit.register(self._at_exit)  # the program may end before all steps are recorded
        return self

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if _cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # the step is captured into a CUDA graph and does not run now
        self.ignore_forward_calls()
        if (memory := self._program_memory) is not None:
            self._never_raise(lambda: memory.on_update(optimizer))
            if memory.complete:
                self._never_raise(memory.end)
        # If the program has several optimizers (a GAN, or one optimizer per parameter), the first
        # one marks the steps.
        if self._leading_optimizer is None:
            self._leading_optimizer = weakref.ref(optimizer)
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._device = next((p.device for p in parameters if p.device.type == "cuda"), None)
            self._never_raise(self._start)
        elif (leading := self._leading_optimizer()) is optimizer:
            self._never_raise(self.step)
        elif leading is None:  # the first optimizer was deleted
            self._leading_optimizer = weakref.ref(optimizer)

    def begin_at_forward(self, module: torch.nn.Module) -> None:
        self._device = next((p.device for p in module.parameters() if p.is_cuda), None)
        self._never_raise(self._start)

    def ignore_forward_calls(self) -> None:
        """Discard the steps that forward calls marked.

        The program has an optimizer, so these calls were an evaluation before training.
        """
        if self._forward_calls is None:
            return
        self._forward_calls.remove()
        self._forward_calls = None
        # With _steps = 0, _write writes no trace when the profiler stops.
        profiler, self._profiler, self._steps = self._profiler, None, 0
        self._unrecorded, self._recorded = _StepTimes(), _StepTimes()
        if profiler is not None:
            self._never_raise(profiler.stop)

    def _at_exit(self) -> None:
        if self._profiler is not None:
            needed = self._last_step + 1
            # Python sets sys.last_type after an uncaught exception. The exception already explains
            # why the program ended.
            if not hasattr(sys, "last_type"):
                _report(
                    f"the program ran {self._steps + 1} steps, but the capture needs {needed}. "
                    "Reduce --wait, --warmup or --active, or train for more steps."
                )
            self._never_raise(self.close)

    def _never_raise(self, action: Callable[[], None]) -> None:
        """Call `action`. An error ends the capture, but not the program."""
        try:
            action()
        except Exception as error:
            self._abandon()
            _report(f"the capture has ended: {error}")

    def _abandon(self) -> None:
        self._hooks.close()
        if self._unrecorded_between:
            _record_operators(True)
        if self._program_memory is not None:
            self._program_memory.end()
        self._profiler = None

    def _before_recording(self) -> None:
        """Prepare the recording.

        This method runs after the first `wait` steps, so it does not slow these timed steps.
        """
        if self._program_profilers.any_active():
            self._abandon()
            raise RuntimeError(_OTHER_PROFILER)
        self._program_settings = read_settings(self._batch_counter.loader_times)
        if self._program_memory is not None:  # its hooks would slow recorded steps
            self._program_memory.end()
        if not self.nvtx:
            self._peak_before = process_peak_bytes()
            size = min((self.active + 1) * _HEAP_BYTES_PER_STEP, _MAX_HEAP_BYTES)
            self._touched, self._page_fault_s = _touch_heap(size)

    def _before_profiler_starts(self, starting: Any) -> None:
        """End this capture if the program starts its own profiler. Recorded steps are kept.

        `starting` is the profiler that is about to start.
        """
        profiler = self._profiler
        is_own = getattr(profiler, "profiler", None) is starting
        if profiler is None or self._steps < self.wait or is_own:
            return
        self._never_raise(self.close)
        if isinstance(profiler, _NvtxRanges):
            profiler.end()
        _report(f"the capture has ended: {_OTHER_PROFILER}")

    @property
    def _last_step(self) -> int:
        """The number of steps after which the capture ends."""
        return self.wait + self.warmup + self.active + len(self._unrecorded_between)

    def _is_recorded(self, step: int) -> bool:
        return step >= self.wait + self.warmup and step not in self._unrecorded_between

    def _move_steps_between(self) -> None:
        """Move unrecorded steps between the recorded steps, as `interleave` requests.

        The steps form pairs of one recorded and one unrecorded step. The order within each pair
        follows the Thue-Morse sequence, so that slow changes of the machine's speed and periodic
        work of the program affect recorded and unrecorded steps equally.
        """
        # The capture may start a second time. In this case, undo the earlier move first.
        self.wait += len(self._unrecorded_between)
        count = min(self.interleave, self.active, self.wait)
        if self._device is not None or self.nvtx or _enable_record_function is None:
            count = 0
        self.wait -= count
        first = self.wait + self.warmup
        self._unrecorded_between = {
            first + 2 * pair + (pair.bit_count() % 2 == 0) for pair in range(count)
        }

    def _start(self) -> None:
        self._move_steps_between()
        if self.wait == 0:
            self._before_recording()
        # NCCL records message sizes itself, so shapes are needed only if the program uses no GPU.
        # The host may have GPUs that the program does not use.
        shapes = self._device is None if self.shapes is None else self.shapes
        if dist.is_available() and dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        else:
            self._rank = int(os.environ.get("RANK", 0))
            self._size = int(os.environ.get("WORLD_SIZE", 1))
        if self.nvtx:
            self._profiler = _NvtxRanges(self._action, shapes)
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *gpu],
                schedule=self._action,
                on_trace_ready=self._write,
                record_shapes=shapes,
                profile_memory=self.memory,
                with_stack=self.stacks,
            )
        self._profiler.start()
        self._batch_counter.begin()
        self._begin_step()

    def _begin_step(self) -> None:
        in_warmup = self.wait <= self._steps < self.wait + self.warmup
        now = (_now(self._device), _page_faults(), time.thread_time())
        self._step_start = None if in_warmup else now

    def _action(self, step: int) -> ProfilerAction:
        """Return the profiler's action for a step.

        torch.profiler.schedule would return the same actions, but it warns if `warmup` is 0.
        """
        if step < self.wait:
            return ProfilerAction.NONE
        if step < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD  # close() ends the recording

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self.path is not None or self._steps <= self.wait + self.warmup:
            return  # already written, or no recorded step has ended
        path = self.directory / f"rank{self._rank}.json.gz"
        if not self.replace and path.exists():
            _report(f"{path} already exists and is kept. The later training is not captured.")
            return
        # Write a temporary file, then rename it, so that no process reads an unfinished trace.
        # tutti.measure.files has a function for this, but the program's environment may not have
        # tutti.
        unfinished = self.directory / f".rank{self._rank}.{os.getpid()}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        self.path = path
        if self.tensorboard is not None:
            self.tensorboard.mkdir(parents=True, exist_ok=True)
            # TensorBoard's plugin uses the part of the name before the time as the worker name.
            name = f"rank{self._rank}.{time.time_ns()}.pt.trace.json.gz"
            shutil.copyfile(path, self.tensorboard / name)

    def _end_program(self) -> None:
        """Wait until all ranks of this host have written traces, then raise SystemExit.

        So all ranks end after the same step, and their exit handlers run.
        """
        local_ranks = min(self._size, int(os.environ.get("LOCAL_WORLD_SIZE", self._size)))
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        while len(list(self.directory.glob("rank*"))) < local_ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        raise SystemExit(0)

    def _metadata(self) -> dict[str, Any]:
        """Return the value of `tutti` in the trace: data that torch does not write to a trace."""
        # The heap bytes that were added for the profiler are not counted.
        process_peak = max(self._peak_before, process_peak_bytes() - self._touched)
        metadata: dict[str, Any] = {
            "backend": "none",
            "host": socket.gethostname(),  # torch 2.11 does not write host_name
            "kernel": _kernel_identity(),
            "host_memory_bytes": process_peak,
            "recorder": [],
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "program": self._program_settings,
        }
        if _cuda.is_initialized():
            metadata["device_memory_bytes"] = torch.cuda.max_memory_allocated()
        if self._program_memory is not None:
            metadata["memory"] = self._program_memory.summary(self._device, process_peak)
        if dist.is_available() and dist.is_initialized():
            metadata["backend"] = dist.get_backend()
            with contextlib.suppress(Exception):  # torch's flight recorder has no stable interface
                metadata["recorder"] = _recorded_collectives()
        unrecorded, recorded = self._unrecorded.seconds(), self._recorded.seconds()
        between = [number in self._unrecorded_between for number in self._unrecorded.numbers]
        timed = [s for s, is_between in zip(unrecorded, between, strict=True) if is_between]
        timed = timed or unrecorded
        both = recorded and timed
        calls = self._forward_calls
        return metadata | {
            "rank": self._rank,
            "world_size": self._size,
            # ProfilerStep#n is a complete step only if n < `steps`. torch also writes a range for
            # the unfinished step in which the capture stops.
            "steps": self._steps,
            "step_s": unrecorded,
            # `timed_steps` has the numbers of the steps in `step_s`. The last `interleaved` of
            # these steps lie between recorded steps.
            "timed_steps": self._unrecorded.numbers,
            "interleaved": sum(between),
            # `page_faults` has two lists of minor page faults per step: for unrecorded steps and
            # for recorded steps. `cpu_s` has two such lists with the CPU seconds of the training
            # thread.
            "page_faults": [self._unrecorded.page_faults, self._recorded.page_faults],
            "page_fault_s": self._page_fault_s,
            "cpu_s": [self._unrecorded.cpu_s, self._recorded.cpu_s],
            # The class of the module whose calls mark the steps, or None if an optimizer marks
            # them.
            "steps_of_module": calls.module_name if calls is not None else None,
            "overhead": median(recorded) / median(timed) if both else None,
            "batch": self._batch,
        }


def _now(device: torch.device | None) -> Any:
    """Return the host time, or a recorded CUDA event if `device` is given."""
    if device is None:
        return time.perf_counter()
    event = _cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _record_operators(enabled: bool) -> None:
    """Enable or disable the recording of operators in this thread while the profiler runs."""
    if _enable_record_function is not None:
        _enable_record_function(enabled)


class _StepTimes:
    """The numbers, times, page faults and CPU seconds of steps."""

    def __init__(self) -> None:
        self._times: list[tuple[Any, Any]] = []
        self.numbers: list[int] = []
        self.page_faults: list[int] = []
        self.cpu_s: list[float] = []

    def add(self, number: int, start: Any, end: Any, *, page_faults: int, cpu_s: float) -> None:
        self._times.append((start, end))
        self.numbers.append(number)
        self.page_faults.append(page_faults)
        self.cpu_s.append(cpu_s)

    def seconds(self) -> list[float]:
        if self._times and not isinstance(self._times[-1][1], float):
            self._times[-1][1].synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in self._times]
        return [end - start for start, end in self._times]


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _kernel_identity() -> str:
    """Return the boot id of the operating system, or `""` if it is unknown.

    Processes with the same boot id share a clock.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _touch_heap(size: int) -> tuple[int, float]:
    """Add about `size` bytes to the heap, write to these bytes and free them.

    Return the number of bytes, and the seconds of one page fault: the time of the first write to a
    page minus the time of the second write.

    The profiler stores its events on the heap. Without the added bytes, the heap would grow in the
    recorded steps, and each new page would cause a page fault. Thousands of page faults per step
    would slow the steps by an amount that depends on the number of operators and ranks. malloc
    returns free memory at the end of the heap to the system. To prevent this, the block with the
    highest address is never freed.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    blocks = [libc.malloc(_HEAP_BLOCK_BYTES) for _ in range(size // _HEAP_BLOCK_BYTES)]
    blocks = sorted(filter(None, blocks))
    seconds, faults = [], []
    for _ in range(2):
        began, before = time.thread_time(), _page_faults()
        for block in blocks:
            ctypes.memset(block, 0, _HEAP_BLOCK_BYTES)
        seconds.append(time.thread_time() - began)
        faults.append(_page_faults() - before)
    for block in blocks[:-1]:
        libc.free(block)
    page_fault_s = max(0.0, seconds[0] - seconds[1]) / max(1, faults[0] - faults[1])
    return len(blocks) * _HEAP_BLOCK_BYTES, page_fault_s


def _recorded_collectives() -> list[dict[str, Any]]:
    """Return gloo's collectives from torch's flight recorder."""
    recorder: Any = torch._C._distributed_c10d
    entries = json.loads(recorder._dump_fr_trace_json()).get("entries", [])
    return [
        {
            "group": str(entry["process_group"][0]),
            "seq": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "created_ns": entry["time_created_ns"],
        }
        for entry in entries[-_RECORDER_ENTRIES:]
        if str(entry["profiling_name"]).startswith("gloo:")
    ]


def _report(text: str) -> None:
    print(f"tutti profile: {text}", file=sys.stderr)


def _replace(hooks: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace the method `name` of `owner` until `hooks` is closed."""
    hooks.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


def _after_updates(function: Callable[[torch.optim.Optimizer], None], hooks: ExitStack) -> None:
    """Call `function` after every step of an optimizer, until `hooks` is closed.

    The hook stays registered afterwards and does nothing. `function` may close `hooks`, and torch
    raises an error if a hook is removed while torch calls the hooks of an optimizer.
    """
    active = [True]
    hooks.callback(active.clear)
    register_optimizer_step_post_hook(lambda each, *_: function(each) if active else None)


class _ForwardCalls:
    """In a program without an optimizer, each call of the outermost module marks a step.

    The chosen module is the first one that the program calls twice in evaluation mode or without
    gradients. Calls inside the forward of another module do not count. The hooks are removed when
    the program creates an optimizer.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._depth = 0  # depth of nested module calls
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._leading: weakref.ref[torch.nn.Module] | None = None
        self.module_name: str | None = None
        self._hooks = ExitStack()
        capture._hooks.callback(self._hooks.close)
        self._hooks.callback(register_module_forward_pre_hook(self._before_forward).remove)
        after = register_module_forward_hook(self._after_forward, always_call=True)
        self._hooks.callback(after.remove)
        optimizer: Any = torch.optim.Optimizer
        initialize = optimizer.__init__

        @functools.wraps(initialize)
        def initialize_and_ignore(*arguments: Any, **named: Any) -> None:
            initialize(*arguments, **named)
            capture.ignore_forward_calls()

        _replace(self._hooks, optimizer, "__init__", initialize_and_ignore)

    def remove(self) -> None:
        self._hooks.close()

    def _before_forward(self, module: torch.nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or (module.training and torch.is_grad_enabled()):
            return
        if self._leading is not None:
            if self._leading() is module:
                self._capture._never_raise(self._capture.step)
        elif module in self._called:
            self._leading, self.module_name = weakref.ref(module), type(module).__name__
            self._capture.begin_at_forward(module)
        else:
            self._called.add(module)

    def _after_forward(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)


class _BatchCounter:
    """Counts the samples of the first data loader that is used after `begin`.

    `begin` is called after the program's first step, so an evaluation before training is not
    counted. For torch's DataLoader, each batch counts as `batch_size` samples. For tutti's Loader,
    the samples in each batch are counted.
    """

    def __init__(self, hooks: ExitStack) -> None:
        self._hooks = hooks
        self._loader: Any = None
        self._samples: float | None = 0.0
        self._counts = False
        self.loader_times = LoaderTimes()

    def begin(self) -> None:
        self._loader, self._samples = None, 0.0
        if self._counts:
            return
        self._counts = True
        self._count_results(dataloader._BaseDataLoaderIter, "__next__", _torch_batch)
        if (module := sys.modules.get("tutti.data.loader")) is not None:
            self._count_results(
                module.Loader, "_received", lambda loader, batch: (loader, batch.count)
            )

    def samples_per_step(self, steps: int) -> int | None:
        """Return the number of samples that this rank processes per step, or None if unknown."""
        return round(self._samples / steps) or None if self._samples and steps else None

    def _count_results(
        self, owner: Any, name: str, inspect: Callable[[Any, Any], tuple[Any, Any]]
    ) -> None:
        original = getattr(owner, name)

        def counted(iterator: Any, *arguments: Any) -> Any:
            batch = self.loader_times.next_batch(original, iterator, *arguments)
            loader, samples = inspect(iterator, batch)
            if self._loader is None:
                self._loader = loader
            if self._loader is loader and self._samples is not None:
                is_number = isinstance(samples, int | float)
                self._samples = self._samples + samples if is_number else None
            return batch

        _replace(self._hooks, owner, name, counted)


def _torch_batch(iterator: Any, batch: Any) -> tuple[Any, Any]:
    """Return the batch sampler, which identifies the loader in all epochs, and the batch size."""
    sampler = getattr(iterator, "_index_sampler", None)
    if not getattr(iterator, "_auto_collation", False):
        return sampler, None  # the dataset makes the batches itself
    size = getattr(sampler, "batch_size", None)
    if size and getattr(sampler, "split_batches", False):  # Accelerate splits batches over ranks
        size /= getattr(sampler, "num_processes", 1)
    return sampler, size


class _ProgramProfilers:
    """Tracks the torch profilers that the program itself starts, until the capture ends.

    torch can run only one profiler at a time, and a profiler in its warm-up counts as running. This
    class notifies the capture before a profiler of the program starts. A profiler of the program
    that is idle must not mark steps, because its step ranges would appear in the capture's trace.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._muted: Any = None
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> None:
        hooks = self._capture._hooks
        profile: Any = autograd_profiler.profile
        prepare, leave = profile._prepare_trace, profile.__exit__

        def tracked_prepare(profiler: Any) -> None:
            self._capture._before_profiler_starts(profiler)
            self._unmute()
            prepare(profiler)
            self._prepared.add(profiler)

        def tracked_leave(profiler: Any, *error: Any) -> Any:
            self._prepared.discard(profiler)
            return leave(profiler, *error)

        _replace(hooks, profile, "_prepare_trace", tracked_prepare)
        _replace(hooks, profile, "__exit__", tracked_leave)
        for name in ("start", "step"):
            muted = self._without_marks(getattr(_profile, name))
            _replace(hooks, _profile, name, muted)

    def any_active(self) -> bool:
        """Return whether a profiler of the program runs or warms up.

        The capture calls this method before it starts its own profiler.
        """
        return bool(self._prepared) or autograd_profiler._is_profiler_enabled

    def _without_marks(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap `method` so that an idle profiler of the program marks no step."""

        def wrapped(profiler: Any) -> None:
            idle = getattr(profiler, "profiler", None) not in self._prepared
            if profiler is self._capture._profiler or not idle or not profiler.record_steps:
                method(profiler)
                return
            self._muted, profiler.record_steps = profiler, False
            try:
                method(profiler)
            finally:
                self._unmute()

        return wrapped

    def _unmute(self) -> None:
        if self._muted is not None:
            self._muted.record_steps, self._muted = True, None


class _NvtxRanges:
    """Emits NVTX ranges for Nsight Systems: steps, operators and every record_function.

    The class has the three methods of torch.profiler.profile that `Capture` calls. Nsight and
    torch.profiler cannot use the GPU's tracing interface at the same time, so no torch trace is
    written if NVTX ranges are emitted. `nsys profile --capture-range=cudaProfilerApi` collects only
    the recorded steps.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction], shapes: bool) -> None:
        self._schedule = schedule
        emit_nvtx: Any = autograd_profiler.emit_nvtx
        self._emit = emit_nvtx(record_shapes=shapes)
        self._step = 0
        self._emitting = False
        self._handle: Any = None

    def start(self) -> None:
        if self._schedule(self._step) != ProfilerAction.RECORD:
            return
        if not self._emitting:
            _cuda.profiler.start()
            self._emit.__enter__()
            self._emitting = True
        _cuda.nvtx.range_push(f"ProfilerStep#{self._step}")

    def step(self) -> None:
        if self._emitting:
            _cuda.nvtx.range_pop()
        self._step += 1
        self.start()

    def stop(self) -> None:
        if self._emitting:
            _cuda.nvtx.range_pop()
            self._emitting = False
            _cuda.profiler.stop()
            # This call may be inside the range of an optimizer step. torch reports an error if a
            # range ends after emit_nvtx was exited. So emit_nvtx is exited at the next forward.
            self._handle = register_module_forward_pre_hook(self.end)

    def end(self, *_: object) -> None:
        """Stop emitting ranges. Later calls do nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._emit.__exit__(None, None, None)
