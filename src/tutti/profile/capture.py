"""Capture: torch.profiler on this rank for a few steps, one trace file per rank.

This file imports torch and the standard library alone: under `tutti profile -- COMMAND` it is
loaded by its path into programs that may not have tutti at all.
"""

import atexit
import contextlib
import json
import os
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity

# Entries of torch's flight recorder that go into a trace: it knows group and sequence number of
# every collective, which a gloo trace does not.
_RECORDER_ENTRIES = 20_000


class Capture:
    """Records `active` steps after `wait` + `warmup` steps, and writes `rankN.json.gz`.

    with tutti.profile("traces") as p:
        for batch in loader:
            train(batch)
            p.step()

    `shapes` None: shapes are recorded where sizes of messages cannot be known otherwise, on CPUs.
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
    ) -> None:
        if active < 1 or wait < 0 or warmup < 0:
            raise ValueError(f"wait {wait}, warmup {warmup}, active {active}: at least 0, 0 and 1")
        self.directory = Path(directory)
        self.wait, self.warmup, self.active = wait, warmup, active
        self.shapes, self.memory, self.stacks = shapes, memory, stacks
        self.path: Path | None = None  # of the trace, once it is written
        self._profiler: torch.profiler.profile | None = None
        self._over = False
        self._steps = 0
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._handle: Any = None

    def __enter__(self) -> "Capture":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """A step of training has ended."""
        if self._over or self._profiler is None:
            return
        self._steps += 1
        if self._steps == self.wait:
            self._give_way()
        if self._over:
            return
        if self._steps < self.wait + self.warmup + self.active:
            self._profiler.step()
        else:
            self.close()

    def close(self) -> None:
        """Stop, and write what was recorded, if anything was. Safe to call again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._over:
            return
        self._over = True
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            if self._steps >= self.wait + self.warmup:
                # Before the end: what is added later does not reach the file.
                profiler.add_metadata_json("tutti", json.dumps(self._about(), default=str))
            profiler.stop()  # calls _write if steps were being recorded

    def follow_optimizers(self) -> "Capture":
        """Find the steps by torch's hook on all optimizers. Nothing is recorded before the first
        one steps, so processes that do not train are left alone.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._handle = register_optimizer_step_post_hook(self._on_optimizer_step)
        atexit.register(self._at_exit)  # a program may end before the schedule does
        return self

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # With several optimizers (a GAN, one per parameter) a step is a step of the first.
        if self._leader is None:
            self._leader = weakref.ref(optimizer)
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
            self._over, self._profiler = True, None
            print(f"tutti profile: nothing more is captured: {error}", file=sys.stderr)

    def _give_way(self) -> None:
        """torch has one profiler at a time: a program that uses it keeps it."""
        if torch.autograd.profiler._is_profiler_enabled:
            self._over, self._profiler = True, None
            raise RuntimeError("the program runs a torch.profiler of its own: leave that out")

    def _start(self) -> None:
        if self.wait == 0:
            self._give_way()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # NCCL puts sizes into the trace by itself.
        shapes = len(activities) == 1 if self.shapes is None else self.shapes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._rank, self._size = _identity()
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=self._action,
            on_trace_ready=self._write,
            record_shapes=shapes,
            profile_memory=self.memory,
            with_stack=self.stacks,
        )
        self._profiler.start()

    def _action(self, step: int) -> ProfilerAction:
        """As torch.profiler.schedule, but without its warning about a warm-up of none."""
        if step < self.wait:
            return ProfilerAction.NONE
        if step < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD  # until close()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self.path is not None:
            return
        path = self.directory / f"rank{self._rank}.json.gz"
        # Beside it first: a reader never sees half a trace.
        unfinished = self.directory / f".rank{self._rank}.{os.getpid()}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        self.path = path

    def _about(self) -> dict[str, Any]:
        """What a trace does not say by itself."""
        about: dict[str, Any] = {
            "rank": self._rank,
            "world_size": self._size,
            "backend": "none",
            "host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "recorder": [],
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        }
        if torch.cuda.is_available():
            about["device_memory_bytes"] = torch.cuda.max_memory_allocated()
        if dist.is_available() and dist.is_initialized():
            about["backend"] = dist.get_backend()
            with contextlib.suppress(Exception):  # the recorder is not a stable interface
                about["recorder"] = _recorded()
        return about


def _identity() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _recorded() -> list[dict[str, Any]]:
    """The collectives of gloo groups, as the flight recorder has them, in short."""
    dump: Any = torch._C._distributed_c10d
    entries = json.loads(dump._dump_fr_trace_json()).get("entries", [])
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
