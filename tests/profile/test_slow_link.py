"""Two hosts with a slow link between them: the time is explained as moving data."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Network, hosts_missing, network
from worlds import TUTTI, clean_environment, run_tutti

pytestmark = pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))

SCRIPT = Path(__file__).parent / "plain_ddp.py"
# 1 MiB of gradients a step takes 0.4 s at this rate; their computation takes about 0.1 s.
SLOW = "tbf rate 20mbit burst 64kb latency 400ms"
WORK = {"WIDTH": "256", "BATCH": "2048", "GLOO_SOCKET_IFNAME": "eth0"}
SCHEDULE = ["--wait", "1", "--warmup", "1", "--active", "3"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(2) as made:
        yield made


def _profiled(made: Network, out: Path, port: int, backend: str) -> dict[str, Any]:
    """Return the explanation of two ranks, each under its own `tutti profile` on its host."""
    ranks = [
        host.popen(
            [*TUTTI, "profile", "--out", str(out), *SCHEDULE, "--", str(SCRIPT), backend, "6"],
            env=clean_environment()
            | WORK
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": str(port)},
        )
        for rank, host in enumerate(made.hosts)
    ]
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    done = run_tutti("profile", "--trace", out, "--json", out / "result.json")
    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert [each["host"] for each in rows["ranks"]] == ["n1", "n2"]
    return rows


def _parts(made: Network, out: Path, port: int) -> dict[str, float]:
    """Shares of the parts of a step, mean over both ranks."""
    rows = _profiled(made, out, port, "gloo")
    shares = [each["parts_share"] for each in rows["ranks"]]
    return {name: sum(each[name] for each in shares) / len(shares) for name in shares[0]}


@pytest.mark.measured
def test_a_slow_link_appears_as_exposed_communication_and_a_fast_link_does_not(
    hosts: Network, tmp_path: Path
) -> None:
    ends = [(hosts.hosts[1], "eth0"), (hosts.hub, "n2")]  # both directions of n2's cable
    for host, interface in ends:
        done = host.run(["tc", "qdisc", "add", "dev", interface, "root", *SLOW.split()])
        assert done.returncode == 0, done.stderr
    slow = _parts(hosts, tmp_path / "slow", 29421)
    for host, interface in ends:
        assert host.run(["tc", "qdisc", "del", "dev", interface, "root"]).returncode == 0
    fast = _parts(hosts, tmp_path / "fast", 29422)

    assert max(slow, key=slow.__getitem__) == "exposed", slow
    assert max(fast, key=fast.__getitem__) != "exposed", fast
    assert fast["exposed"] < slow["exposed"] / 2


def test_shm_over_several_hosts_is_recorded(hosts: Network, tmp_path: Path) -> None:
    rows = _profiled(hosts, tmp_path / "shm", 29423, "shm")

    assert {each["backend"] for each in rows["ranks"]} == {"shm"}
    gradients = [each for each in rows["comm"] if each["bytes"] != 4]
    assert {each["bytes"] for each in gradients} == {4 * (256 * 256 + 256)}
    assert [each["matched"] for each in gradients] == [3 * 4]  # steps × buckets
    assert all(each["axis"] == "dp" and each["transfer_s"]["p50"] > 0 for each in gradients)
