"""Capture: runs torch.profiler on this rank for a few steps and writes one trace file per rank.

This file imports only torch, the standard library and capture_hooks.py: `tutti profile -- COMMAND`
loads this file into programs whose environment may not have tutti.
"""

import atexit
import contextlib
import json
import os
import resource
import shutil
import socket
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity

from .capture_hooks import BatchCounter, NvtxRanges, OtherProfilers

_OTHER_PROFILER = "the program runs a torch.profiler of its own: remove it"
# How long a rank that has written its trace waits for the other traces before it ends the program.
_END_TIMEOUT_SECONDS = 60.0
# The number of flight recorder entries that are kept in a trace. A gloo trace has no group and no
# sequence number of a collective; the recorder has both.
_RECORDER_ENTRIES = 20_000


class Capture:
    """Records `active` steps after `wait` + `warmup` steps, and writes `rankN.json.gz`.

    with tutti.profile("traces") as p:
        for batch in loader:
            train(batch)
            p.step()

    `shapes`: record tensor shapes; None: only for programs that compute on CPUs, where message
    sizes are otherwise unknown.
    `tensorboard`: also copy the traces into this folder, named for TensorBoard's profile plugin.
    `nvtx`: mark the steps for Nsight Systems instead of recording them; needs CUDA.
    `batch`: samples per step of this rank; None: counted in the program's data loader.
    `stop`: end the program when all ranks have written their traces.
    `replace`: overwrite an existing trace. If a command trains more than once, False keeps the
    first trace.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        wait: int = 3,
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
    ) -> None:
        if active < 1 or wait < 0 or warmup < 0:
            raise ValueError(
                f"wait {wait}, warmup {warmup}, active {active}: use at least 0, 0 and 1"
            )
        if nvtx and not torch.cuda.is_available():
            raise ValueError("nvtx marks steps for Nsight Systems and needs CUDA: leave it out")
        # At its default log level Kineto prints to standard error when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.directory = Path(directory)
        self.wait, self.warmup, self.active = wait, warmup, active
        self.shapes, self.memory, self.stacks = shapes, memory, stacks
        self.tensorboard = None if tensorboard is None else Path(tensorboard)
        self.nvtx, self.stop, self.replace = nvtx, stop, replace
        self.path: Path | None = None  # the path of the trace, once written
        self._profiler: torch.profiler.profile | NvtxRanges | None = None
        self._closed = False
        self._steps = 0
        self._batch, self._batch_counter = batch, BatchCounter()
        self._others = OtherProfilers(self._yield_to, lambda each: each is self._profiler)
        self._device: torch.device | None = None  # the GPU that the program uses
        # Times of the steps during `wait`, without the profiler, and during `active`.
        self._unrecorded_times, self._recorded_times = _StepTimer(), _StepTimer()
        self._leading_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hook: Any = None

    def __enter__(self) -> "Capture":
        if _cuda_in_use():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._others.begin()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Mark the end of a training step."""
        if self._closed or self._profiler is None:
            return
        (self._unrecorded_times if self._steps < self.wait else self._recorded_times).end()
        self._steps += 1
        if self._steps == self.wait:
            self._stop_if_program_profiles()
        if self._closed:
            return
        if self._steps < self.wait + self.warmup + self.active:
            self._profiler.step()
            self._begin_step()
        else:
            self.close()
            if self.stop:
                self._end_program()

    def close(self) -> None:
        """Stop the profiler, and write the recorded steps, if any. Safe to call again."""
        self._remove_hook()
        if self._closed:
            return
        self._closed = True
        self._others.end()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            counted = self._batch_counter.end(self._steps)
            self._batch = self._batch or counted
            first, last = self.wait + self.warmup, self._steps
            if isinstance(profiler, NvtxRanges):
                if last > first and self._rank == 0:
                    _report(f"steps {first} to {last - 1} are marked for Nsight Systems")
            elif last > first:
                # Called before stop(), because metadata that is added later is not written.
                profiler.add_metadata_json("tutti", json.dumps(self._metadata(), default=str))
            profiler.stop()  # calls _write if steps were recorded

    def follow_optimizers(self) -> "Capture":
        """Treat each optimizer step as the end of a training step, through torch's global hook.

        Nothing is recorded before the first step of an optimizer, so processes that do not train
        are not affected.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._others.begin()
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)
        atexit.register(self._at_exit)  # the program may end before the schedule
        return self

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if _cuda_in_use() and torch.cuda.is_current_stream_capturing():
            return  # a step captured into a CUDA graph does not run now
        # With several optimizers (a GAN, one per parameter) the first one marks the steps.
        if self._leading_optimizer is None:
            self._leading_optimizer = weakref.ref(optimizer)
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            devices = (each.device for each in parameters)
            self._device = next((each for each in devices if each.type == "cuda"), None)
            self._never_raise(self._start)
        elif self._leading_optimizer() is optimizer:
            self._never_raise(self.step)
        elif self._leading_optimizer() is None:
            self._leading_optimizer = weakref.ref(optimizer)

    def _at_exit(self) -> None:
        if self._profiler is not None and not self._closed:
            needed = self.wait + self.warmup + self.active + 1
            _report(
                f"the program took {self._steps + 1} steps, the schedule needs {needed}: reduce "
                "--wait, --warmup or --active, or train longer"
            )
            self._never_raise(self.close)

    def _never_raise(self, action: Callable[[], None]) -> None:
        """Call `action`; an error ends the capture, never the program."""
        try:
            action()
        except Exception as error:
            self._abandon()
            _report(f"the capture has ended: {error}")

    def _abandon(self) -> None:
        self._closed, self._profiler = True, None
        self._batch_counter.end(0)
        self._others.end()
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stop_if_program_profiles(self) -> None:
        if self._others.any_active():
            self._abandon()
            raise RuntimeError(_OTHER_PROFILER)

    def _yield_to(self, another: Any) -> None:
        """Called before `another` profiler starts: end this capture and keep its recorded steps."""
        ours = self._profiler
        if ours is None or self._steps < self.wait or getattr(ours, "profiler", None) is another:
            return
        self._never_raise(self.close)
        if isinstance(ours, NvtxRanges):
            ours.end()
        _report(f"the capture has ended: {_OTHER_PROFILER}")

    def _start(self) -> None:
        if self.wait == 0:
            self._stop_if_program_profiles()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # NCCL records message sizes itself, so shapes are needed only if the program uses no GPU,
        # even if the host has GPUs.
        shapes = self._device is None if self.shapes is None else self.shapes
        self._rank, self._size = _rank_and_world_size()
        if self.nvtx:
            self._profiler = NvtxRanges(self._action, shapes)
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._profiler = torch.profiler.profile(
                activities=activities,
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
        if self._steps < self.wait:
            self._unrecorded_times.begin(self._device)
        elif self._steps >= self.wait + self.warmup:
            self._recorded_times.begin(self._device)

    def _action(self, step: int) -> ProfilerAction:
        """The same as torch.profiler.schedule, but without its warning about a warm-up of 0."""
        if step < self.wait:
            return ProfilerAction.NONE
        if step < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD  # until close()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self.path is not None or self._steps <= self.wait + self.warmup:
            return  # already written, or no recorded step has ended
        path = self.directory / f"rank{self._rank}.json.gz"
        if not self.replace and path.exists():
            _report(f"{path} exists and is kept: this training is not captured")
            return
        # Write, then rename, so that no process reads an unfinished trace. tutti.measure.files may
        # not be installed here.
        unfinished = self.directory / f".rank{self._rank}.{os.getpid()}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        self.path = path
        if self.tensorboard is not None:
            self.tensorboard.mkdir(parents=True, exist_ok=True)
            # TensorBoard's plugin uses the text before the time as the name of the worker.
            name = f"rank{self._rank}.{time.time_ns()}.pt.trace.json.gz"
            shutil.copyfile(path, self.tensorboard / name)

    def _end_program(self) -> None:
        """End all ranks after the same step, like sys.exit, so that exit handlers run."""
        local_ranks = min(self._size, int(os.environ.get("LOCAL_WORLD_SIZE", self._size)))
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        while len(list(self.directory.glob("rank*"))) < local_ranks:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        raise SystemExit(0)

    def _metadata(self) -> dict[str, Any]:
        """Data that torch does not write to a trace; stored in the trace under the key `tutti`."""
        metadata: dict[str, Any] = {
            "backend": "none",
            "host": socket.gethostname(),  # torch 2.11 does not write host_name
            "host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "recorder": [],
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        if _cuda_in_use():
            metadata["device_memory_bytes"] = torch.cuda.max_memory_allocated()
        if dist.is_available() and dist.is_initialized():
            metadata["backend"] = dist.get_backend()
            with contextlib.suppress(Exception):  # the recorder is not a stable interface
                metadata["recorder"] = _recorded_collectives()
        unrecorded, recorded = self._unrecorded_times.seconds(), self._recorded_times.seconds()
        overhead = None
        if recorded and unrecorded:
            overhead = statistics.median(recorded) / statistics.median(unrecorded)
        return metadata | {
            "rank": self._rank,
            "world_size": self._size,
            # ProfilerStep#n is complete if n < steps: torch also ends the range of the step during
            # which the capture stops.
            "steps": self._steps,
            "step_s": unrecorded,
            "overhead": overhead,
            "batch": self._batch,
        }


class _StepTimer:
    """Step times from the host's clock, or from CUDA events, which do not block the host."""

    def __init__(self) -> None:
        self._host_times: list[tuple[float, float]] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started: float | torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def begin(self, device: torch.device | None) -> None:
        """Record the start of a step on a GPU, or on the host if `device` is None."""
        self._device = device
        self._started = time.perf_counter() if device is None else _record_event(device)

    def end(self) -> None:
        """Record the end of the step; does nothing if no step has begun."""
        if isinstance(self._started, float):
            self._host_times.append((self._started, time.perf_counter()))
        elif self._started is not None and self._device is not None:
            self._events.append((self._started, _record_event(self._device)))
        self._started = None

    def seconds(self) -> list[float]:
        """All step times in order; synchronizes with the device."""
        if self._events:
            self._events[-1][1].synchronize()
        on_device = [start.elapsed_time(end) / 1e3 for start, end in self._events]
        return on_device + [end - start for start, end in self._host_times]


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _cuda_in_use() -> bool:
    """Whether the program has initialized CUDA; this function does not initialize CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _recorded_collectives() -> list[dict[str, Any]]:
    """The collectives of gloo groups in torch's flight recorder."""
    recorder: Any = torch._C._distributed_c10d
    entries = json.loads(recorder._dump_fr_trace_json()).get("entries", [])
    return [
        {
            "name": entry["profiling_name"],
            "group": str(entry["process_group"][0]),
            "seq": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "created_ns": entry["time_created_ns"],
        }
        for entry in entries[-_RECORDER_ENTRIES:]
        if str(entry["profiling_name"]).startswith("gloo:")
    ]


def _report(text: str) -> None:
    print(f"tutti profile: {text}", file=sys.stderr)
