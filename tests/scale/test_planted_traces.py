"""Planted causes in simulated traces of two CPU ranks, in the shape of six kinds of program.

The simulation knows how long each step takes without the profiler. The recorded traces are slower:
operators and the gaps between them take 1.3 times as long. Sleeps, waiting and transfers do not.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.profile.calibration import typical_parts
from tutti.profile.explain import explain
from tutti.scale.scale_runs import measured_step, recorded_steps

KINDS = ("ddp", "fsdp2", "accelerate", "lightning", "hf_trainer", "tutti")
# The place where each cause is planted, and the part in which it must appear.
PLANTS = {
    "input": "input",
    "loop": "host_gap",
    "forward": "host_gap",
    "gradient hook": "host_gap",
    "operators": "compute",
    "late rank": "wait",
    "transfer": "exposed",
}
PLANTED = 40_000.0  # µs
ENGINE = "autograd::engine::evaluate_function: "
STEPS, RECORDING = 4, 1.3


class Simulation:
    """Two ranks that run in step, with events in µs."""

    def __init__(self, kind: str, plant: str | None, slowed: float) -> None:
        self.kind, self.plant, self.slowed = kind, plant, slowed
        self.now = [0.0, 0.0]
        self.events: list[list[dict[str, Any]]] = [[], []]
        self.sequence = 0
        self.lengths: list[float] = []
        for number in range(STEPS):
            begin = list(self.now)
            self._step()
            for rank in range(2):
                self._event(rank, "user_annotation", f"ProfilerStep#{number}", begin[rank])
                if self.kind == "lightning":  # the closure runs inside of the optimizer
                    self._event(rank, "user_annotation", "Optimizer.step#SGD.step", begin[rank])
            self.lengths.append(sum(self.now) / 2 - sum(begin) / 2)

    def _event(
        self, rank: int, category: str, name: str, start: float, end: float = 0.0, thread: int = 7
    ) -> dict[str, Any]:
        end = end or self.now[rank]
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}
        event |= {"pid": 0, "tid": thread, "args": {}}
        self.events[rank].append(event)
        return event

    def _sleep(self, place: str, *ranks: int) -> None:
        if self.plant == place:
            for rank in ranks:
                self.now[rank] += PLANTED

    def _operators(self, rank: int, count: int, each: float = 500.0) -> None:
        for _ in range(count):
            start = self.now[rank]
            self.now[rank] += each * self.slowed
            self._event(rank, "cpu_op", "aten::mm", start)
            self.now[rank] += 40 * self.slowed  # the code between two operators

    def _input(self) -> None:
        for rank in range(2):
            start = self.now[rank]
            self.now[rank] += 2000
            self._sleep("input", rank)
            loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            name = "tutti.input" if self.kind == "tutti" else loader
            self._event(rank, "user_annotation", name, start)

    def _collective(self, call: str, run: str, transfer: float, planted: bool = False) -> None:
        """All ranks call at their own time. Data moves after the last call."""
        self.sequence += 1
        transfer += PLANTED * (planted and self.plant == "transfer")
        done = max(self.now) + transfer
        for rank in range(2):
            called = self.now[rank]
            self.now[rank] = done
            if self.kind == "tutti":
                tag = f"phase=run|group=dp|bytes=4096|dtype=float32|seq={self.sequence}|ranks=2"
                self._event(rank, "user_annotation", f"tutti::{run}|{tag}", called)
                self._event(rank, "cpu_op", f"c10d::{call}", called)
                self._event(rank, "cpu_op", f"shm:{run}", called)
            else:
                self._event(rank, "cpu_op", f"c10d::{call}", called, called + 30)
                self._event(rank, "user_annotation", f"gloo:{run}", called + 30, done, thread=9)

    def _step(self) -> None:
        if self.kind != "accelerate":
            self._input()
        if self.kind == "fsdp2":
            self._collective("_allgather_base_", "all_gather", 1500)
        for rank in range(2):
            self._operators(rank, 8)
            self._sleep("forward", rank)
            if self.plant == "operators":
                self._operators(rank, 1, PLANTED / self.slowed)
        self._sleep("late rank", 1)
        for rank in range(2):
            start = self.now[rank]
            self._operators(rank, 8)
            self._sleep("gradient hook", rank)
            self._event(rank, "cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", start)
        if self.kind == "fsdp2":
            self._collective("_reduce_scatter_base_", "all_reduce", 3000, planted=True)
        else:
            self._collective("allreduce_", "all_reduce", 3000, planted=True)
        if self.kind == "accelerate":  # it loads the next batch before it returns this batch
            self._input()
        for rank in range(2):
            self._operators(rank, 2)
        if self.kind == "hf_trainer":
            self._collective("allgather_", "all_gather", 300)
        self._sleep("loop", 0, 1)

    def write(self, folder: Path) -> list[Path]:
        files = []
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}
        for rank, events in enumerate(self.events):
            info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": [group]}
            path = folder / f"rank{rank}.json"
            path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
            files.append(path)
        return files


def _parts(folder: Path, kind: str, plant: str | None) -> dict[str, float]:
    timed = [length / 1e6 for length in Simulation(kind, plant, 1.0).lengths]
    files = Simulation(kind, plant, RECORDING).write(folder)
    return dict(measured_step(typical_parts(recorded_steps(explain(files))), timed).parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_cause_appears_in_its_part_in_full_and_nowhere_else(
    tmp_path: Path, kind: str
) -> None:
    before = _parts(tmp_path, kind, None)
    assert before["compute"] == pytest.approx(9e-3, rel=0.02)
    assert abs(before["unexplained"]) < 1e-5
    for plant, part in PLANTS.items():
        after = _parts(tmp_path, kind, plant)
        grown = {name: after[name] - before[name] for name in after}
        expected = dict.fromkeys(grown, 0.0) | {part: PLANTED / 1e6}
        assert grown == pytest.approx(expected, abs=0.01 * PLANTED / 1e6), plant
