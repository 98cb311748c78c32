"""While it trains, every rank says what share of its steps it waits, and a late rank is named."""

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
    """A small model that sleeps in the forward passes of one rank, if it is told to."""
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
    """On every rank: what it wrote and said in 46 steps."""
    from tutti.train.run_directory import RunDirectory
    from tutti.train.trainer import Trainer
    from tutti.world.exchange import gather_json

    sys.modules.setdefault("test_live_wait", sys.modules[train.__module__])
    recipe = RECIPES["lenet"]
    recipe = replace(
        recipe,
        model="test_live_wait:model",
        length=replace(recipe.length, steps=46, evaluate=False),
        parallel=replace(recipe.parallel, layout=layout),
    )
    said = StringIO()
    given = default_group("gloo") if backend == "gloo" else nullcontext()
    with given, tempfile.TemporaryDirectory() as folder, redirect_stderr(said):
        directory = RunDirectory(Path(gather_json(folder)[0]))
        trainer = Trainer(world, recipe, directory, save=False)
        if world.is_first:
            directory.create()
        gather_json(None)  # the folder is there
        trainer.model.sleeps = sleeps
        trainer.run()
        lines = map(json.loads, trainer.metrics.path.read_text().splitlines())
        rows = [each for each in lines if "wait_fraction" in each]
        gather_json(None)  # all have read
    return {
        "fractions": [each["wait_fraction"] for each in rows],
        "waited_s": [
            each["wait_fraction"] * each["seconds_per_step"]
            for each in rows
            if each["wait_fraction"] is not None
        ],
        "said": said.getvalue(),
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
    """Each rank's account of four trainings in one world."""
    return in_world(train_all, RANKS)


@pytest.mark.measured
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_others_wait_what_the_late_rank_sleeps(
    runs: list[dict[str, Any]], backend: str
) -> None:
    waited = [fmean(each[backend]["waited_s"]) for each in runs]

    assert waited[LATE] < 0.2 * SLEEP_S
    for rank in set(range(RANKS)) - {LATE}:
        assert 0.7 * SLEEP_S < waited[rank] < 1.5 * SLEEP_S  # room for a loaded machine


@pytest.mark.measured
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_late_rank_is_named_once_by_the_first_rank(
    runs: list[dict[str, Any]], backend: str
) -> None:
    said = [each[backend]["said"] for each in runs]

    assert said[0].count(" late: ") == 1
    assert f"rank {LATE} is late: the others wait " in said[0]
    assert "% of the step for it (last 2" in said[0]  # 20 steps, or a few more
    assert not any(said[1:])


@pytest.mark.measured
def test_without_the_sleep_it_is_not_named_and_the_waiting_is_gone(
    runs: list[dict[str, Any]],
) -> None:
    assert f"rank {LATE} is late" not in runs[0]["even"]["said"]
    for rank in set(range(RANKS)) - {LATE}:  # some is left: four ranks share what cores there are
        even, late = (fmean(runs[rank][which]["waited_s"]) for which in ("even", "shm"))
        assert even < late / 2


@pytest.mark.gpu
@pytest.mark.measured
@pytest.mark.timeout(300)
def test_on_a_gpu_the_events_of_the_device_say_the_same() -> None:
    runs = in_world(train, RANKS, "nccl", True, None, gpu=True, timeout=200)

    waited = [fmean(each["waited_s"]) for each in runs]
    assert waited.pop(LATE) < 0.2 * SLEEP_S
    assert all(0.7 * SLEEP_S < each < 1.5 * SLEEP_S for each in waited)
    assert f"rank {LATE} is late: the others wait " in runs[0]["said"]


def test_it_is_not_known_where_ranks_meet_inside_forward(runs: list[dict[str, Any]]) -> None:
    fractions = [each["sharded"]["fractions"] for each in runs]

    assert all(fractions) and not any(value is not None for each in fractions for value in each)


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


def test_shares_are_of_the_step_and_not_known_for_the_first_one() -> None:
    stragglers = Stragglers(0)

    assert stragglers.add(_status(0, [(0.05, 0.09)])) == [None, None]
    assert stragglers.add(_status(1, [(0.05, 0.07), (0.09, 0.07)])) == pytest.approx([0.1, 0.1])
    assert stragglers.add(_status(3, [(0.05, math.nan)])) == [None, None]
    assert stragglers.add(_status(4, [(0.05,)])) == [0.0]  # alone


def test_ranks_that_are_late_together_are_named_together_and_not_again_soon() -> None:
    stragglers = Stragglers(0)
    stragglers.add(_status(1, [(0.05, 0.05, 0.07, 0.07)] * 19))
    assert stragglers.warning() is None  # too early to tell
    stragglers.add(_status(20, [(0.05, 0.05, 0.07, 0.07)]))

    assert stragglers.warning() == (
        "ranks 2, 3 are late: the others wait 20 % of the step for them (last 20 steps)"
    )
    stragglers.add(_status(21, [(0.05, 0.05, 0.07, 0.07)] * 20))
    assert stragglers.warning() is None
    stragglers.add(_status(2000, [(0.09, 0.05, 0.05, 0.05)] * 20))
    assert stragglers.warning() == (
        "rank 0 is late: the others wait 40 % of the step for it (last 20 steps)"
    )


@pytest.mark.parametrize(
    "owns",
    [
        [(0.05, 0.05, 0.055)] * 20,  # 5 % of the step
        [(0.05, 0.09), (0.09, 0.05)] * 10,  # in turn: noise
        [(0.05, 0.05, 0.05)] * 18 + [(0.05, 0.05, 0.5)] * 2,  # twice: no habit
    ],
)
def test_noise_is_not_a_late_rank(owns: list[tuple[float, ...]]) -> None:
    stragglers = Stragglers(0)
    stragglers.add(_status(1, owns))

    assert stragglers.warning() is None
