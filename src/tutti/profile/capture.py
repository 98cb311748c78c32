"""Capture: torch.profiler on this rank for a few steps, one trace file per rank.

This file imports torch, the standard library and its neighbours alone: under `tutti profile --
COMMAND` it is loaded by its path into programs that may not have tutti at all.
"""

import atexit
import json
import os
import shutil
import statistics
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from .batch_watch import BatchWatch
from .nvtx_ranges import NvtxRanges
from .other_profilers import OtherProfilers
from .step_clock import StepClock
from .surroundings import cuda_in_use, device_of, identity, surroundings

_OTHER = "the program runs a torch.profiler of its own: leave that out"
# How long a rank that has written its trace waits for the others before it ends the program.
_PATIENCE_SECONDS = 60.0


class Capture:
    """Records `active` steps after `wait` + `warmup` steps, and writes `rankN.json.gz`.

    with tutti.profile("traces") as p:
        for batch in loader:
            train(batch)
            p.step()

    `shapes` None: shapes are recorded where sizes of messages cannot be known otherwise, in
    programs that compute on CPUs.
    `tensorboard` is a folder that traces are put into as TensorBoard's profile plugin names them.
    `nvtx` marks the steps for Nsight Systems instead of recording them; it needs CUDA.
    `batch` is how many samples a step of this rank has; None: as the program's loader says.
    With `stop` the program ends when all ranks have written: what follows is of no interest.
    Without `replace` a trace that is there stays: a command may train more than once.
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
            raise ValueError(f"wait {wait}, warmup {warmup}, active {active}: at least 0, 0 and 1")
        if nvtx and not torch.cuda.is_available():
            raise ValueError("nvtx marks steps for Nsight Systems and needs CUDA: leave it out")
        # Kineto tells on standard error when it starts and stops, unless it is told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.directory = Path(directory)
        self.wait, self.warmup, self.active = wait, warmup, active
        self.shapes, self.memory, self.stacks = shapes, memory, stacks
        self.tensorboard = None if tensorboard is None else Path(tensorboard)
        self.nvtx, self.stop, self.replace = nvtx, stop, replace
        self.path: Path | None = None  # of the trace, once it is written
        self._profiler: torch.profiler.profile | NvtxRanges | None = None
        self._over = False
        self._steps = 0
        self._batch, self._batches = batch, BatchWatch()
        self._others = OtherProfilers(self._make_room, lambda each: each is self._profiler)
        self._device: torch.device | None = None  # where the program computes
        self._alone, self._recorded = StepClock(), StepClock()  # steps in `wait` and in `active`
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._handle: Any = None

    def __enter__(self) -> "Capture":
        if cuda_in_use():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._others.begin()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """A step of training has ended."""
        if self._over or self._profiler is None:
            return
        (self._alone if self._steps < self.wait else self._recorded).end()
        self._steps += 1
        if self._steps == self.wait:
            self._give_way()
        if self._over:
            return
        if self._steps < self.wait + self.warmup + self.active:
            self._profiler.step()
            self._begin_step()
        else:
            self.close()
            if self.stop:
                self._end_program()

    def _begin_step(self) -> None:
        if self._steps < self.wait:
            self._alone.begin(self._device)
        elif self._steps >= self.wait + self.warmup:
            self._recorded.begin(self._device)

    def close(self) -> None:
        """Stop, and write what was recorded, if anything was. Safe to call again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._over:
            return
        self._over = True
        self._others.end()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            seen = self._batches.end(self._steps)
            self._batch = self._batch or seen
            first, last = self.wait + self.warmup, self._steps
            if isinstance(profiler, NvtxRanges):
                if last > first and self._rank == 0:
                    steps = f"steps {first} to {last - 1} are"
                    print(f"tutti profile: {steps} marked for Nsight Systems", file=sys.stderr)
            elif last > first:
                # Before the end: what is added later does not reach the file.
                profiler.add_metadata_json("tutti", json.dumps(self._about(), default=str))
            profiler.stop()  # calls _write if steps were being recorded

    def _end_program(self) -> None:
        """As sys.exit would: the program's own endings run, on all ranks at the same step."""
        here = min(self._size, int(os.environ.get("LOCAL_WORLD_SIZE", self._size)))
        patience = time.monotonic() + _PATIENCE_SECONDS
        while len(list(self.directory.glob("rank*"))) < here and time.monotonic() < patience:
            time.sleep(0.02)
        raise SystemExit(0)

    def follow_optimizers(self) -> "Capture":
        """Find the steps by torch's hook on all optimizers. Nothing is recorded before the first
        one steps, so processes that do not train are left alone.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._others.begin()
        self._handle = register_optimizer_step_post_hook(self._on_optimizer_step)
        atexit.register(self._at_exit)  # a program may end before the schedule does
        return self

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if cuda_in_use() and torch.cuda.is_current_stream_capturing():
            return  # a step that is written into a CUDA graph does not run now
        # With several optimizers (a GAN, one per parameter) a step is a step of the first.
        if self._leader is None:
            self._leader = weakref.ref(optimizer)
            self._device = device_of(optimizer)
            self._try(self._start)
        elif self._leader() is optimizer:
            self._try(self.step)
        elif self._leader() is None:
            self._leader = weakref.ref(optimizer)

    def _at_exit(self) -> None:
        if self._profiler is not None and not self._over:
            needed = self.wait + self.warmup + self.active + 1
            print(
                f"tutti profile: the program took {self._steps + 1} steps, the schedule is "
                f"{needed}: give --wait, --warmup or --active less, or train longer",
                file=sys.stderr,
            )
            self._try(self.close)

    def _try(self, action: Any) -> None:
        """A program is never stopped by what watches it."""
        try:
            action()
        except Exception as error:
            self._let_go()
            print(f"tutti profile: nothing more is captured: {error}", file=sys.stderr)

    def _let_go(self) -> None:
        self._over, self._profiler = True, None
        self._batches.end(0)
        self._others.end()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _give_way(self) -> None:
        """torch has one profiler at a time: a program that uses it keeps it."""
        if self._others.any():
            self._let_go()
            raise RuntimeError(_OTHER)

    def _make_room(self, another: Any) -> None:
        """One is about to begin while ours is on: ours ends, with the steps that it has."""
        ours = self._profiler
        if ours is None or self._steps < self.wait or getattr(ours, "profiler", None) is another:
            return
        self._try(self.close)
        if isinstance(ours, NvtxRanges):
            ours.end()
        print(f"tutti profile: nothing more is captured: {_OTHER}", file=sys.stderr)

    def _start(self) -> None:
        if self.wait == 0:
            self._give_way()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # NCCL puts sizes into the trace by itself. The host may have GPUs that nobody here uses.
        shapes = self._device is None if self.shapes is None else self.shapes
        self._rank, self._size = identity()
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
        self._batches.begin()
        self._begin_step()

    def _action(self, step: int) -> ProfilerAction:
        """As torch.profiler.schedule, but without its warning about a warm-up of none."""
        if step < self.wait:
            return ProfilerAction.NONE
        if step < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD  # until close()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self.path is not None or self._steps <= self.wait + self.warmup:
            return  # it is written, or not one step that was recorded has ended
        path = self.directory / f"rank{self._rank}.json.gz"
        if not self.replace and path.exists():
            kept = "is there already and stays: of this training nothing is kept"
            print(f"tutti profile: {path} {kept}", file=sys.stderr)
            return
        # Beside it first: a reader never sees half a trace.
        unfinished = self.directory / f".rank{self._rank}.{os.getpid()}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        self.path = path
        if self.tensorboard is not None:
            self.tensorboard.mkdir(parents=True, exist_ok=True)
            # The plugin takes what stands before the time for the name of the worker.
            name = f"rank{self._rank}.{time.time_ns()}.pt.trace.json.gz"
            shutil.copyfile(path, self.tensorboard / name)

    def _about(self) -> dict[str, Any]:
        """What a trace does not say by itself."""
        about = {
            **surroundings(),
            "rank": self._rank,
            "world_size": self._size,
            # ProfilerStep#n is a whole step if n is less: torch's last one ends where we stop.
            "steps": self._steps,
            "step_s": self._alone.seconds(),
            "overhead": None,
            "batch": self._batch,
        }
        recorded = self._recorded.seconds()
        if recorded and about["step_s"]:
            about["overhead"] = statistics.median(recorded) / statistics.median(about["step_s"])
        return about
