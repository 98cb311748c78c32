"""The odd one out: by median and MAD, never by a little, and hosts before their links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.machine.checks.cluster import MeasuredRate
from tutti.machine.checks.outliers import MIN_DIFFERENCE, slow_links, slow_outliers
from tutti.machine.checks.probe_network import concurrent_pairs, link_pairs


def test_one_slow_of_many_is_named() -> None:
    assert slow_outliers({"a": 10, "b": 10.2, "c": 7, "d": 9.9, "e": 10.1}) == ["c"]


def test_less_than_the_floor_is_not_worth_a_word() -> None:
    assert slow_outliers({"a": 10, "b": 10, "c": 9.2, "d": 10, "e": 10}) == []


def test_where_all_differ_nobody_is_odd() -> None:
    assert slow_outliers({"a": 10, "b": 7, "c": 14, "d": 5.5, "e": 12}) == []


def test_the_slowest_comes_first() -> None:
    assert slow_outliers({"a": 10, "b": 5, "c": 10, "d": 2, "e": 10, "f": 10}) == ["d", "b"]


@pytest.mark.parametrize(("values", "slow"), [((10, 6), []), ((10, 4), ["b"]), ((3, 10), ["a"])])
def test_of_two_only_half_the_speed_is_told(values: tuple[float, float], slow: list[str]) -> None:
    assert slow_outliers(dict(zip("ab", values, strict=True))) == slow


def test_one_alone_is_never_odd() -> None:
    assert slow_outliers({"a": 0.0}) == [] and slow_outliers({}) == []


@given(
    st.lists(st.floats(1e6, 1e10), min_size=3, max_size=20),
    st.floats(1e-3, 1e3),
)
def test_nobody_at_or_above_the_median_is_slow_whatever_the_unit(
    values: list[float], unit: float
) -> None:
    named = {str(i): value for i, value in enumerate(values)}
    slow = slow_outliers(named)
    middle = sorted(values)[len(values) // 2]
    assert all(named[name] < middle * (1 - MIN_DIFFERENCE) * (1 + 1e-9) for name in slow)
    assert len(slow) <= len(values) // 2
    assert slow_outliers({name: value * unit for name, value in named.items()}) == slow


@given(st.lists(st.floats(1e9, 1.05e9), min_size=4, max_size=20), st.data())
def test_a_tenth_of_the_speed_is_always_named_and_no_other(
    values: list[float], data: st.DataObject
) -> None:
    odd = data.draw(st.integers(0, len(values) - 1))
    named = {str(i): value * (0.1 if i == odd else 1) for i, value in enumerate(values)}
    assert slow_outliers(named) == [str(odd)]


def _links(hosts: int, speed: dict[tuple[int, int], float]) -> list[MeasuredRate]:
    return [
        MeasuredRate(f"{src}-{dst}", src, "network", speed.get((src, dst), 3e9))
        for src in range(hosts)
        for dst in range(hosts)
        if src != dst
    ]


def _one_rank_each(hosts: int) -> dict[str, int]:
    return {str(rank): rank for rank in range(hosts)}


def test_one_bad_link_is_named_and_its_hosts_are_not() -> None:
    rates = _links(4, {(1, 2): 2e7, (2, 1): 2e7})
    assert slow_links(rates, _one_rank_each(4)) == ([], ["1-2", "2-1"])


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_a_host_of_which_every_link_is_bad_is_named_in_their_place(hosts: int) -> None:
    """Of three hosts, four of the six directions are slow: the median link is a bad one."""
    bad = hosts - 1
    speed = {(bad, other): 2e7 for other in range(bad)} | {
        (other, bad): 2e7 for other in range(bad)
    }
    assert slow_links(_links(hosts, speed), _one_rank_each(hosts)) == ([bad], [])


def test_a_host_that_only_sends_slowly_is_named() -> None:
    speed = {(2, other): 2e7 for other in (0, 1, 3)}
    assert slow_links(_links(4, speed), _one_rank_each(4)) == ([2], [])


def test_good_links_are_not_named_beside_noise() -> None:
    noise = (2.1e9, 4e9, 2.8e9, 3.3e9, 2.5e9, 3.6e9)
    pairs = ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))
    rates = _links(3, dict(zip(pairs, noise, strict=True)))
    assert slow_links(rates, _one_rank_each(3)) == ([], [])


@given(st.lists(st.integers(0, 4), min_size=2, max_size=14))
def test_every_pair_has_its_turn_and_no_host_two_at_once(hosts: list[int]) -> None:
    pairs = link_pairs(hosts)
    order = concurrent_pairs(pairs, hosts)
    assert sorted(pair for turn in order for pair in turn) == sorted(pairs)
    for turn in order:
        busy = [host for low, high in turn for host in {hosts[low], hosts[high]}]
        assert len(busy) == len(set(busy))


def test_a_large_world_is_measured_by_hosts_and_neighbours() -> None:
    hosts = [rank // 8 for rank in range(64)]
    pairs = link_pairs(hosts)
    between = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]]
    assert len(between) == 8 * 7 / 2
    assert len(pairs) - len(between) == 8 * 7
