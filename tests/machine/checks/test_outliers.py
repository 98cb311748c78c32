"""Outliers by median and MAD: small differences are ignored, slow hosts come before their links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.machine.checks.cluster import MeasuredRate
from tutti.machine.checks.outliers import MIN_DIFFERENCE, slow_links, slow_outliers
from tutti.machine.checks.probe_network import concurrent_pairs, link_pairs


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ({"a": 10, "b": 10.2, "c": 7, "d": 9.9, "e": 10.1}, ["c"]),
        ({"a": 10, "b": 10, "c": 9.2, "d": 10, "e": 10}, []),  # less than 10 %
        ({"a": 10, "b": 7, "c": 14, "d": 5.5, "e": 12}, []),  # all differ
        ({"a": 10, "b": 5, "c": 10, "d": 2, "e": 10, "f": 10}, ["d", "b"]),  # slowest first
        # Of two values, one is reported only below half of the other.
        ({"a": 10, "b": 6}, []),
        ({"a": 10, "b": 4}, ["b"]),
        ({"a": 3, "b": 10}, ["a"]),
        ({"a": 0.0}, []),
        ({}, []),
    ],
)
def test_slow_values_are_reported(values: dict[str, float], slow: list[str]) -> None:
    assert slow_outliers(values) == slow


@given(st.lists(st.floats(1e6, 1e10), min_size=3, max_size=20), st.floats(1e-3, 1e3))
def test_only_values_below_the_median_are_slow_in_any_unit(
    values: list[float], unit: float
) -> None:
    named = {str(i): value for i, value in enumerate(values)}
    slow = slow_outliers(named)
    middle = sorted(values)[len(values) // 2]
    assert all(named[name] < middle * (1 - MIN_DIFFERENCE) * (1 + 1e-9) for name in slow)
    assert len(slow) <= len(values) // 2
    assert slow_outliers({name: value * unit for name, value in named.items()}) == slow


@given(st.lists(st.floats(1e9, 1.05e9), min_size=4, max_size=20), st.data())
def test_a_value_at_a_tenth_of_the_others_is_the_only_outlier(
    values: list[float], data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(values) - 1))
    named = {str(i): value * (0.1 if i == slow else 1) for i, value in enumerate(values)}
    assert slow_outliers(named) == [str(slow)]


def links(hosts: int, speed: dict[tuple[int, int], float]) -> list[MeasuredRate]:
    return [
        MeasuredRate(f"{src}-{dst}", src, "network", speed.get((src, dst), 3e9))
        for src in range(hosts)
        for dst in range(hosts)
        if src != dst
    ]


def one_rank_per_host(hosts: int) -> dict[str, int]:
    return {str(rank): rank for rank in range(hosts)}


def test_a_slow_link_is_reported_and_its_hosts_are_not() -> None:
    rates = links(4, {(1, 2): 2e7, (2, 1): 2e7})
    assert slow_links(rates, one_rank_per_host(4)) == ([], ["1-2", "2-1"])


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_a_host_whose_links_are_all_slow_is_reported_instead_of_its_links(hosts: int) -> None:
    """With three hosts, four of six directions are slow, so the median link is slow too."""
    bad = hosts - 1
    speed = {(bad, other): 2e7 for other in range(bad)}
    speed |= {(other, bad): 2e7 for other in range(bad)}
    assert slow_links(links(hosts, speed), one_rank_per_host(hosts)) == ([bad], [])


def test_a_host_that_only_sends_slowly_is_reported() -> None:
    speed = {(2, other): 2e7 for other in (0, 1, 3)}
    assert slow_links(links(4, speed), one_rank_per_host(4)) == ([2], [])


def test_ordinary_variation_of_links_is_not_reported() -> None:
    speeds = (2.1e9, 4e9, 2.8e9, 3.3e9, 2.5e9, 3.6e9)
    pairs = ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))
    rates = links(3, dict(zip(pairs, speeds, strict=True)))
    assert slow_links(rates, one_rank_per_host(3)) == ([], [])


@given(st.lists(st.integers(0, 4), min_size=2, max_size=14))
def test_every_pair_is_measured_and_a_host_is_in_one_pair_at_a_time(hosts: list[int]) -> None:
    pairs = link_pairs(hosts)
    groups = concurrent_pairs(pairs, hosts)
    assert sorted(pair for group in groups for pair in group) == sorted(pairs)
    for group in groups:
        busy = [host for low, high in group for host in {hosts[low], hosts[high]}]
        assert len(busy) == len(set(busy))


def test_a_large_world_is_measured_between_hosts_and_adjacent_ranks() -> None:
    hosts = [rank // 8 for rank in range(64)]
    pairs = link_pairs(hosts)
    between = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]]
    assert len(between) == 8 * 7 / 2
    assert len(pairs) - len(between) == 8 * 7
