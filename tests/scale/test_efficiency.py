"""Efficiency and its loss by cause; runs are written by hand, no process is started."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.profile.step_breakdown import PARTS
from tutti.scale.efficiency import (
    LOSS_CAUSES,
    OTHER_CAUSES,
    Scaling,
    loss_by_cause,
)
from tutti.scale.forecast import Mode
from tutti.scale.scale_runs import Job, MeasuredRun, MeasuredStep, combine_ranks
from tutti.scale.scale_table import sweep_lines, sweep_rows

seconds = st.floats(0, 10, allow_nan=False)
ranks = st.lists(st.fixed_dictionaries(dict.fromkeys(PARTS, seconds)), min_size=1, max_size=5)
parts = ranks.map(combine_ranks).filter(lambda combined: sum(combined.values()) > 1e-3)
steps = st.builds(MeasuredStep, st.floats(1e-3, 10), parts)


@given(steps, steps, st.floats(0.01, 1))
def test_causes_add_up_to_the_lost_efficiency(
    step: MeasuredStep, base: MeasuredStep, ideal: float
) -> None:
    loss, other = loss_by_cause(step, base, ideal)

    assert tuple(loss) == LOSS_CAUSES and tuple(other) == OTHER_CAUSES
    scale = max(1.0, *map(abs, loss.values()), *map(abs, other.values()))
    efficiency = ideal * base.seconds / step.seconds
    assert sum(loss.values()) == pytest.approx(1 - efficiency, abs=1e-9 * scale)
    assert sum(other.values()) == pytest.approx(loss["other"], abs=1e-9 * scale)


@given(ranks)
def test_combined_parts_add_up_to_the_mean_step_and_waiting_does_not_shrink(
    parts: list[dict[str, float]],
) -> None:
    combined = combine_ranks(parts)

    mean = sum(sum(each.values()) for each in parts) / len(parts)
    assert sum(combined.values()) == pytest.approx(mean)
    assert combined["wait"] >= sum(each["wait"] for each in parts) / len(parts) - 1e-9


def _step(seconds: float, **parts: float) -> MeasuredStep:
    return MeasuredStep(seconds, combine_ranks([dict.fromkeys(PARTS, 0.0) | parts]))


def test_the_excess_of_a_slower_rank_counts_as_waiting_in_full() -> None:
    """One of two ranks sleeps for 60 ms: this is 60 ms of waiting, not the mean of 30 ms."""
    zero = dict.fromkeys(PARTS, 0.0)
    combined = combine_ranks(
        [zero | {"compute": 0.1, "wait": 0.06}, zero | {"compute": 0.1, "host_gap": 0.06}]
    )

    assert combined["wait"] == pytest.approx(0.06)
    assert combined["host_gap"] == 0
    assert combined["compute"] == pytest.approx(0.1)


def test_every_part_that_grows_is_a_cause() -> None:
    """Weak scaling with steps of 100 and 200 ms; recorded steps take 110 and 220 ms."""
    base = _step(0.10, compute=0.11)
    step = _step(
        0.20, compute=0.08, hidden=0.05, exposed=0.044, wait=0.011, input=0.022, host_gap=0.013
    )

    loss, other = loss_by_cause(step, base, ideal=1.0)

    assert sum(loss.values()) == pytest.approx(0.5)
    assert loss["exposed_comm"] == pytest.approx(44 / 220)
    assert loss["wait"] == pytest.approx(11 / 220)
    assert loss["input"] == pytest.approx(22 / 220)
    assert loss["bubble"] == 0
    assert other["compute"] == pytest.approx((80 + 50 - 110) / 220)
    assert other["gaps"] == pytest.approx(13 / 220)
    assert other["unexplained"] == pytest.approx(0.0)


def test_a_difference_between_recorded_and_timed_steps_is_unexplained() -> None:
    """Both recorded steps take 110 ms; without the profiler the second takes 137.5 ms."""
    loss, other = loss_by_cause(_step(0.1375, compute=0.11), _step(0.11, compute=0.11), ideal=1.0)

    assert other["unexplained"] == pytest.approx(0.2)
    assert loss == {**dict.fromkeys(LOSS_CAUSES, 0.0), "other": pytest.approx(0.2)}


def test_a_part_that_shrinks_more_than_ideal_is_a_negative_cause() -> None:
    """Strong scaling over two ranks: the loader is fast enough for half a batch."""
    base = _step(0.2, compute=0.1, input=0.1)
    step = _step(0.08, compute=0.05, input=0.01, exposed=0.02)

    loss, _ = loss_by_cause(step, base, ideal=0.5)

    assert loss["input"] == pytest.approx(-0.5)
    assert loss["exposed_comm"] == pytest.approx(0.25)
    assert sum(loss.values()) == pytest.approx(1 - 0.5 * 0.2 / 0.08)


COMM = [
    {"op": "all_reduce", "ranks": 2, "bytes": size, "count": 5, "matched": 5}
    | {"transfer_s": {"p50": seconds}}
    for size, seconds in ((1000, 0.01), (100_000, 0.02))
]


def _run(ranks: int, repeat: int = 0, **fields: Any) -> MeasuredRun:
    """One rank takes 100 ms per step; more ranks also communicate for 20 ms."""
    parts = dict.fromkeys(("compute", "wait", "bubble", "input", "host_gap", "rest"), 0.0)
    parts |= {"compute": 0.1, "exposed": 0.02 if ranks > 1 else 0.0}
    values: dict[str, Any] = {
        **{"folder": Path(f"ranks{ranks}-repeat{repeat}"), "flags": {}, "samples": 16.0 * ranks},
        **{"step": MeasuredStep(sum(parts.values()), parts), "hidden": 0.0, "late": None},
        **{"overhead": 1.0, "comm": COMM if ranks > 1 else [], "notes": []},
    }
    return MeasuredRun(ranks=ranks, repeat=repeat, **values | fields)


@pytest.mark.parametrize(("samples", "mode"), [(32.0, "weak"), (16.0, "strong")])
@pytest.mark.parametrize("flag", ["weak", "strong"])
def test_counted_samples_override_the_mode_flag(samples: float, mode: Mode, flag: Mode) -> None:
    runs = [_run(1), _run(2, samples=samples)]

    scaling = Scaling(runs, flag)
    results = scaling.results()

    assert results["mode"] == mode
    assert results["forecast"] == Scaling(runs, mode).results()["forecast"]
    notes = [note for note in scaling.notes() if f"--mode {flag}" in note]
    assert notes == [] if flag == mode else f"{mode} scaling" in notes[0]


def test_no_forecast_if_samples_fit_neither_mode() -> None:
    results = Scaling([_run(1), _run(2, samples=24.0)], "weak").results()

    assert results["forecast"]["rows"] == []
    assert "neither" in results["forecast"]["reason"]


def test_without_counted_samples_the_mode_flag_is_used() -> None:
    scaling = Scaling([_run(1, samples=None), _run(2, samples=None)], "strong")

    assert scaling.results()["mode"] == "strong"
    assert scaling.results()["forecast"]["rows"]


def test_runs_of_a_sweep_with_other_flags_do_not_contradict_the_mode() -> None:
    runs = [
        _run(ranks, samples=float(batch * ranks), flags={"batch": str(batch)})
        for batch in (4, 64)
        for ranks in (1, 2)
    ]

    assert Scaling(runs, "weak").notes() == []


@pytest.mark.parametrize(
    ("repeats", "expected"), [(1, "--repeats 3"), (2, "--repeats 3"), (3, "--batch 64 is best")]
)
def test_a_swept_value_is_best_only_with_enough_repeats(repeats: int, expected: str) -> None:
    runs = [
        _run(1, repeat, samples=float(batch), flags={"batch": str(batch)})
        for repeat in range(repeats)
        for batch in (4, 64)
    ]

    rows = sweep_rows(runs, "weak")

    assert [row["best"] for row in rows] == [False, repeats >= 3]
    assert expected in "\n".join(sweep_lines(rows, []))


@pytest.mark.parametrize(("threads", "text"), [("1", "has 1 thread in"), ("2", "has 2 threads in")])
def test_the_threads_of_a_rank_are_reported(
    threads: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)

    assert text in Job(("train.py",)).describe([1, 2])
