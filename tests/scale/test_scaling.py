"""What runs say together: runs are written by hand, no process is started."""

from pathlib import Path
from typing import Any

import pytest

from tutti.scale.causes import Step
from tutti.scale.job import Job, Mode
from tutti.scale.measured import Measured
from tutti.scale.scaling import Scaling
from tutti.scale.sweep import sweep_lines, sweep_rows

COMM = [
    {"op": "all_reduce", "ranks": 2, "bytes": size, "count": 5, "matched": 5}
    | {"transfer_s": {"p50": seconds}}
    for size, seconds in ((1000, 0.01), (100_000, 0.02))
]


def measured(ranks: int, repeat: int = 0, **given: Any) -> Measured:
    """One rank takes 100 ms; more also communicate for 20."""
    parts = dict.fromkeys(("compute", "wait", "bubble", "input", "host_gap", "rest"), 0.0)
    parts |= {"compute": 0.1, "exposed": 0.02 if ranks > 1 else 0.0}
    values: dict[str, Any] = {
        **{"folder": Path(f"ranks{ranks}-repeat{repeat}"), "flags": {}, "samples": 16.0 * ranks},
        **{"step": Step(sum(parts.values()), parts), "hidden": 0.0, "late": None, "overhead": 1.0},
        **{"comm": COMM if ranks > 1 else [], "notes": []},
    }
    return Measured(ranks=ranks, repeat=repeat, **values | given)


@pytest.mark.parametrize(("samples", "mode"), [(32.0, "weak"), (16.0, "strong")])
@pytest.mark.parametrize("said", ["weak", "strong"])
def test_counted_samples_decide_the_mode_whatever_is_said(
    samples: float, mode: Mode, said: Mode
) -> None:
    runs = [measured(1), measured(2, samples=samples)]

    scaling = Scaling(runs, said)
    results = scaling.results()

    assert results["mode"] == mode
    assert results["forecast"] == Scaling(runs, mode).results()["forecast"]
    contradicted = [note for note in scaling.notes() if "these samples are counted" in note]
    assert contradicted == [] if said == mode else f"{mode} scaling" in contradicted[0]


def test_samples_of_neither_mode_have_no_forecast() -> None:
    results = Scaling([measured(1), measured(2, samples=24.0)], "weak").results()

    assert results["forecast"]["rows"] == []
    assert "neither" in results["forecast"]["reason"]


def test_without_counted_samples_the_mode_that_is_said_is_believed() -> None:
    scaling = Scaling([measured(1, samples=None), measured(2, samples=None)], "strong")

    assert scaling.results()["mode"] == "strong"
    assert scaling.results()["forecast"]["rows"]


def test_other_flags_of_a_sweep_are_no_contradiction() -> None:
    runs = [
        measured(ranks, samples=float(batch * ranks), flags={"batch": str(batch)})
        for batch in (4, 64)
        for ranks in (1, 2)
    ]

    assert Scaling(runs, "weak").notes() == []


@pytest.mark.parametrize(
    ("repeats", "said"),
    [
        (1, "at 1 rank no value is best: too few repeats tell no spread"),
        (2, "at 1 rank no value is best: too few repeats tell no spread"),
        (3, "at 1 rank --batch 64 is best"),
    ],
)
def test_no_value_of_a_sweep_is_best_before_repeats_tell_their_spread(
    repeats: int, said: str
) -> None:
    runs = [
        measured(1, repeat, samples=float(batch), flags={"batch": str(batch)})
        for repeat in range(repeats)
        for batch in (4, 64)
    ]

    rows = sweep_rows(runs, "weak")

    assert [row["best"] for row in rows] == [False, repeats >= 3]
    assert said in "\n".join(sweep_lines(rows, []))


@pytest.mark.parametrize(("threads", "said"), [("1", "has 1 thread at"), ("2", "has 2 threads at")])
def test_threads_of_a_rank_are_counted_in_words(
    threads: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)

    assert said in Job(("train.py",)).describe([1, 2])
