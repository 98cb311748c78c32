"""Verdicts on links: the rank, host or pair that explains the slow pairs is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.bandwidth.link_verdicts import Finding, judge_pairs, pair_class
from tutti.bench.bandwidth.point_to_point import disjoint_rounds
from tutti.machine.hardware_catalogue import Figure

Flow = tuple[int, int]


def cpu_location(rank: int, host: str) -> dict[str, Any]:
    return {
        "rank": rank, "host": host, "machine": host, "device": "cpu", "gpu": None,
        "cores": [str(rank)], "numa": [0],
        "interface": {"name": "eth0", "mbits": 10000, "mtu": 1500, "shaper": None},
    }  # fmt: skip


def gpu_location(rank: int, **changes: Any) -> dict[str, Any]:
    gpu = {
        "name": "NVIDIA H200", "uuid": f"u{rank}", "pci": f"0000:{rank:02x}:00.0",
        "numa": rank // 4, "pcie_width": 16, "pcie_width_max": 16, "nvlinks_to": [],
        "nvlinks_to_switch": 18,
    }  # fmt: skip
    location = cpu_location(rank, "n1") | {"device": f"cuda:{rank}", "interface": None}
    return location | {"gpu": gpu | changes}


def rows(locations: list[dict[str, Any]], speeds: dict[Flow, float], usual: float) -> list[Any]:
    """Return a row for each pair, with its speed in `speeds`, or else `usual`."""
    ranks, found = range(len(locations)), []
    for flow in ((a, b) for a in ranks for b in ranks if a != b):
        one_way = speeds.get(flow, usual)
        both = 2 * min(one_way, speeds.get(flow[::-1], usual))
        found.append(
            {
                "src": flow[0], "dst": flow[1], "bytes": 1 << 28,
                "class": pair_class(locations[flow[0]], locations[flow[1]]),
                "gbs_uni": one_way, "gbs_uni_best": one_way, "gbs_bi": both, "gbs_bi_best": both,
                "spread": 0.02, "wrong": 0,
            }
        )  # fmt: skip
    return found


def judged(locations: list[dict[str, Any]], measured: list[Any]) -> list[Finding]:
    return judge_pairs(measured, locations, lambda row: None)


def one_host_each(count: int) -> list[dict[str, Any]]:
    return [cpu_location(rank, f"n{rank + 1}") for rank in range(count)]


@st.composite
def hosts_and_noise(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[Flow, float]]:
    locations = one_host_each(draw(st.integers(3, 6)))
    flows = [(a, b) for a in range(len(locations)) for b in range(len(locations)) if a != b]
    return locations, {flow: draw(st.floats(0.95, 1.05)) for flow in flows}


@given(hosts_and_noise())
def test_healthy_links_give_no_finding(hosts: Any) -> None:
    locations, speeds = hosts
    measured = rows(locations, speeds, 1.0)
    assert judged(locations, measured) == []
    assert {row["verdict"] for row in measured} == {"good"}


@given(hosts_and_noise(), st.data())
def test_only_the_host_with_a_slow_link_is_named(hosts: Any, data: st.DataObject) -> None:
    locations, speeds = hosts
    slow_host = data.draw(st.integers(0, len(locations) - 1))
    directions = data.draw(st.sampled_from(["sending", "receiving", "sending and receiving"]))
    for src, dst in speeds:
        if (src == slow_host and "sending" in directions) or (
            dst == slow_host and "receiving" in directions
        ):
            speeds[src, dst] *= data.draw(st.floats(0.02, 0.4))
    (finding,) = judged(locations, rows(locations, speeds, 1.0))
    assert (
        finding.what == f"the link of host n{slow_host + 1}, {directions}"
        and finding.verdict == "bad"
    )


@given(hosts_and_noise(), st.data())
def test_a_slow_pair_is_named_as_a_pair(hosts: Any, data: st.DataObject) -> None:
    locations, speeds = hosts
    src, dst = data.draw(st.sampled_from(sorted(speeds)))
    both = data.draw(st.booleans())
    for flow in ((src, dst), (dst, src))[: 1 + both]:
        speeds[flow] *= 0.6
    (finding,) = judged(locations, rows(locations, speeds, 1.0))
    first, second = (min(src, dst), max(src, dst)) if both else (src, dst)
    assert finding.what == f"n{first + 1} {'↔' if both else '→'} n{second + 1}"
    assert finding.verdict == "degraded"


def test_a_slow_rank_is_distinguished_from_its_host() -> None:
    locations = [cpu_location(rank, f"n{rank // 2 + 1}") for rank in range(6)]
    far = [r for r in range(6) if r not in (2, 3)]
    slow = {(3, r): 0.1 for r in far} | {(r, 3): 0.1 for r in far}
    (finding,) = judged(locations, rows(locations, slow, 1.0))
    assert finding.what == "rank 3 (n2, cpu), sending and receiving"


def test_between_two_hosts_the_slow_direction_is_named() -> None:
    locations = [cpu_location(rank, f"n{rank // 2 + 1}") for rank in range(4)]
    slow = {(a, b): 0.1 for a in (0, 1) for b in (2, 3)}
    (finding,) = judged(locations, rows(locations, slow, 1.0))
    assert finding.what == "n1 → n2" and finding.pairs == ((0, 2), (0, 3), (1, 2), (1, 3))


def test_a_pair_alone_in_its_class_is_unknown_unless_its_directions_differ() -> None:
    locations = one_host_each(2)
    measured = rows(locations, {}, 1.0)
    assert judged(locations, measured) == [] and {row["verdict"] for row in measured} == {"unknown"}
    (finding,) = judged(locations, rows(locations, {(0, 1): 0.2}, 1.0))
    assert finding.what == "n1 → n2"


def test_a_link_that_was_fast_in_one_pass_is_not_slow() -> None:
    locations = one_host_each(3)
    measured = rows(locations, {(0, 1): 0.3}, 1.0)
    measured[0]["gbs_uni_best"] = 0.97
    measured[0]["gbs_bi_best"] = 1.9
    measured[2]["gbs_bi_best"] = 1.9
    assert judged(locations, measured) == []


def test_a_half_duplex_pair_is_found() -> None:
    locations = one_host_each(4)
    measured = rows(locations, {}, 1.0)
    for row in measured:
        if {row["src"], row["dst"]} == {1, 2}:
            row["gbs_bi"] = row["gbs_bi_best"] = 1.0
    (finding,) = judged(locations, measured)
    assert finding.what == "n2 ↔ n3" and finding.verdict == "degraded"


def test_observed_causes_come_before_common_ones() -> None:
    locations = one_host_each(3)
    locations[1]["interface"] |= {"mbits": 1000, "shaper": "tbf, 200 Mbit/s"}
    slow = {(1, 0): 0.1, (1, 2): 0.1}
    (finding,) = judged(locations, rows(locations, slow, 1.0))
    assert finding.causes[0] == "observed: tc limits eth0 of n2 (tbf, 200 Mbit/s)"
    assert "eth0 of n2 has 1000 Mbit/s, but the others have 10000" in finding.causes[1]


def test_a_gpu_with_missing_nvlinks_is_named_with_their_number() -> None:
    locations = [gpu_location(rank) for rank in range(7)] + [gpu_location(7, nvlinks_to_switch=9)]
    slow = {(7, r): 200.0 for r in range(7)} | {(r, 7): 200.0 for r in range(7)}
    (finding,) = judged(locations, rows(locations, slow, 390.0))
    assert finding.what == "rank 7 (n1, cuda:7), sending and receiving"
    assert (
        finding.causes[0]
        == "observed: the GPU of rank 7 has 9 active NVLinks, but the others have 18 or more"
    )


def test_if_all_pairs_are_slow_the_catalogue_is_the_reference() -> None:
    locations = [gpu_location(rank) for rank in range(4)]
    published = Figure(("H200",), "pair", 1 << 26, 396.4, "a source")
    measured = rows(locations, {}, 100.0)
    (finding,) = judge_pairs(measured, locations, lambda row: published)
    assert finding.what == "all pairs of the class NVSwitch" and finding.verdict == "bad"
    assert finding.against == "the catalogue: a source"
    assert judge_pairs(rows(locations, {}, 350.0), locations, lambda row: published) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (cpu_location(0, "n1"), cpu_location(1, "n2"), "other host"),
        (cpu_location(0, "n1"), cpu_location(1, "n1"), "same NUMA node"),
        (cpu_location(0, "n1"), cpu_location(1, "n1") | {"numa": [1]}, "other NUMA node"),
        (cpu_location(0, "n1"), cpu_location(1, "n1") | {"numa": [0, 1]}, "same host"),
        (cpu_location(0, "n1"), cpu_location(0, "n1"), "same core"),
        (gpu_location(0), gpu_location(1), "NVSwitch"),
        (gpu_location(0, nvlinks_to=["0000:01:00.0"]), gpu_location(1), "NVLink"),
        (gpu_location(0, nvlinks_to_switch=0), gpu_location(1, nvlinks_to_switch=0), "PCIe"),
        (gpu_location(0, nvlinks_to_switch=0), gpu_location(4, nvlinks_to_switch=0), "NUMA"),
        (
            gpu_location(0, numa=None, nvlinks_to_switch=0),
            gpu_location(4, nvlinks_to_switch=0),
            "PCIe",
        ),
        (gpu_location(0), gpu_location(0), "same GPU"),
    ],
)
def test_classes_of_pairs(a: Any, b: Any, expected: str) -> None:
    assert pair_class(a, b) == pair_class(b, a) == expected


@given(st.integers(2, 17))
def test_rounds_are_disjoint_and_contain_every_pair_once(ranks: int) -> None:
    rounds = disjoint_rounds(ranks)
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(set(members)) == len(members)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(ranks) for b in range(a + 1, ranks)
    ]
    assert len(rounds) == ranks - 1 + ranks % 2, "the smallest possible number of rounds"
