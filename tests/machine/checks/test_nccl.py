"""Checks nccl.*: NCCL's log and dump files, compared with the topology; processes that are watched.

The files in tests/machine/nccl have the format of NCCL_TOPO_DUMP_FILE and NCCL_GRAPH_DUMP_FILE.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from check_cases import HEALTHY, NCCL_FILES, cluster, nccl_ranks, recorded, with_variables

from tutti.machine.checks import probe_nccl
from tutti.machine.checks.checklist import run_checks
from tutti.machine.checks.cluster import STOPPED, Cluster, NcclRank
from tutti.machine.checks.finding import Finding
from tutti.machine.checks.nccl_topology import (
    describe,
    nvlinks_between,
    parse_connections,
    parse_graphs,
    parse_topology,
    path_through,
    select_lines,
)
from tutti.machine.checks.probe_network import Peers

PCIE_BOX = recorded("pcie-box")[0]
TWO_HOSTS = (replace(HEALTHY, host="n0"), replace(HEALTHY, host="n1"))


def nccl_findings(checked: Cluster) -> dict[str, list[Finding]]:
    """The findings of the checks nccl.*, by check."""
    found: dict[str, list[Finding]] = {}
    for finding in run_checks(checked):
        if finding.id.startswith("nccl."):
            found.setdefault(finding.id, []).append(finding)
    return found


# --- NCCL's files --------------------------------------------------------------------------------

LOG = """
NCCL version 2.28.9+cuda13.0
n0:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n0:71:93 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n0:71:93 [1] NCCL INFO Channel 00/1 : 1[1] -> 0[0] via P2P/CUMEM/read
n0:71:93 [0] NCCL INFO Channel 00 : 0[0] -> 2[4] via SHM/direct/direct
n0:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/3/GDRDMA
n0:71:93 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/3/GDRDMA
[2026-05-05 06:16:47] n0:71:93 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/x
n0:71:93 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""


def test_the_log_gives_every_connection_and_warning_once() -> None:
    lines = select_lines(LOG)
    assert [line for line in lines if line.startswith("WARN")] == [
        "WARN Error: failed to extend /dev/shm/x"
    ]
    pairs = {each.ranks: each for each in parse_connections(lines)}
    assert {ranks: each.slowest for ranks, each in pairs.items()} == {
        (0, 1): "P2P/CUMEM/read",
        (0, 2): "SHM/direct/direct",
        (0, 8): "NET/IB/3/GDRDMA",
    }
    assert pairs[0, 2].gpus == (0, 4)


def test_the_topology_file_gives_nvlinks_paths_and_nics() -> None:
    gpus, nets = parse_topology((NCCL_FILES / "h100-nvswitch.topology.xml").read_text())
    assert [gpu.rank for gpu in gpus] == list(range(8))
    assert nvlinks_between(gpus[0], gpus[7]) == 18
    assert path_through(gpus[0], gpus[3]) == "one CPU"
    assert path_through(gpus[0], gpus[4]) == "two CPUs"
    assert {net.name for net in nets} == {f"mlx5_{number}" for number in range(8)}
    assert all(net.gbps == 400 and net.gpu_direct for net in nets)
    gpus, nets = parse_topology((NCCL_FILES / "pcie-box.topology.xml").read_text())
    assert path_through(gpus[0], gpus[1]) == "a PCIe switch"
    assert path_through(gpus[2], gpus[3]) == "one CPU"
    assert nvlinks_between(gpus[0], gpus[1]) == 0


def test_nvlinks_without_switches_are_counted_for_each_pair() -> None:
    text = (
        '<system version="1"><cpu numaid="0">'
        '<pci busid="0000:01:00.0"><gpu dev="0" rank="0">'
        '<nvlink target="0000:02:00.0" count="4" tclass="0x030200"/></gpu></pci>'
        '<pci busid="0000:02:00.0"><gpu dev="1" rank="1">'
        '<nvlink target="0000:01:00.0" count="4" tclass="0x030200"/></gpu></pci>'
        '<pci busid="0000:03:00.0"><gpu dev="2" rank="2"/></pci></cpu></system>'
    )
    gpus, nets = parse_topology(text)
    assert not nets
    assert [nvlinks_between(gpus[0], gpu) for gpu in gpus[1:]] == [4, 0]


def test_the_graph_file_gives_channels_and_bandwidths() -> None:
    ring, tree, *others = parse_graphs((NCCL_FILES / "h100-nvswitch.graphs.xml").read_text())
    assert (ring.name, ring.channels, ring.intra_gbs, ring.intra_type) == ("ring", 2, 20.0, "NVL")
    assert tree.name == "tree" and tree.gpus == set(range(8))
    assert not any(graph.channels for graph in others)


@pytest.mark.parametrize("text", ["<system", "<graphs/>", "", "<system><net speed='x'/></system>"])
def test_an_unreadable_dump_skips_its_check_with_the_reason(text: str) -> None:
    found = nccl_findings(cluster(HEALTHY, nccl=nccl_ranks(topology=text)))
    (finding,) = found["nccl.topology"]
    assert finding.status == "skip" and "NCCL" in finding.observed
    assert "the check itself failed" not in finding.observed
    assert found["nccl.channels"][0].status == "pass"


# --- checks --------------------------------------------------------------------------------------


def test_a_healthy_machine_passes_and_shows_transports_channels_and_bandwidths() -> None:
    checked = cluster(HEALTHY, nccl=nccl_ranks())
    found = nccl_findings(checked)
    assert {check: each.status for check, (each,) in found.items()} == dict.fromkeys(
        ("nccl.start", "nccl.transport", "nccl.topology", "nccl.channels"), "pass"
    )
    observed = {check: each.observed for check, (each,) in found.items()}
    assert "8 ranks" in observed["nccl.start"] and "1.2 s" in observed["nccl.start"]
    assert "28 × P2P/CUMEM" in observed["nccl.transport"]
    assert "28 pairs" in observed["nccl.topology"] and "mlx5_7" in observed["nccl.topology"]
    assert "ring 2 channels × 20 GB/s = 40 GB/s (NVL)" in observed["nccl.channels"]
    values: Any = json.loads(json.dumps(describe(checked)))
    assert len(values["connections"]) == 28 and len(values["ranks"]) == 8
    assert values["graphs"][0]["channels"] == 2


def test_without_nccl_the_checks_are_skipped() -> None:
    found = nccl_findings(cluster(HEALTHY, skipped={"nccl": "torch finds no CUDA device"}))
    assert {each.observed for (each,) in found.values()} == {"torch finds no CUDA device"}
    assert describe(cluster(HEALTHY)) is None


@pytest.mark.parametrize(
    ("warning", "cure"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", "--ranks-per-gpu"),
        ("Error while creating shared memory segment /dev/shm/nccl-A (size 9637888)", "--shm-size"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("Cuda failure 2 'out of memory'", "gpus.processes"),
        ("Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime'", "driver"),
        ("Cuda failure 802 'system not yet initialized'", "fabricmanager"),
        ("NET/IB: Call to ibv_reg_mr failed with error Cannot allocate memory", "limits.memlock"),
        ("socketStartConnect: Connect to 10.0.0.2<41263> failed : Connection refused", "ports"),
        ("Could not find: libnccl-net.so", "NCCL_NET_PLUGIN"),
        ("a warning that nobody has seen before", "NCCL_DEBUG=INFO"),
    ],
)
def test_a_failed_start_reports_the_first_warning_and_its_cure(warning: str, cure: str) -> None:
    ranks = nccl_ranks(count=3)
    failed = replace(
        ranks[1], stage="init", error="exit code 1", log=[f"WARN {warning}", "WARN a later one"]
    )
    stopped = replace(ranks[2], stage="init", error=STOPPED)
    found = nccl_findings(cluster(HEALTHY, nccl=(ranks[0], failed, stopped)))
    (finding,) = found["nccl.start"]
    assert (finding.status, finding.scope) == ("fail", "rank:1")
    assert warning in finding.observed and "communicator" in finding.observed
    assert cure in finding.cure
    assert all(found[check][0].status == "skip" for check in found if check != "nccl.start")


def test_ranks_with_the_same_failure_give_one_finding() -> None:
    failed = [
        replace(rank, stage="all_reduce", error="7 of 100 elements are wrong", log=())
        for rank in nccl_ranks(count=4)
    ]
    (finding,) = nccl_findings(cluster(HEALTHY, nccl=tuple(failed)))["nccl.start"]
    assert "7 of 100 elements are wrong" in finding.observed and "3 more ranks" in finding.observed


def test_a_switched_off_transport_is_named_in_the_cure() -> None:
    machine = with_variables(HEALTHY, NCCL_P2P_DISABLE="1")
    checked = cluster(machine, nccl=nccl_ranks(transport="SHM/direct/direct"))
    (finding,) = nccl_findings(checked)["nccl.transport"]
    assert finding.status == "fail" and "28 pairs" in finding.observed
    assert "unset NCCL_P2P_DISABLE" in finding.cure


def test_shared_memory_is_expected_only_without_peer_access() -> None:
    """GPU0 and GPU1 are below PCIe switches; all other pairs are connected through CPUs."""
    checked = cluster(PCIE_BOX, nccl=nccl_ranks("pcie-box", 4, "SHM/direct/direct"))
    found = nccl_findings(checked)
    (finding,) = found["nccl.transport"]
    assert (finding.status, finding.scope) == ("warn", "pair:0-1") and "PXB" in finding.observed
    (nic,) = found["nccl.topology"]
    assert (nic.status, nic.scope) == ("warn", "nic:mlx5_0") and "eno1" in nic.observed
    assert found["nccl.channels"][0].status == "skip"


def test_a_pcie_path_that_differs_is_reported_unless_a_topology_file_is_used() -> None:
    """In NCCL's topology, GPU3 is moved to the other CPU."""
    text = (NCCL_FILES / "pcie-box.topology.xml").read_text()
    gpu_3 = text[text.index('    <pci busid="0000:42:00.0"') : text.index("    <nic>")]
    moved = text.replace(gpu_3, "").replace("  </cpu>\n  <cpu", f"{gpu_3}  </cpu>\n  <cpu", 1)
    ranks = nccl_ranks("pcie-box", 4, topology=moved)
    for machine, expected in (
        (PCIE_BOX, {("pair:0-3", True), ("pair:2-3", False)}),
        (with_variables(PCIE_BOX, NCCL_TOPO_FILE="/topology.xml"), set()),
    ):
        found = nccl_findings(cluster(machine, nccl=ranks))["nccl.topology"]
        pairs = [each for each in found if each.scope.startswith("pair:")]
        assert {(each.scope, "pair:1-3" in each.observed) for each in pairs} == expected


@pytest.mark.parametrize(
    ("transport", "status", "word"),
    [
        ("NET/Socket/0", "fail", "TCP"),
        ("NET/IB/0", "warn", "GPUDirect"),
        ("NET/IB/0/GDRDMA", "pass", "NET/IB/GDRDMA"),
    ],
)
def test_between_hosts_with_rdma_nccl_must_use_gpu_direct(
    transport: str, status: str, word: str
) -> None:
    ranks = (
        NcclRank(0, 0, "done", init_s=1.0, log=[f"0[0] 1[0] {transport}"]),
        NcclRank(1, 1, "done", init_s=1.0),
    )
    (finding,) = nccl_findings(cluster(*TWO_HOSTS, nccl=ranks))["nccl.transport"]
    assert finding.status == status and word in finding.observed


def test_nics_without_gpu_direct_or_with_another_rate_are_reported() -> None:
    text = nccl_ranks()[0].topology
    text = text.replace('gdr="1"/>', 'gdr="0"/>', 1).replace('speed="400000"', 'speed="200000"', 1)
    found = nccl_findings(cluster(HEALTHY, nccl=nccl_ranks(topology=text)))["nccl.topology"]
    assert {each.scope for each in found} == {"nic:mlx5_0"} and len(found) == 2
    assert any("200" in each.observed and "400" in each.expected for each in found)
    assert any("GPUDirect" in each.observed for each in found)


# --- processes -----------------------------------------------------------------------------------

ONE_HOST = Peers(0, [0], lambda value: [value])

# A rank that hangs with a child process while NCCL creates the communicator; another that fails.
PROGRAM = """
import os, pathlib, subprocess, sys, time
rank = int(sys.argv[1])
print('{"stage": "init"}', flush=True)
if rank == int(os.environ["FAILING_RANK"]):
    log = f"n0:1:2 [0] init.cc:1 NCCL WARN rank {rank} failed\\n"
    pathlib.Path(os.environ["NCCL_DEBUG_FILE"]).write_text(log)
    pathlib.Path(os.environ["NCCL_TOPO_DUMP_FILE"]).write_text("<system/>")
    pathlib.Path(os.environ["NCCL_GRAPH_DUMP_FILE"]).write_text("<graphs/>")
    sys.exit("cannot continue")
child = subprocess.Popen(["sleep", "300"])
pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(300)
"""


def start_program(
    ranks: int, failing: int, pids: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[NcclRank, ...]:
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setenv("FAILING_RANK", str(failing))
    return probe_nccl.start_nccl(ONE_HOST, ranks, (sys.executable, "-c", PROGRAM), seconds)


def all_ended(pids: Sequence[int]) -> bool:
    """Whether the processes end within 10 s. A process that init has not yet reaped has ended."""
    for _ in range(100):
        states = [_state(pid) for pid in pids]
        if all(state in ("", "Z") for state in states):
            return True
        time.sleep(0.1)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.timeout(60)
def test_a_rank_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    (result,) = start_program(1, -1, pids, 3.0, monkeypatch)
    assert result.stage == "init" and "3 s" in result.error
    assert all_ended([int(pid) for pid in pids.read_text().split()])
    (finding,) = nccl_findings(cluster(HEALTHY, nccl=(result,)))["nccl.start"]
    assert finding.status == "fail" and "communicator" in finding.observed


@pytest.mark.timeout(60)
def test_the_failure_of_one_rank_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_nccl, "_SECONDS_AFTER_FAILURE", 1.0)
    pids = tmp_path / "pids"
    failed, stopped = start_program(2, 0, pids, 50.0, monkeypatch)
    assert "exit code 1" in failed.error and "cannot continue" in failed.error
    assert failed.log == ["WARN rank 0 failed"]
    assert (failed.topology, failed.graphs) == ("<system/>", "<graphs/>")
    assert stopped.error == STOPPED
    assert all_ended([int(pid) for pid in pids.read_text().split()])


@pytest.mark.timeout(120)
def test_every_rank_of_a_world_starts_its_own_process_and_gets_all_results() -> None:
    """Two threads act as the ranks of a world. gloo takes the place of NCCL."""
    shared: list[Any] = [None, None]
    results: list[tuple[NcclRank, ...]] = [(), ()]
    barrier = threading.Barrier(2, timeout=100)

    def run_rank(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            shared[rank] = json.loads(json.dumps(value))
            barrier.wait()
            values = list(shared)
            barrier.wait()
            return values

        command = (sys.executable, "-m", probe_nccl.__name__, "gloo")
        results[rank] = probe_nccl.start_nccl(Peers(rank, [0, 0], gather), 1, command)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    assert [(each.rank, each.stage, each.error) for each in results[0]] == [
        (0, "done", ""),
        (1, "done", ""),
    ]
    assert all(each.init_s is not None for each in results[0])
