"""Planted α and β are recovered, and a forecast equals the calculation by hand."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.scale.efficiency import LOSS_CAUSES
from tutti.scale.forecast import (
    CommPoint,
    EfficiencyModel,
    Ratio,
    comm_points,
    fit_comm,
    forecast,
)
from tutti.scale.scale_runs import MeasuredRun, MeasuredStep
from tutti.scale.scale_table import scale_lines

# Bytes that a ring of n ranks moves over a link, by hand: 2 (n − 1) / n and (n − 1) / n.
RING = {("all_reduce", 2): 1.0, ("all_reduce", 4): 1.5, ("all_gather", 4): 0.75}
ROUNDS = {2: 1, 4: 2, 8: 3}


def _planted(alpha: float, beta: float) -> list[CommPoint]:
    return [
        CommPoint(op, ranks, size, alpha * ROUNDS[ranks] + beta * factor * size)
        for (op, ranks), factor in RING.items()
        for size in (64, 4096, 1 << 20, 1 << 26)
    ]


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-8))
def test_planted_alpha_and_beta_are_recovered(alpha: float, beta: float) -> None:
    fit = fit_comm(_planted(alpha, beta))

    assert fit is not None
    assert fit.alpha_s == pytest.approx(alpha, rel=1e-4)
    assert fit.beta_s_per_byte == pytest.approx(beta, rel=1e-4)
    assert fit.r2 == pytest.approx(1)
    assert fit.seconds("all_reduce", 8, 1000) == pytest.approx(3 * alpha + 1750 * beta, rel=1e-4)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=6))
def test_alpha_and_beta_are_never_negative(times: list[float]) -> None:
    fit = fit_comm([CommPoint("all_reduce", 2, 8 << 2 * n, time) for n, time in enumerate(times)])

    assert fit is not None
    assert fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0
    assert fit.alpha_s + fit.beta_s_per_byte > 0


def test_small_messages_count_as_much_as_large_ones() -> None:
    """A large message that is 20 % off must not hide the latency of small ones."""
    points = _planted(100e-6, 1e-9)
    points[3] = CommPoint("all_reduce", 2, 1 << 26, 1.2 * points[3].seconds)

    fit = fit_comm(points)

    assert fit is not None and fit.alpha_s == pytest.approx(100e-6, rel=0.1)


def _comm(**fields: Any) -> dict[str, Any]:
    row = {"op": "all_reduce", "ranks": 2, "bytes": 1000, "count": 5, "matched": 5}
    return row | {"transfer_s": {"p50": 0.01}} | fields


def test_points_are_made_of_matched_messages_with_a_size() -> None:
    rows = [
        _comm(),
        _comm(transfer_s={"p50": 0.03}),
        _comm(bytes=None),
        _comm(matched=0, bytes=7),
        _comm(matched=4, bytes=8),  # the median may be of the unmatched one, which includes waiting
        _comm(op="barrier", bytes=None),
    ]

    points = comm_points([rows[:1], rows[1:]])

    assert points == [CommPoint("all_reduce", 2, 1000, 0.02), CommPoint("barrier", 2, 0, 0.01)]
    assert fit_comm([]) is None


def _run(ranks: int, comm: list[dict[str, Any]] | None = None, **seconds: float) -> MeasuredRun:
    """Return a run whose step is the sum of the given parts; `hidden` is in addition to them."""
    hidden = seconds.pop("hidden", 0.0)
    names = ("compute", "host_gap", "rest", "input", "exposed", "wait", "bubble")
    parts = dict.fromkeys(names, 0.0) | seconds
    step = MeasuredStep(sum(parts.values()), parts)
    return MeasuredRun(
        ranks=ranks,
        repeat=0,
        folder=Path(),
        flags={},
        samples=None,
        step=step,
        hidden=hidden / step.seconds,
        comm=comm or [],
        late=None,
        recorded={},
        slow=None,
        overhead=1.0,
        notes=[],
    )


def test_a_weak_forecast_by_hand() -> None:
    """One rank 100 ms; two ranks 100 + 20 exposed + 30 waiting of 150 ms.

    The message is all bandwidth: 1.0 × S among 2, 1.5 × S among 4, so 30 ms are exposed at 4, and
    waiting keeps its fifth: (100 + 30) / 0.8 = 162.5 ms.
    """
    base = _run(1, compute=0.1)
    two = _run(2, [_comm()], compute=0.1, exposed=0.02, wait=0.03)
    fit = fit_comm([CommPoint("all_reduce", 2, 1000, 0.02)])
    assert fit is not None and fit.alpha_s == 0 and fit.r2 is None

    model = EfficiencyModel(Ratio(two, base, 1.0), fit, "weak")

    assert model.efficiency(2) == pytest.approx(100 / 150)  # as measured
    assert model.efficiency(4) == pytest.approx(100 / 162.5)


def test_a_strong_forecast_by_hand() -> None:
    """One rank 110 ms, of which 10 do not shrink; two ranks 60 + 20 exposed, 30 hidden.

    With 8 ranks the own work is 10 + 100 / 8 = 22.5 ms. Communication takes 1.75 / 1.0 × 50 =
    87.5 ms, 35 of them exposed as before; but only 22.5 can be hidden: 65 ms are exposed.
    """
    base = _run(1, compute=0.11)
    two = _run(2, [_comm()], compute=0.06, exposed=0.02, hidden=0.03)
    fit = fit_comm([CommPoint("all_reduce", 2, 1000, 0.05)])
    assert fit is not None

    model = EfficiencyModel(Ratio(two, base, 0.5), fit, "strong")

    assert model.efficiency(2) == pytest.approx(110 / 2 / 80)
    assert model.efficiency(8) == pytest.approx(110 / 8 / (22.5 + 65))


def test_tensor_parallel_groups_keep_their_size() -> None:
    base, four = (_run(ranks, [_comm(axis="tp")], compute=0.08, exposed=0.02) for ranks in (2, 4))
    fit = fit_comm([CommPoint("all_reduce", 2, 1000, 0.02)])
    assert fit is not None

    assert EfficiencyModel(Ratio(four, base, 1.0), fit, "weak").efficiency(64) == pytest.approx(1)


def _measured_sizes() -> Ratio:
    return Ratio(_run(2, [_comm()], compute=0.1, exposed=0.02), _run(1, compute=0.1), 1.0)


def test_efficiency_limits_are_passed_by_a_run_or_by_the_forecast_or_never() -> None:
    """Weak: exposed(n) = 20 ms × 2 (n − 1) / n, so a step never takes more than 140 of 100 ms."""
    fit = fit_comm([CommPoint("all_reduce", 2, 1000, 0.02)])

    result = forecast([(1, 1.0), (2, 100 / 120)], _measured_sizes(), fit, "weak")

    # Below 0.8 a step takes more than 125 ms: 40 (n − 1) / n > 25, so n > 2.67.
    assert result["below"] == {"0.9": 2, "0.8": 3, "0.5": None}
    assert [row["ranks"] for row in result["rows"]] == [4, 8, 16, 32]
    assert result["rows"][0]["efficiency"] == pytest.approx(100 / 130)
    assert "forecast" in result["reason"] and "assumes" in result["reason"]


@pytest.mark.parametrize(("sizes", "best"), [((1000,), True), ((1000, 64), False)])
def test_with_one_message_size_a_forecast_is_a_best_case(
    sizes: tuple[int, ...], best: bool
) -> None:
    fit = fit_comm([CommPoint("all_reduce", 2, size, 0.01 + 1e-5 * size) for size in sizes])
    assert fit is not None

    result = forecast([(1, 1.0), (2, 100 / 120)], _measured_sizes(), fit, "weak")
    content = {"mode": "weak", "unit": "steps/s", "notes": [], "fit": fit.row()}
    results = content | {"rows": _rows(), "forecast": result}
    printed = "\n".join(scale_lines(results))
    for width in (60, 80, 100):
        assert max(map(len, scale_lines(results, width))) <= width

    assert result["best_case"] is best
    assert ("at best" in result["reason"]) is best
    assert ("forecast, at best: efficiency" in printed) is best
    assert ("latency unknown" in printed) is best


def _rows() -> list[dict[str, Any]]:
    return [
        {
            **{"ranks": ranks, "samples_per_s": 10.0, "samples_per_s_spread": [9.0, 11.0]},
            **{"speedup": 1.0, "efficiency": 1.0, "efficiency_spread": [1.0, 1.0]},
            **{"loss": dict.fromkeys(LOSS_CAUSES, 0.0), "other": {}, "late": None, "folder": "r"},
            **{"named": [], "slow_steps": None, "verdict": "no loss"},
        }
        for ranks in (1, 2)
    ]


def test_no_forecast_without_two_sizes_or_without_communication() -> None:
    one_size = forecast([(1, 1.0)], None, None, "weak")
    no_communication = forecast([(1, 1.0), (2, 1.0)], _measured_sizes(), None, "weak")

    assert one_size["rows"] == no_communication["rows"] == [] and one_size["below"] == {}
    assert "at least two" in one_size["reason"] and "no communication" in no_communication["reason"]
