"""Checks of recorded machines: expected findings, healthy machines, and ranks that differ."""

from dataclasses import asdict, replace

import pytest
from check_cases import (
    HEALTHY,
    PLAIN,
    change,
    change_gpu,
    problems_of,
    recorded,
    summaries,
    with_variables,
)

from tutti.machine.checks.checklist import CHECKS, run_checks
from tutti.machine.checks.cluster import Cluster, MeasuredRate, RankObservation
from tutti.machine.checks.finding import Check, Finding
from tutti.machine.recording import Machine


@pytest.mark.parametrize(
    ("name", "expected"),
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
def test_a_recorded_machine_has_exactly_these_findings(
    name: str, expected: set[tuple[str, str, str]]
) -> None:
    found = problems_of(*recorded(name))
    assert summaries(found) == expected
    assert all(each.observed and each.expected and each.cure for each in found)


def test_the_faulty_port_is_reported_with_its_host() -> None:
    good, bad = recorded("roce-cluster")
    assert {each.host for each in problems_of(good, bad)} == {"roce-2"}
    # If there is only one host, its ports are compared with each other.
    assert problems_of(good) == []
    assert ("fail", "rdma.rate", "nic:mlx5_2") in summaries(problems_of(bad))


def test_a_check_that_raises_is_skipped_with_the_error_and_the_others_run() -> None:
    def broken(cluster: Cluster, host: int) -> list[Finding]:
        raise FileNotFoundError(2, "No such file", "/sys/nowhere")

    found = run_checks(Cluster((PLAIN,)), (Check("x.broken", "", "", "", broken), *CHECKS))
    assert len({each.id for each in found}) == len(CHECKS) + 1
    (skip,) = [each for each in found if each.id == "x.broken"]
    assert skip.status == "skip"
    assert "FileNotFoundError" in skip.observed and "/sys/nowhere" in skip.observed


def assert_no_check_raised(findings: list[Finding]) -> None:
    assert not any("the check itself failed" in each.observed for each in findings)


def test_a_machine_with_only_unknown_values_has_no_problems() -> None:
    lists = ("numa", "accelerators", "peers", "pci", "nics", "rdma")
    dicts = ("memory", "limits", "sysctls", "nccl_conf", "variables", "versions")
    empty = {**{name: [] for name in lists}, **{name: {} for name in dicts}}
    machine = Machine.from_json({"host": "unknown-host", "cpus": {"allowed": "0-1"}, **empty})
    found = run_checks(Cluster((machine,)))
    assert {each.status for each in found} <= {"pass", "skip"}
    assert_no_check_raised(found)


def test_gpus_with_only_unknown_values_do_not_fail() -> None:
    values = asdict(HEALTHY) | {"pci": [], "peers": []}
    values["accelerators"] = [
        {"index": gpu["index"], "name": gpu["name"], "clocks": {}, "ecc": {}}
        for gpu in values["accelerators"]
    ]
    found = run_checks(Cluster((Machine.from_json(values),)))
    assert_no_check_raised(found)
    assert [each for each in found if each.status == "fail"] == []


def test_only_the_faulty_gpu_is_reported() -> None:
    changes = {"ecc__volatile_uncorrected": 3, "clocks__throttle": ("hw_thermal",)}
    assert summaries(problems_of(change_gpu(HEALTHY, 5, **changes))) == {
        ("fail", "gpus.ecc", "gpu:5"),
        ("fail", "clocks.throttle", "gpu:5"),
    }


# --- differences between ranks and hosts ---------------------------------------------------------


def hosts(count: int, machine: Machine = PLAIN) -> list[Machine]:
    return [replace(machine, host=f"n{number}") for number in range(count)]


def differences(machines: list[Machine]) -> list[Finding]:
    """Return the findings of agreement.* with one rank on each host."""
    ranks = tuple(RankObservation(rank, rank, each) for rank, each in enumerate(machines))
    found = problems_of(*machines, ranks=ranks)
    return [each for each in found if each.id.startswith("agreement.")]


def test_a_rank_with_another_torch_is_reported() -> None:
    machines = hosts(4)
    machines[2] = change(machines[2], versions={**PLAIN.versions, "torch": "2.12.0+cpu"})
    (finding,) = differences(machines)
    assert (finding.status, finding.id) == ("fail", "agreement.versions")
    assert (finding.scope, finding.host) == ("rank:2", "n2")
    assert (
        "2.12.0" in finding.observed
        and "2.11.0" in finding.expected
        and "3 others" in finding.expected
    )


def test_a_rank_without_a_variable_that_the_others_have_is_reported() -> None:
    machines = [with_variables(each, NCCL_IB_SL="1") for each in hosts(3)]
    machines[1] = hosts(3)[1]
    (finding,) = differences(machines)
    assert (finding.id, finding.scope) == ("agreement.variables", "rank:1")
    assert "not set" in finding.observed


def test_variables_that_differ_by_design_are_not_compared() -> None:
    machines = [
        with_variables(each, RANK=str(n), CUDA_VISIBLE_DEVICES=str(n), NCCL_HOSTID=f"h{n}")
        for n, each in enumerate(hosts(3))
    ]
    assert differences(machines) == []


def test_a_rank_with_another_ulimit_is_reported() -> None:
    machines = hosts(3)
    machines[2] = change(machines[2], limits__stack_bytes=1 << 20)
    (finding,) = differences(machines)
    assert (finding.id, finding.scope) == ("agreement.limits", "rank:2")


def test_a_host_that_lost_a_gpu_is_reported() -> None:
    machines = hosts(3, HEALTHY)
    machines[0] = replace(machines[0], accelerators=HEALTHY.accelerators[:7])
    found = problems_of(*machines)
    assert ("fail", "gpus.count", "machine") in summaries(found)
    (finding,) = [each for each in found if each.id == "agreement.hardware"]
    assert (finding.status, finding.scope, finding.host) == ("fail", "machine", "n0")


# --- ranks of one host ---------------------------------------------------------------------------


def test_a_rank_on_cpus_far_from_its_gpu_is_reported() -> None:
    near, far = (change(HEALTHY, cpus__allowed=cpus) for cpus in ("0-55", "56-111"))
    gpu = str(HEALTHY.accelerators[0].uuid).removeprefix("GPU-")  # the UUID as torch writes it
    ranks = (RankObservation(0, 0, near, gpu), RankObservation(1, 0, far, gpu))
    found = [e for e in problems_of(HEALTHY, ranks=ranks) if e.id == "memory.affinity"]
    assert [each.scope for each in found] == ["rank:1"]


def test_cpus_of_all_ranks_of_a_host_are_counted_together() -> None:
    bound = [change(PLAIN, cpus__allowed=cpus) for cpus in ("0", "1")]
    ranks = tuple(RankObservation(rank, 0, machine) for rank, machine in enumerate(bound))
    assert summaries(problems_of(bound[0], ranks=ranks)) == set()
    on_one_cpu = tuple(RankObservation(rank, 0, bound[0]) for rank in range(2))
    (found,) = [e for e in problems_of(bound[0], ranks=on_one_cpu) if e.id == "limits.cpus"]
    assert "1 CPU for 2 ranks" in found.observed and "--bind-to none" in found.cure


# --- measured rates ------------------------------------------------------------------------------


def test_a_gpu_that_cannot_be_measured_is_reported_and_the_others_are_compared() -> None:
    rates = [MeasuredRate(f"rank:{rank}", 0, "bf16", 7e14) for rank in range(4)]
    rates[1] = MeasuredRate("rank:1", 0, "cuda:1", 0.0, error="CUDA out of memory")
    rates[3] = MeasuredRate("rank:3", 0, "bf16", 3e14)
    assert summaries(problems_of(PLAIN, compute=tuple(rates))) == {
        ("fail", "active.compute", "rank:1"),
        ("fail", "active.compute", "rank:3"),
    }


def test_a_product_with_different_results_is_reported() -> None:
    good = MeasuredRate("gpu:0", 0, "bf16", 7e14)
    bad = replace(good, name="gpu:1", reproducible=False)
    (found,) = problems_of(PLAIN, compute=(good, bad))
    assert (found.status, found.scope) == ("fail", "gpu:1") and "different" in found.observed
