"""Timelines of schedules: the drawn order is the order that runs, and bubbles are correct."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tutti
from tutti.cli.parity import show_schedule
from tutti.parallel.layout import ParallelOptions, ScheduleName
from tutti.parallel.pipeline.schedule_timeline import (
    Action,
    action_orders,
    bubble,
    bubble_formula,
    draw,
    length,
    measure,
    simulate,
)
from worlds import in_world, run_warm

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
RANKS, MICROBATCHES = 3, 6


def _per_rank(name: ScheduleName) -> int:
    return ParallelOptions(pipeline_schedule=name).virtual_stages


def _ran(world: tutti.World) -> dict[str, Any]:
    torch.set_num_threads(1)
    ran = {}
    for name in SCHEDULES:
        timeline = measure(world, ParallelOptions(pipeline_schedule=name), MICROBATCHES)
        ran[name] = [
            [[span.action.kind, span.action.stage, span.action.microbatch] for span in spans]
            for spans in timeline
        ]
        assert all(
            before.end <= after.start
            for spans in timeline
            for before, after in itertools.pairwise(spans)
        )
        assert 0 <= bubble(timeline) < 1
    return ran


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """The recorded timelines of three ranks, gathered on rank 0."""
    timelines: dict[str, Any] = in_world(_ran, RANKS)[0]
    return timelines


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_that_is_drawn_is_the_order_that_runs(
    ran: dict[str, Any], name: ScheduleName
) -> None:
    real = [[Action(*row) for row in rows] for rows in ran[name]]
    assert action_orders(name, RANKS, MICROBATCHES, _per_rank(name)) == real


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_action_starts_before_its_inputs_are_computed(name: ScheduleName) -> None:
    timeline = simulate(action_orders(name, 4, 8, _per_rank(name)))
    last = 4 * _per_rank(name) - 1
    ends = {span.action: span.end for spans in timeline for span in spans}
    kinds = {action.kind for action in ends}
    assert kinds == ({"F", "B"} if name in ("gpipe", "1f1b", "interleaved") else {"F", "I", "W"})
    assert len(ends) == 8 * (last + 1) * len(kinds)  # every action once
    back = "B" if "B" in kinds else "I"
    for spans in timeline:
        for span in spans:
            kind, stage, number = span.action.kind, span.action.stage, span.action.microbatch
            if kind == "F" and stage > 0:
                assert span.start >= ends[Action("F", stage - 1, number)]
            if kind == back:
                assert span.start >= ends[Action("F", stage, number)]
                if stage < last:
                    assert span.start >= ends[Action(back, stage + 1, number)]  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 4), st.integers(0, 5))
def test_the_counted_bubble_equals_the_formula(
    name: ScheduleName, ranks: int, rounds: int, more: int
) -> None:
    microbatches = ranks * rounds + (more if name in ("gpipe", "1f1b", "zbv") else 0)
    closed = bubble_formula(name, ranks, microbatches, _per_rank(name))
    if closed is None:
        assert name == "zbv" and microbatches < 2 * ranks - 1
        return
    timeline = simulate(action_orders(name, ranks, microbatches, _per_rank(name)))
    assert bubble(timeline) == pytest.approx(closed, abs=1e-12)


def test_bubbles_equal_published_values() -> None:
    counted = {
        name: bubble(simulate(action_orders(name, 4, 8, _per_rank(name)))) for name in SCHEDULES
    }
    papers = {"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 3 / 19}
    assert counted == pytest.approx(papers | {"zero-bubble": 3 / 51, "zbv": 3 / 51})


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_drawing_fits_its_width_and_has_every_action(name: ScheduleName) -> None:
    timeline = simulate(action_orders(name, 4, 8, _per_rank(name)))
    lines = draw(timeline)
    assert max(map(len, lines)) <= 80
    several = _per_rank(name) > 1
    for rank, spans in enumerate(timeline):
        row = "".join(line[8:] for line in lines if line.startswith(f"rank {rank}"))
        shown = re.findall(r"\d*[FBIW]\d+", row)
        assert shown == [
            f"{s.action.stage if several else ''}{s.action.kind}{s.action.microbatch}"
            for s in spans
        ]


def test_a_drawing_is_to_scale() -> None:
    timeline = simulate(action_orders("1f1b", 2, 2, 1))
    assert length(timeline) == 9
    assert draw(timeline) == [
        "rank 0  F0-F1-......B0====...B1====",
        "rank 1  ...F0-B0====F1-B1====......",
    ]


def _simulated_only(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert show_schedule(["--no-measure", *flags]) == 0
    return capsys.readouterr().out


def test_the_command_prints_and_writes_the_simulated_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schedule.json"
    text = _simulated_only(
        capsys, "--schedule", "gpipe", "--pp", "3", "--accumulation", "4", "--json", str(file)
    )
    assert "schedule gpipe: 3 ranks × 1 stage, 4 microbatches" in text
    assert "rank 2  ......F0-F1-F2-F3-B0====" in text
    assert "bubble: simulated 33.3%, by the formula 33.3%" in text
    assert max(map(len, text.splitlines())) <= 80
    written = json.loads(file.read_text())
    assert written["schema"] == "tutti.schedule/1"
    assert written["bubble"] == {"counted": pytest.approx(1 / 3), "formula": pytest.approx(1 / 3)}
    assert len(written["counted"]) == 3 * 4 * 2 and written["measured"] is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--accumulation", "2"], "use --accumulation 4"),
        (["--pp", "1"], "--pp must be at least 2, got 1"),
        (["--schedule", "zbv", "--stages-per-rank", "3"], "zbv needs 2 stages"),
        (["--schedule", "interleaved", "--accumulation", "9"], "use --accumulation 10"),
    ],
)
def test_the_command_refuses_schedules_that_cannot_run(flags: list[str], text: str) -> None:
    with pytest.raises(tutti.UsageError, match=re.escape(text)):
        show_schedule(flags)


def test_the_command_measures_on_ranks_that_it_starts(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    flags = ["--pp", "2", "--accumulation", "2", "--device", "cpu", "--json", file]
    done = run_warm(["-m", "tutti", "parity", "--show-schedule", *flags])
    assert done.returncode == 0, done.stderr
    assert re.search(r"bubble: simulated 33\.3%, by the formula 33\.3%, measured \d", done.stdout)
    rows = json.loads(file.read_text())["measured"]
    assert [row["kind"] for row in rows if row["rank"] == 0] == ["F", "F", "B", "B"]
