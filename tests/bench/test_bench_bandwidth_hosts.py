"""tutti bench bandwidth over several hosts with one slow link: only that link is named."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hosts import Network, hosts_missing, network
from worlds import clean_environment

pytestmark = pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))

SLOW = "tbf rate 200mbit burst 64kb latency 50ms"
FLAGS = ["--sizes", "512K", "--budget", "0.3", "--only", "pairs", "--device", "cpu"]


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Network]:
    with network(3) as made:
        yield made


def limit_rate(made: Network, host: int, interfaces: Sequence[str]) -> None:
    """Limit the rate of the host's interface (eth0) or of its switch port (nN)."""
    for interface in interfaces:
        where = made.hosts[host] if interface == "eth0" else made.hub
        done = where.run(["tc", "qdisc", "add", "dev", interface, "root", *SLOW.split()])
        assert done.returncode == 0, done.stderr


def remove_limit(made: Network, host: int, interfaces: Sequence[str]) -> None:
    for interface in interfaces:
        where = made.hosts[host] if interface == "eth0" else made.hub
        where.run(["tc", "qdisc", "del", "dev", interface, "root"])


def measured(made: Network, file: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Run one rank on each host, n1 first, and return exit code, JSON and output of rank 0."""
    command = [sys.executable, "-m", "tutti", "bench", "bandwidth", *FLAGS, *flags]
    ranks = [
        host.popen(
            [*command, "--json", str(file)],
            env=clean_environment()
            | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29411"},
        )
        for rank, host in enumerate(made.hosts)
    ]
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    assert ranks[0].returncode in (0, 1), outputs
    return ranks[0].returncode, json.loads(file.read_text()), outputs[0][0]


@pytest.mark.measured
def test_only_the_slow_link_is_named(three_hosts: Network, tmp_path: Path) -> None:
    # Both directions of n2's link: four of the six pairs are slow, which is the majority.
    limit_rate(three_hosts, 1, ["eth0", "n2"])
    try:
        code, content, output = measured(three_hosts, tmp_path / "b.json", "--expect", "catalogue")
    finally:
        remove_limit(three_hosts, 1, ["eth0", "n2"])
    (finding,) = content["findings"]
    assert finding["what"] == "the link of host n2, sending and receiving", output
    assert finding["verdict"] == "bad"
    assert finding["causes"][0] == "observed: tc limits eth0 of n2 (tbf, 200 Mbit/s)"
    verdicts = {(row["src"], row["dst"]): row["verdict"] for row in content["pairs"]}
    assert verdicts == {
        (0, 1): "bad", (1, 0): "bad", (1, 2): "bad", (2, 1): "bad",
        (0, 2): "good", (2, 0): "good",
    }  # fmt: skip
    assert {row["class"] for row in content["pairs"]} == {"other host"}
    assert all(row["wrong"] == 0 for row in content["pairs"])
    # 200 Mbit/s are 0.025 GB/s, minus packet headers
    slow = [row["gbs_uni"] for row in content["pairs"] if row["verdict"] == "bad"]
    assert max(slow) < 0.03
    assert "# bad: the link of host n2, sending and receiving: 0.02" in output
    assert code == 1 and "# missed: the link of host n2" in output


@pytest.mark.measured
def test_a_link_that_is_slow_in_one_direction_is_named_with_the_direction(
    three_hosts: Network, tmp_path: Path
) -> None:
    limit_rate(three_hosts, 2, ["n3"])  # only the direction from the switch to n3
    try:
        code, content, output = measured(three_hosts, tmp_path / "b.json")
    finally:
        remove_limit(three_hosts, 2, ["n3"])
    assert [each["what"] for each in content["findings"]] == ["the link of host n3, receiving"], (
        output
    )
    assert code == 0, "without --expect, a slow link does not fail the run"
