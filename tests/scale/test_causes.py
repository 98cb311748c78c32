"""Causes add up to the loss of efficiency, whatever was measured, and go where they belong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.profile.parts import PARTS
from tutti.scale.causes import LOSS, OTHER, Step, causes, efficiency, seen_from_the_fastest

seconds = st.floats(0, 10, allow_nan=False)
ranks = st.lists(st.fixed_dictionaries(dict.fromkeys(PARTS, seconds)), min_size=1, max_size=5)
parts = ranks.map(seen_from_the_fastest).filter(lambda seen: sum(seen.values()) > 1e-3)
steps = st.builds(Step, st.floats(1e-3, 10), parts)


@given(steps, steps, st.floats(0.01, 1))
def test_causes_sum_to_what_efficiency_lacks(step: Step, base: Step, ideal: float) -> None:
    loss, other = causes(step, base, ideal)

    assert tuple(loss) == LOSS and tuple(other) == OTHER
    scale = max(1.0, *map(abs, loss.values()), *map(abs, other.values()))
    assert sum(loss.values()) == pytest.approx(1 - efficiency(step, base, ideal), abs=1e-9 * scale)
    assert sum(other.values()) == pytest.approx(loss["other"], abs=1e-9 * scale)


@given(ranks)
def test_parts_of_all_ranks_sum_to_their_mean_step_and_waiting_is_never_less(
    parts: list[dict[str, float]],
) -> None:
    seen = seen_from_the_fastest(parts)

    mean = sum(sum(each.values()) for each in parts) / len(parts)
    assert sum(seen.values()) == pytest.approx(mean)
    assert seen["wait"] >= sum(each["wait"] for each in parts) / len(parts) - 1e-9


def _parts(**given: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | given


def test_a_rank_that_is_slower_is_waited_for_in_full() -> None:
    """One of two sleeps 60 ms: the other waits for 60 ms, and a mean of both would say 30."""
    seen = seen_from_the_fastest(
        [_parts(compute=0.1, wait=0.06), _parts(compute=0.1, host_gap=0.06)]
    )

    assert seen["wait"] == pytest.approx(0.06)
    assert seen["host_gap"] == 0
    assert seen["compute"] == pytest.approx(0.1)


def test_every_part_that_grows_is_a_cause_of_its_own() -> None:
    """Weak scaling, steps of 100 and 200 ms; recorded ones take 110 and 220."""
    base = Step(0.10, seen_from_the_fastest([_parts(compute=0.11)]))
    grown = _parts(compute=0.08, hidden=0.05, exposed=0.044, wait=0.011, input=0.022)
    step = Step(0.20, seen_from_the_fastest([grown | {"host_gap": 0.013}]))

    loss, other = causes(step, base, ideal=1.0)

    assert efficiency(step, base, 1.0) == pytest.approx(0.5)
    assert loss["exposed_comm"] == pytest.approx(44 / 220)
    assert loss["wait"] == pytest.approx(11 / 220)
    assert loss["input"] == pytest.approx(22 / 220)
    assert loss["bubble"] == 0
    assert other["compute"] == pytest.approx((80 + 50 - 110) / 220)
    assert other["gaps"] == pytest.approx(13 / 220)
    assert other["unexplained"] == pytest.approx(0.0)


def test_what_only_recording_shows_is_unexplained() -> None:
    """Recorded, both steps take 110 ms; timed, the second takes 137.5."""
    base = Step(0.11, seen_from_the_fastest([_parts(compute=0.11)]))
    step = Step(0.1375, seen_from_the_fastest([_parts(compute=0.11)]))

    loss, other = causes(step, base, ideal=1.0)

    assert other["unexplained"] == pytest.approx(0.2)
    assert loss == {**dict.fromkeys(LOSS, 0.0), "other": pytest.approx(0.2)}


def test_what_got_better_is_below_nothing() -> None:
    """Strong scaling over two ranks: the loader keeps up with half a batch."""
    base = Step(0.2, seen_from_the_fastest([_parts(compute=0.1, input=0.1)]))
    step = Step(0.08, seen_from_the_fastest([_parts(compute=0.05, input=0.01, exposed=0.02)]))

    loss, _ = causes(step, base, ideal=0.5)

    assert loss["input"] == pytest.approx(-0.5)
    assert loss["exposed_comm"] == pytest.approx(0.25)
    assert sum(loss.values()) == pytest.approx(1 - 0.5 * 0.2 / 0.08)
