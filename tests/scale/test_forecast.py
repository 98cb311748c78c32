"""α and β are found again where they were planted; a forecast is what one computes by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.scale.causes import LOSS, Step
from tutti.scale.fit import Point, fit, points_in
from tutti.scale.forecast import Forecast, Size, forecast
from tutti.scale.table import lines

# What a ring of n moves over a link, written out by hand: 2 (n − 1) / n and (n − 1) / n.
RING = {("all_reduce", 2): 1.0, ("all_reduce", 4): 1.5, ("all_gather", 4): 0.75}
ROUNDS = {2: 1, 4: 2, 8: 3}


def _planted(alpha: float, beta: float) -> list[Point]:
    return [
        Point(op, ranks, size, alpha * ROUNDS[ranks] + beta * factor * size)
        for (op, ranks), factor in RING.items()
        for size in (64, 4096, 1 << 20, 1 << 26)
    ]


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-8))
def test_planted_alpha_and_beta_are_recovered(alpha: float, beta: float) -> None:
    found = fit(_planted(alpha, beta))

    assert found is not None
    assert found.alpha_s == pytest.approx(alpha, rel=1e-4)
    assert found.beta_s_per_byte == pytest.approx(beta, rel=1e-4)
    assert found.r2 == pytest.approx(1)
    assert found.seconds("all_reduce", 8, 1000) == pytest.approx(3 * alpha + 1750 * beta, rel=1e-4)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=6))
def test_neither_is_ever_negative(times: list[float]) -> None:
    found = fit([Point("all_reduce", 2, 8 << 2 * n, time) for n, time in enumerate(times)])

    assert found is not None
    assert found.alpha_s >= 0 and found.beta_s_per_byte >= 0
    assert found.alpha_s + found.beta_s_per_byte > 0


def test_small_messages_count_as_much_as_large_ones() -> None:
    """A large message that is 20 % off must not swallow the latency of small ones."""
    points = _planted(100e-6, 1e-9)
    points[3] = Point("all_reduce", 2, 1 << 26, 1.2 * points[3].seconds)

    found = fit(points)

    assert found is not None and found.alpha_s == pytest.approx(100e-6, rel=0.1)


def _comm(**given: Any) -> dict[str, Any]:
    row = {"op": "all_reduce", "ranks": 2, "bytes": 1000, "count": 5, "matched": 5}
    return row | {"transfer_s": {"p50": 0.01}} | given


def test_points_are_of_matched_messages_with_a_size() -> None:
    rows = [
        _comm(),
        _comm(transfer_s={"p50": 0.03}),
        _comm(bytes=None),
        _comm(matched=0, bytes=7),
        _comm(matched=4, bytes=8),  # the median may be of the one that includes waiting
        _comm(op="barrier", bytes=None),
    ]

    points = points_in([rows[:1], rows[1:]])

    assert points == [Point("all_reduce", 2, 1000, 0.02), Point("barrier", 2, 0, 0.01)]
    assert fit([]) is None


def _step(seconds: float, **parts: float) -> Step:
    none = dict.fromkeys(("compute", "exposed", "wait", "bubble", "input", "host_gap", "rest"), 0.0)
    return Step(seconds, none | parts)


def test_a_weak_forecast_by_hand() -> None:
    """One rank 100 ms; two ranks 100 + 20 exposed + 30 waiting of 150 ms.

    The message is all bandwidth: 1.0 × S among 2, 1.5 × S among 4, so 30 ms are exposed at 4, and
    waiting keeps its fifth: (100 + 30) / 0.8 = 162.5 ms.
    """
    base = Size(1, _step(0.1, compute=0.1), 1.0, 0.0, [])
    two = Size(2, _step(0.15, compute=0.1, exposed=0.02, wait=0.03), 1.0, 0.0, [_comm()])
    line = fit([Point("all_reduce", 2, 1000, 0.02)])
    assert line is not None and line.alpha_s == 0 and line.r2 is None

    model = Forecast(base, two, line, "weak")

    assert model.efficiency(2) == pytest.approx(100 / 150)  # what was measured
    assert model.efficiency(4) == pytest.approx(100 / 162.5)


def test_a_strong_forecast_by_hand() -> None:
    """One rank 110 ms, of which 10 do not shrink; two ranks 60 + 20 exposed, 30 hidden.

    At 8 ranks a rank does 10 + 100 / 8 = 22.5 ms by itself. Communication takes 1.75 / 1.0 × 50 =
    87.5 ms, 35 of them exposed as before; but only 22.5 can be hidden: 65 ms are exposed.
    """
    base = Size(1, _step(0.11, compute=0.1, rest=0.01), 1.0, 0.0, [])
    share = 0.03 / 0.08
    two = Size(2, _step(0.08, compute=0.05, rest=0.01, exposed=0.02), 0.5, share, [_comm()])
    line = fit([Point("all_reduce", 2, 1000, 0.05)])
    assert line is not None

    model = Forecast(base, two, line, "strong")

    assert model.efficiency(2) == pytest.approx(110 / 2 / 80)
    assert model.efficiency(8) == pytest.approx(110 / 8 / (22.5 + 65))


def test_groups_of_tensor_parallel_ranks_stay_as_they_are() -> None:
    base = Size(2, _step(0.1, compute=0.08, exposed=0.02), 1.0, 0.0, [_comm(axis="tp")])
    four = Size(4, _step(0.1, compute=0.08, exposed=0.02), 1.0, 0.0, [_comm(axis="tp")])
    line = fit([Point("all_reduce", 2, 1000, 0.02)])
    assert line is not None

    assert Forecast(base, four, line, "weak").efficiency(64) == pytest.approx(1.0)


def test_limits_are_already_passed_or_ahead_or_out_of_reach() -> None:
    """Weak: exposed(n) = 20 ms × 2 (n − 1) / n, so a step never takes more than 140 of 100 ms."""
    base = Size(1, _step(0.1, compute=0.1), 1.0, 0.0, [])
    two = Size(2, _step(0.12, compute=0.1, exposed=0.02), 1.0, 0.0, [_comm()])
    line = fit([Point("all_reduce", 2, 1000, 0.02)])

    result = forecast([(1, 1.0), (2, 100 / 120)], (base, two), line, "weak")

    # Under 0.8 a step takes more than 125 ms: 40 (n − 1) / n > 25, so n > 2.67.
    assert result["below"] == {"0.9": 2, "0.8": 3, "0.5": None}
    assert [row["ranks"] for row in result["rows"]] == [4, 8, 16, 32]
    assert result["rows"][0]["efficiency"] == pytest.approx(100 / 130)
    assert "forecast" in result["reason"] and "assumes" in result["reason"]


@pytest.mark.parametrize(("sizes", "best"), [((1000,), True), ((1000, 64), False)])
def test_of_one_size_of_message_a_forecast_is_a_best_case_and_says_so(
    sizes: tuple[int, ...], best: bool
) -> None:
    base = Size(1, _step(0.1, compute=0.1), 1.0, 0.0, [])
    two = Size(2, _step(0.12, compute=0.1, exposed=0.02), 1.0, 0.0, [_comm()])
    line = fit([Point("all_reduce", 2, size, 0.01 + 1e-5 * size) for size in sizes])
    assert line is not None

    result = forecast([(1, 1.0), (2, 100 / 120)], (base, two), line, "weak")
    content = {"mode": "weak", "unit": "steps/s", "notes": [], "fit": line.row()}
    results = content | {"rows": _rows(), "forecast": result}
    printed = "\n".join(lines(results))
    for width in (60, 80, 100):
        assert max(map(len, lines(results, width))) <= width

    assert result["best_case"] is best
    assert ("at best" in result["reason"]) is best
    assert ("forecast, at best: efficiency" in printed) is best
    assert ("α is not known" in printed) is best


def _rows() -> list[dict[str, Any]]:
    return [
        {
            **{"ranks": ranks, "samples_per_s": 10.0, "samples_per_s_spread": [9.0, 11.0]},
            **{"speedup": 1.0, "efficiency": 1.0, "efficiency_spread": [1.0, 1.0]},
            **{"loss": dict.fromkeys(LOSS, 0.0), "other": {}, "late": None, "folder": "ranks"},
        }
        for ranks in (1, 2)
    ]


def test_nothing_is_said_where_there_is_nothing_to_fit() -> None:
    one = Size(1, _step(0.1, compute=0.1), 1.0, 0.0, [])

    alone = forecast([(1, 1.0)], None, None, "weak")
    silent = forecast([(1, 1.0), (2, 1.0)], (one, one), None, "weak")

    assert alone["rows"] == silent["rows"] == [] and alone["below"] == {}
    assert "two sizes" in alone["reason"] and "no communication" in silent["reason"]
