"""During training every rank records the fraction of a step spent waiting; stragglers are named."""

import json
import math
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tutti.train.recipe import RECIPES
from tutti.train.telemetry import Status, Stragglers
from worlds import default_group, in_world

RANKS, LATE, SLEEP_S = 4, 2, 0.03


def model() -> Any:
    """A small model that sleeps in the forward pass of one rank if `sleeps` is set."""
    import torch.distributed as dist
    from torch import nn

    class Model(nn.Sequential):
        sleeps = False

        def forward(self, x: Any) -> Any:
            if self.sleeps and dist.get_rank() == LATE:
                time.sleep(SLEEP_S)
            return super().forward(x)

    return Model(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def train(world: Any, backend: str, sleeps: bool, layout: str | None) -> dict[str, Any]:
    """Train 46 steps; returns the metrics and the standard error of this rank."""
    from tutti.train.loop import Trainer
    from tutti.train.run_directory import RunDirectory
    from tutti.world.exchange import gather_json

    sys.modules.setdefault("test_live_wait", sys.modules[train.__module__])
    recipe = RECIPES["lenet"]
    recipe = replace(
        recipe,
        model="test_live_wait:model",
        length=replace(recipe.length, steps=46, evaluate=False),
        parallel=replace(recipe.parallel, layout=layout),
    )
    stderr = StringIO()
    group = default_group("gloo") if backend == "gloo" else nullcontext()
    with group, tempfile.TemporaryDirectory() as folder, redirect_stderr(stderr):
        directory = RunDirectory(Path(gather_json(folder)[0]))
        trainer = Trainer(world, recipe, directory, save=False)
        if world.is_first:
            directory.create()
        gather_json(None)  # after this, the folder exists
        trainer.model.sleeps = sleeps
        trainer.run()
        lines = map(json.loads, trainer.metrics.path.read_text().splitlines())
        rows = [row for row in lines if "wait_fraction" in row]
        gather_json(None)  # after this, all ranks have read their file
    return {
        "fractions": [row["wait_fraction"] for row in rows],
        "waited_s": [
            row["wait_fraction"] * row["seconds_per_step"]
            for row in rows
            if row["wait_fraction"] is not None
        ],
        "stderr": stderr.getvalue(),
    }


def train_all(world: Any) -> dict[str, Any]:
    return {
        "gloo": train(world, "gloo", True, None),
        "shm": train(world, "shm", True, None),
        "even": train(world, "shm", False, None),
        "sharded": train(world, "shm", False, "shard4"),
    }


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """Return the results of each rank for four trainings in one world."""
    return in_world(train_all, RANKS)


@pytest.mark.measured
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_other_ranks_wait_as_long_as_the_straggler_sleeps(
    runs: list[dict[str, Any]], backend: str
) -> None:
    waited = [fmean(run[backend]["waited_s"]) for run in runs]

    assert waited[LATE] < 0.2 * SLEEP_S
    for rank in set(range(RANKS)) - {LATE}:
        assert 0.7 * SLEEP_S < waited[rank] < 1.5 * SLEEP_S  # tolerates a loaded machine


@pytest.mark.measured
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_rank_0_names_the_straggler_once(runs: list[dict[str, Any]], backend: str) -> None:
    stderr = [run[backend]["stderr"] for run in runs]

    assert stderr[0].count(" late: ") == 1
    assert f"rank {LATE} is late: " in stderr[0]
    assert "% of the step (last 2" in stderr[0]  # 20 steps, or a few more
    assert not any(stderr[1:])


@pytest.mark.measured
def test_without_the_sleep_no_straggler_is_named_and_ranks_wait_less(
    runs: list[dict[str, Any]],
) -> None:
    assert f"rank {LATE} is late" not in runs[0]["even"]["stderr"]
    for rank in set(range(RANKS)) - {LATE}:  # some waiting remains: four ranks share the cores
        even, late = (fmean(runs[rank][which]["waited_s"]) for which in ("even", "shm"))
        assert even < late / 2


@pytest.mark.gpu
@pytest.mark.measured
@pytest.mark.timeout(300)
def test_on_a_gpu_cuda_events_give_the_same_waiting_times() -> None:
    runs = in_world(train, RANKS, "nccl", True, None, gpu=True, timeout=200)

    waited = [fmean(run["waited_s"]) for run in runs]
    assert waited.pop(LATE) < 0.2 * SLEEP_S
    assert all(0.7 * SLEEP_S < seconds < 1.5 * SLEEP_S for seconds in waited)
    assert f"rank {LATE} is late: " in runs[0]["stderr"]


def test_waiting_is_unknown_where_ranks_communicate_in_forward(runs: list[dict[str, Any]]) -> None:
    fractions = [run["sharded"]["fractions"] for run in runs]

    assert all(fractions) and not any(value is not None for rank in fractions for value in rank)


def _status(first: int, owns: list[tuple[float, ...]], seconds: float = 0.1) -> Status:
    return Status(
        first_step=first,
        losses=(0.0,) * len(owns),
        nonfinite=None,
        stop=False,
        rates=(0.0,) * len(owns[0]),
        seconds=seconds * len(owns),
        own_seconds=tuple((first + step, own) for step, own in enumerate(owns)),
    )


def test_the_waiting_fraction_is_unknown_for_the_first_step() -> None:
    stragglers = Stragglers(0)

    assert stragglers.add(_status(0, [(0.05, 0.09)])) == [None, None]
    assert stragglers.add(_status(1, [(0.05, 0.07), (0.09, 0.07)])) == pytest.approx([0.1, 0.1])
    assert stragglers.add(_status(3, [(0.05, math.nan)])) == [None, None]
    assert stragglers.add(_status(4, [(0.05,)])) == [0.0]  # one rank


def test_several_late_ranks_are_named_in_one_warning_that_is_not_repeated_soon() -> None:
    stragglers = Stragglers(0)
    stragglers.add(_status(1, [(0.05, 0.05, 0.07, 0.07)] * 19))
    assert stragglers.warning() is None  # fewer than 20 measured steps
    stragglers.add(_status(20, [(0.05, 0.05, 0.07, 0.07)]))

    warning = stragglers.warning() or ""
    assert "ranks 2, 3 are late" in warning
    assert "20 % of the step (last 20 steps)" in warning
    stragglers.add(_status(21, [(0.05, 0.05, 0.07, 0.07)] * 20))
    assert stragglers.warning() is None
    stragglers.add(_status(2000, [(0.09, 0.05, 0.05, 0.05)] * 20))
    warning = stragglers.warning() or ""
    assert "rank 0 is late" in warning and "40 % of the step" in warning


@pytest.mark.parametrize(
    "owns",
    [
        [(0.05, 0.05, 0.055)] * 20,  # late by 5 % of the step
        [(0.05, 0.09), (0.09, 0.05)] * 10,  # late alternately
        [(0.05, 0.05, 0.05)] * 18 + [(0.05, 0.05, 0.5)] * 2,  # late in two steps only
    ],
)
def test_random_delays_give_no_warning(owns: list[tuple[float, ...]]) -> None:
    stragglers = Stragglers(0)
    stragglers.add(_status(1, owns))

    assert stragglers.warning() is None
