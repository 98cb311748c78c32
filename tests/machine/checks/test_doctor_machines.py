"""What is said of recorded machines: the right diagnosis, and of healthy ones nothing."""

from dataclasses import replace

import pytest
from cases import change, found, healthy, names, of_gpu, plain, recorded, with_variables

from tutti.machine.checks.checklist import CHECKS, run_checks
from tutti.machine.checks.cluster import Cluster, MeasuredRate, ProbeResults, RankObservation
from tutti.machine.checks.finding import Finding, Verdict, machine_check
from tutti.machine.observation import Machine


@pytest.mark.parametrize(
    ("name", "diagnosis"),
    [
        ("h100-nvswitch", set()),
        ("pcie-box", set()),
        ("cpu-only", set()),
        (
            "degraded-nvlink",
            {("fail", "nvlink.active", "gpu:3"), ("fail", "nvlink.errors", "gpu:3")},
        ),
        ("vm-hidden-pcie", {("warn", "pcie.hidden", "machine")}),
        (
            "roce-cluster",
            {
                ("fail", "rdma.rate", "nic:mlx5_2"),
                ("warn", "rdma.errors", "nic:mlx5_2"),
                ("warn", "network.errors", "nic:rdma2"),
            },
        ),
    ],
)
def test_a_recorded_machine_gets_its_diagnosis_and_no_other(
    name: str, diagnosis: set[tuple[str, str, str]]
) -> None:
    assert names(found(*recorded(name))) == diagnosis


def test_the_bad_port_is_that_of_the_second_host() -> None:
    assert {each.host for each in found(*recorded("roce-cluster"))} == {"roce-2"}


def test_each_host_of_the_cluster_alone_is_judged_by_its_neighbours() -> None:
    good, bad = recorded("roce-cluster")
    assert found(good) == []
    assert ("fail", "rdma.rate", "nic:mlx5_2") in names(found(bad))


def test_every_finding_says_what_was_seen_what_is_expected_and_the_cure() -> None:
    for name in ("degraded-nvlink", "vm-hidden-pcie", "roce-cluster"):
        for each in found(*recorded(name)):
            assert each.observed and each.expected and each.cure, each


def test_a_check_that_raises_is_skipped_with_the_reason_and_the_others_go_on() -> None:
    def broken(machine: Machine) -> list[Verdict]:
        raise FileNotFoundError(2, "No such file", "/sys/nowhere")

    check = machine_check("x.broken", "", "", "")(broken)
    said = run_checks(Cluster((plain(),)), (check, *CHECKS))
    assert len({each.id for each in said}) == len(CHECKS) + 1
    (skip,) = [each for each in said if each.id == "x.broken"]
    assert skip.status == "skip"
    assert "FileNotFoundError" in skip.observed and "/sys/nowhere" in skip.observed


def test_nothing_known_of_a_machine_is_no_fault() -> None:
    blank = Machine.from_json(
        {
            "host": "dark",
            "cpus": {"allowed": "0-1"},
            "numa": [],
            "memory": {},
            "accelerators": [],
            "peers": [],
            "pci": [],
            "nics": [],
            "rdma": [],
            "limits": {},
            "sysctls": {},
            "nccl_conf": {},
            "variables": {},
            "versions": {},
        }
    )
    said = run_checks(Cluster((blank,)))
    assert {each.status for each in said} <= {"pass", "skip"}
    assert not any("the check itself failed" in each.observed for each in said)


def test_gpus_of_which_the_driver_tells_nothing_are_no_fault() -> None:
    machine = healthy()
    told = machine.to_json()
    for gpu in told["accelerators"]:
        for key in list(gpu):
            if key not in ("index", "name", "clocks", "ecc"):
                del gpu[key]
        gpu["clocks"], gpu["ecc"] = {}, {}
    said = run_checks(Cluster((Machine.from_json(told | {"pci": [], "peers": []}),)))
    assert not any("the check itself failed" in each.observed for each in said)
    assert [each for each in said if each.status == "fail"] == []


def test_one_bad_gpu_is_named_and_no_other() -> None:
    machine = of_gpu(healthy(), 5, ecc__volatile_uncorrected=3, clocks__throttle=("hw_thermal",))
    assert names(found(machine)) == {
        ("fail", "gpus.ecc", "gpu:5"),
        ("fail", "clocks.throttle", "gpu:5"),
    }


def _seats(*machines: Machine) -> tuple[RankObservation, ...]:
    return tuple(RankObservation(rank, rank, machine) for rank, machine in enumerate(machines))


def _hosts(count: int) -> list[Machine]:
    return [replace(plain(), host=f"n{number}") for number in range(count)]


def _agreement(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.id.startswith("agreement.")]


def test_the_rank_with_another_torch_is_the_odd_one_out() -> None:
    hosts = _hosts(4)
    hosts[2] = replace(hosts[2], versions={**hosts[2].versions, "torch": "2.12.0+cpu"})
    (odd,) = _agreement(found(*hosts, ranks=_seats(*hosts)))
    assert (odd.status, odd.id, odd.scope, odd.host) == (
        "fail",
        "agreement.versions",
        "rank:2",
        "n2",
    )
    assert "2.12.0" in odd.observed and "2.11.0" in odd.expected and "3 others" in odd.expected


def test_the_rank_that_lacks_a_variable_is_the_odd_one_out() -> None:
    hosts = [with_variables(each, NCCL_IB_SL="1") for each in _hosts(3)]
    hosts[1] = _hosts(3)[1]
    (odd,) = _agreement(found(*hosts, ranks=_seats(*hosts)))
    assert (odd.id, odd.scope) == ("agreement.variables", "rank:1")
    assert "not set" in odd.observed


def test_what_differs_by_nature_is_no_difference() -> None:
    hosts = [
        with_variables(each, RANK=str(n), CUDA_VISIBLE_DEVICES=str(n), NCCL_HOSTID=f"h{n}")
        for n, each in enumerate(_hosts(3))
    ]
    assert _agreement(found(*hosts, ranks=_seats(*hosts))) == []


def test_the_host_that_lost_a_gpu_is_named() -> None:
    hosts = [replace(healthy(), host=f"n{number}") for number in range(3)]
    hosts[0] = replace(hosts[0], accelerators=hosts[0].accelerators[:7])
    said = names(found(*hosts))
    assert ("fail", "agreement.hardware", "machine") in said
    assert ("fail", "gpus.count", "machine") in said
    (odd,) = [each for each in found(*hosts) if each.id == "agreement.hardware"]
    assert odd.host == "n0"


def test_a_rank_on_cpus_far_from_its_gpu_is_named() -> None:
    machine = healthy()
    near, far = (change(machine, cpus__allowed=cpus) for cpus in ("0-55", "56-111"))
    gpu = str(machine.accelerators[0].uuid).removeprefix("GPU-")  # as torch writes it
    seats = (RankObservation(0, 0, near, gpu), RankObservation(1, 0, far, gpu))
    said = [each for each in found(machine, ranks=seats) if each.id == "memory.affinity"]
    assert [each.scope for each in said] == ["rank:1"]


def test_ranks_that_a_launcher_bound_to_a_cpu_each_have_enough_together() -> None:
    bound = [change(plain(), cpus__allowed=cpus) for cpus in ("0", "1")]
    seats = tuple(RankObservation(rank, 0, machine) for rank, machine in enumerate(bound))
    assert names(found(bound[0], ranks=seats)) == set()
    both_on_one = tuple(RankObservation(rank, 0, bound[0]) for rank in range(2))
    (said,) = [f for f in found(bound[0], ranks=both_on_one) if f.id == "limits.cpus"]
    assert "1 CPU for 2 ranks" in said.observed and "--bind-to none" in said.cure


def test_a_gpu_that_cannot_be_measured_is_told_and_the_others_are_compared() -> None:
    rates = [MeasuredRate(f"rank:{rank}", 0, "bf16", 7e14) for rank in range(4)]
    rates[1] = MeasuredRate("rank:1", 0, "cuda:1", 0.0, error="CUDA out of memory")
    rates[3] = MeasuredRate("rank:3", 0, "bf16", 3e14)
    said = found(plain(), probes=ProbeResults(compute=tuple(rates)))
    assert names(said) == {
        ("fail", "active.compute", "rank:1"),
        ("fail", "active.compute", "rank:3"),
    }


def test_a_product_that_changes_from_run_to_run_is_told() -> None:
    rates = (
        MeasuredRate("gpu:0", 0, "bf16", 7e14),
        MeasuredRate("gpu:1", 0, "bf16", 7e14, reproducible=False),
    )
    (said,) = found(plain(), probes=ProbeResults(compute=rates))
    assert (said.status, said.scope) == ("fail", "gpu:1") and "different" in said.observed


def test_limits_of_a_daemon_that_differ_are_named() -> None:
    hosts = _hosts(3)
    hosts[2] = change(hosts[2], limits__stack_bytes=1 << 20)
    (odd,) = _agreement(found(*hosts, ranks=_seats(*hosts)))
    assert (odd.id, odd.scope) == ("agreement.limits", "rank:2")
