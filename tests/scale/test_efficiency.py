"""Efficiency and its loss by cause; runs are written by hand."""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.machine.cpu_numa import allowed_cpus
from tutti.profile.calibration import (
    RecordingCost,
    avoided_page_fault_seconds,
    recording_cost,
    recording_cpu_seconds,
)
from tutti.profile.step_breakdown import PARTS
from tutti.scale.efficiency import (
    LOSS_CAUSES,
    OTHER_CAUSES,
    Scaling,
    loss_by_cause,
    significance,
)
from tutti.scale.forecast import Mode
from tutti.scale.scale_runs import (
    Job,
    MeasuredRun,
    MeasuredStep,
    RunSeries,
    Schedule,
    _OtherPrograms,
    combine_ranks,
    measured_step,
    slow_steps,
)
from tutti.scale.scale_table import add_verdicts, sweep_lines, sweep_rows

seconds = st.floats(0, 10, allow_nan=False)
RECORDED = (*PARTS, "pause")
ranks = st.lists(st.fixed_dictionaries(dict.fromkeys(RECORDED, seconds)), min_size=1, max_size=5)
parts = ranks.map(combine_ranks)
times = st.lists(st.floats(1e-3, 10), min_size=1, max_size=9)
steps = st.builds(measured_step, parts, times, st.booleans())


@given(st.lists(st.tuples(steps, steps), min_size=1, max_size=5), st.floats(0.01, 1))
def test_causes_add_up_to_the_lost_efficiency(
    repeats: list[tuple[MeasuredStep, MeasuredStep]], ideal: float
) -> None:
    losses = [loss_by_cause(step, base, ideal) for step, base in repeats]
    efficiencies = [ideal * base.seconds / step.seconds for step, base in repeats]

    for loss, efficiency in zip(losses, efficiencies, strict=True):
        scale = max(1.0, *map(abs, loss.values()))
        assert sum(loss.values()) == pytest.approx(1 - efficiency, abs=1e-9 * scale)
    causes = significance(losses, efficiencies)["causes"]
    assert {*causes, "other"} == {*LOSS_CAUSES, *OTHER_CAUSES}
    scale = max(1.0, *map(abs, causes.values()))
    assert sum(causes.values()) == pytest.approx(1 - median(efficiencies), abs=1e-9 * scale)


@given(ranks)
def test_combined_parts_add_up_to_the_mean_step_and_waiting_does_not_shrink(
    parts: list[dict[str, float]],
) -> None:
    combined = combine_ranks(parts)

    mean = sum(sum(each.values()) for each in parts) / len(parts)
    assert sum(combined.values()) == pytest.approx(mean)
    lost = combined["wait"] + combined["input"] - min(each["input"] for each in parts)
    assert lost >= sum(each["wait"] for each in parts) / len(parts) - 1e-9


def _step(seconds: float, **parts: float) -> MeasuredStep:
    return measured_step(combine_ranks([dict.fromkeys(RECORDED, 0.0) | parts]), [seconds])


def test_the_excess_of_a_slower_rank_counts_as_waiting_in_full() -> None:
    """One of two ranks sleeps for 60 ms: this is 60 ms of waiting, not the mean of 30 ms."""
    zero = dict.fromkeys(RECORDED, 0.0)
    combined = combine_ranks(
        [zero | {"compute": 0.1, "wait": 0.06}, zero | {"compute": 0.1, "host_gap": 0.06}]
    )

    assert combined["wait"] == pytest.approx(0.06)
    assert combined["host_gap"] == 0
    assert combined["compute"] == pytest.approx(0.1)


def test_waiting_for_a_rank_that_waits_for_input_is_input() -> None:
    """Both loaders take 60 ms, but rank 0 finds its batch because it waited for rank 1."""
    zero = dict.fromkeys(RECORDED, 0.0)
    combined = combine_ranks(
        [zero | {"compute": 0.1, "wait": 0.06}, zero | {"compute": 0.1, "input": 0.06}]
    )

    assert (combined["input"], combined["wait"]) == pytest.approx((0.06, 0.0))


def test_every_part_that_grows_is_a_cause() -> None:
    """Weak scaling with steps of 100 and 200 ms; recording adds 10 and 20 ms of compute."""
    base = _step(0.10, compute=0.11)
    step = _step(0.20, compute=0.09, hidden=0.05, exposed=0.04, wait=0.01, input=0.02, pause=0.01)

    loss = loss_by_cause(step, base, ideal=1.0)

    expected = {"exposed_comm": 40, "wait": 10, "input": 20, "gaps": 10, "compute": 20}
    zero = dict.fromkeys(("bubble", "rest", "slow_steps", "unexplained"), 0)
    assert loss == pytest.approx({k: v / 200 for k, v in (zero | expected).items()})


def test_recording_slows_only_the_recorded_operators() -> None:
    """A sleep of 40 ms stays 40 ms; a difference of 60 of 70 ms is too large to be overhead."""
    overhead = _step(0.06, compute=0.03, pause=0.04)
    assert overhead.parts["compute"] == pytest.approx(0.02)
    assert overhead.parts["host_gap"] == pytest.approx(0.04)
    assert overhead.parts["unexplained"] == pytest.approx(0)

    other_steps = _step(0.13, compute=0.03, pause=0.04)
    assert other_steps.parts["host_gap"] == pytest.approx(0.04)
    assert other_steps.parts["unexplained"] > 0.05


def test_on_a_gpu_recording_slows_the_host_and_not_the_kernels() -> None:
    recorded = combine_ranks([dict.fromkeys(RECORDED, 0.0) | {"compute": 0.05, "host_gap": 0.02}])

    step = measured_step(recorded, [0.06], on_device=True)

    assert (step.parts["compute"], step.parts["host_gap"]) == pytest.approx((0.05, 0.01))


def test_waiting_that_differs_between_recorded_and_timed_steps_does_not_change_compute() -> None:
    """Recording adds 10 ms of CPU time; the timed steps wait 20 ms longer than the recorded ones.

    Page faults that only occur outside of the recording are compute.
    """
    recorded = combine_ranks([dict.fromkeys(RECORDED, 0.0) | {"compute": 0.05, "exposed": 0.03}])

    cost = RecordingCost(own=0.01, input=0.0, wait=0.0)
    step = measured_step(recorded, [0.09], recording=cost, page_faults=0.004)

    assert step.parts["compute"] == pytest.approx(0.04 + 0.004)
    assert step.parts["unexplained"] == pytest.approx(0.02)
    assert step.seconds == pytest.approx(0.094) == pytest.approx(sum(step.parts.values()))


def test_page_faults_and_cpu_seconds_of_interleaved_steps() -> None:
    info = {
        "interleaved": 2,
        "cpu_s": [[0.5, 0.010, 0.012], [0.015, 0.017]],
        "page_faults": [[900, 100, 100, 100, 0, 0], [0, 0]],
        "page_fault_s": 1e-6,
    }
    assert recording_cpu_seconds(info) == pytest.approx(0.005)
    assert avoided_page_fault_seconds(info) == pytest.approx(1e-4)
    assert recording_cpu_seconds({}) is None and avoided_page_fault_seconds({}) == 0

    # Without interleaved steps, the second half of the steps before the recording counts. In these
    # steps page faults take 1 ms of CPU time, which recorded steps do not need.
    before = {
        "cpu_s": [[0.5, 0.5, 0.5, 0.011, 0.011, 0.011], [0.015]],
        "page_faults": [[900, 900, 900, 100, 100, 100], [0]],
        "page_fault_s": 1e-5,
    }
    assert recording_cpu_seconds(before) == pytest.approx(0.005)
    assert avoided_page_fault_seconds(before) == 0

    more = info | {"cpu_s": [[0.5, 0.010, 0.012], [0.025, 0.027]]}  # a rank with more operators
    cost = recording_cost([info, more], [0.2, 0.2])
    assert cost == RecordingCost(*map(pytest.approx, (0.004, 0.001, 0.010)))
    assert recording_cost([info, {}], [0.2, 0.2]) is None
    assert (same := recording_cost([info, info], [0.0, 0.0])) is not None and same.wait == 0


def test_recording_slows_operators_in_the_loader_and_the_rank_with_more_operators() -> None:
    own = dict.fromkeys(RECORDED, 0.0) | {"compute": 0.05, "input": 0.02}
    recorded = combine_ranks([own, own | {"compute": 0.08}])
    cost = RecordingCost(own=0.01, input=0.004, wait=0.006)

    step = measured_step(recorded, [0.065], recording=cost)

    assert step.parts["compute"] == pytest.approx(0.04)
    assert step.parts["input"] == pytest.approx(0.016)
    assert step.parts["wait"] == pytest.approx(recorded["wait"] - 0.006)


def test_equally_large_causes_are_named_in_a_fixed_order() -> None:
    """Compute is larger than waiting in the median, but their quartiles overlap."""
    losses = [
        dict.fromkeys((*LOSS_CAUSES, *OTHER_CAUSES), 0.0)
        | {"wait": wait, "compute": compute, "input": 0.3}
        for wait, compute in ((0.20, 0.19), (0.21, 0.22), (0.19, 0.23))
    ]
    result = significance(losses, [0.30, 0.27, 0.28])
    assert result["named"] == ["input", "wait", "compute"]
    apart = [loss | {"wait": 0.1} for loss in losses]
    assert significance(apart, [0.40, 0.38, 0.37])["named"] == ["input", "compute", "wait"]


def test_every_fifth_step_is_slow() -> None:
    """Steps of 100 ms, of which every fifth takes 180 ms: 16 ms per step are due to slow steps."""
    times = [0.18 if number % 5 == 3 else 0.1 for number in range(20)]

    step = measured_step(combine_ranks([dict.fromkeys(RECORDED, 0.0) | {"compute": 0.1}]), times)
    slow = slow_steps(times)

    assert step.seconds == pytest.approx(0.116)
    assert step.parts["slow_steps"] == pytest.approx(0.016)
    assert step.parts["compute"] == pytest.approx(0.1)
    assert slow is not None and (slow["period"], slow["steps"], slow["of_steps"]) == (5, 4, 20)
    assert slow["excess_s"] == pytest.approx(0.08)
    assert slow_steps([0.1] * 20) is None
    numbers = [3, 4, 6, 7, 8, 10, 12, 13, 15, 18]  # of timed steps between recorded steps
    between = slow_steps([0.18 if n % 5 == 3 else 0.1 for n in numbers], (), numbers)
    assert between is not None and between["period"] == 5
    stalled = slow_steps([0.4 if number == 6 else seconds for number, seconds in enumerate(times)])
    assert stalled is not None and (stalled["period"], stalled["steps"]) == (None, 1)
    stalled = slow_steps([0.4 if number == 8 else seconds for number, seconds in enumerate(times)])
    assert stalled is not None and (stalled["period"], stalled["steps"]) == (5, 4)
    typical = dict.fromkeys(RECORDED, 0.0) | {"compute": 0.1}
    recorded = [typical | {"input": 0.08 * (number % 5 == 1)} for number in range(10)]
    slow = slow_steps(times, recorded)
    assert slow is not None and slow["part"] == "input"
    assert slow["part_excess_s"] == pytest.approx(0.08)


def test_a_part_that_shrinks_more_than_ideal_is_a_negative_cause() -> None:
    """Strong scaling over two ranks: the loader is fast enough for half a batch."""
    base = _step(0.2, compute=0.1, input=0.1)
    step = _step(0.08, compute=0.05, input=0.01, exposed=0.02)

    loss = loss_by_cause(step, base, ideal=0.5)

    assert loss["input"] == pytest.approx(-0.5)
    assert loss["exposed_comm"] == pytest.approx(0.25)
    assert sum(loss.values()) == pytest.approx(1 - 0.5 * 0.2 / 0.08)


def _repeats(waits: list[float], computes: list[float]) -> list[MeasuredRun]:
    """Pairs of one rank (100 ms of compute) and two ranks that also wait and compute longer."""
    runs = []
    for repeat, (wait, compute) in enumerate(zip(waits, computes, strict=True)):
        step = _step(0.1 + wait + compute, compute=0.1 + compute, wait=wait)
        runs += [_run(1, repeat, step=_step(0.1, compute=0.1)), _run(2, repeat, step=step)]
    return runs


def test_causes_are_named_if_the_repeats_agree() -> None:
    waits, computes = [0.020, 0.021, 0.019, 0.020], [0.0005, -0.0004, 0.0002, 0.0]

    _, row = add_verdicts(Scaling(_repeats(waits, computes), "weak").rows())

    assert row["named"] == ["wait"] and row["clear"]
    assert row["loss"]["wait"] == pytest.approx(20 / 120, rel=0.02)
    low, high = row["loss_quartiles"]["wait"]
    assert low < row["loss"]["wait"] < high
    assert row["verdict"].startswith("2 ranks lose 17 % (") and "waiting 17 (" in row["verdict"]
    assert "noise" in row["verdict"] and "compute" not in row["verdict"]


def test_no_cause_is_named_if_the_repeats_disagree() -> None:
    waits, computes = [0.030, 0.0, 0.002, 0.05], [0.0, 0.04, -0.03, 0.003]

    _, row = add_verdicts(Scaling(_repeats(waits, computes), "weak").rows())

    assert row["named"] == [] and not row["clear"]
    assert row["repeats_needed"] > row["repeats"] == 4
    assert f"{row['repeats_needed'] - 4} more repeats" in row["verdict"]
    assert "--until-clear" in row["verdict"]


def test_one_repeat_does_not_show_a_spread() -> None:
    _, row = add_verdicts(Scaling(_repeats([0.1], [0.0]), "weak").rows())

    assert row["named"] == ["wait"] and not row["clear"]
    assert row["repeats_needed"] == 3 and "--repeats 3" in row["verdict"]


COMM = [
    {"op": "all_reduce", "ranks": 2, "bytes": size, "count": 5, "matched": 5}
    | {"transfer_s": {"p50": seconds}}
    for size, seconds in ((1000, 0.01), (100_000, 0.02))
]


def _run(ranks: int, repeat: int = 0, **fields: Any) -> MeasuredRun:
    """One rank takes 100 ms per step; more ranks also communicate for 20 ms."""
    exposed = 0.02 if ranks > 1 else 0.0
    step = _step(0.1 + exposed, compute=0.1, exposed=exposed)
    values: dict[str, Any] = {
        **{"folder": Path(f"ranks{ranks}-repeat{repeat}"), "flags": {}, "samples": 16.0 * ranks},
        **{"step": step, "recorded": {}, "hidden": 0.0, "late": None, "slow": None},
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


def test_slow_steps_of_a_row_are_those_of_most_repeats() -> None:
    """In one of three repeats the machine stalled, so that no period was found."""
    slow = [
        {"period": period, "excess_s": excess} for period, excess in ((7, 2), (None, 9), (7, 1))
    ]
    runs = [_run(ranks, repeat, slow=slow[repeat]) for repeat in range(3) for ranks in (1, 2)]

    assert Scaling(runs, "weak").rows()[1]["slow_steps"] == slow[2]
    once = [
        _run(ranks, repeat, slow=slow[0] if repeat == 0 else None)
        for repeat in range(3)
        for ranks in (1, 2)
    ]
    assert Scaling(once, "weak").rows()[1]["slow_steps"] is None


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


def test_cpus_that_other_programs_use_are_noted(tmp_path: Path) -> None:
    """A process that is not a run counts as another program. It runs for a second of CPU time."""
    others = _OtherPrograms()
    code = "import time\nwhile time.process_time() < 1: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        while sum(psutil.Process(process.pid).cpu_times()[:2]) < 0.5:
            time.sleep(0.05)
        (used,) = others.cpus()
        process.communicate(b"\n")
    assert used > 0

    job = Job(("true",))
    series = RunSeries(job, Schedule(), tmp_path, lambda run, folder: ())
    assert series.notes() == []
    series.other_cpus = [0.0, len(allowed_cpus()), len(allowed_cpus())]
    (note,) = series.notes()
    assert "other programs" in note and f"of {len(allowed_cpus())} CPUs" in note
