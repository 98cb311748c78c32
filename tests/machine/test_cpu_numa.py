"""CPU lists, CPU quota, NUMA nodes and the recorded environment."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.machine.cpu_numa import (
    allowed_cpus,
    busy_seconds,
    cpu_quota,
    format_cpu_list,
    numa_nodes,
    parse_cpu_list,
)
from tutti.machine.environment import describe_environment
from tutti.machine.gpus import visible_gpu_count


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_cpu_list_is_the_same_after_writing_and_parsing(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


def test_cpu_lists_have_the_format_of_the_kernel() -> None:
    assert format_cpu_list([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert parse_cpu_list("0-2,7\n") == (0, 1, 2, 7)


@pytest.mark.parametrize(
    ("text", "cpus"), [("max 100000\n", None), ("150000 100000\n", 2), ("50000 100000", 1)]
)
def test_the_lowest_cgroup_quota_is_rounded_up_to_whole_cpus(
    text: str, cpus: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(text)  # the limit of the parent group
    assert cpu_quota(tmp_path) == cpus


def test_every_allowed_cpu_is_on_a_numa_node() -> None:
    on_nodes = {cpu for cpus in numa_nodes().values() for cpu in cpus}
    assert set(allowed_cpus()) <= on_nodes


def test_hidden_gpus_are_not_counted() -> None:
    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_secrets_are_not_in_the_environment_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    variables = describe_environment()["variables"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert "secret" not in str(variables)


def test_busy_seconds_are_those_of_the_given_cpus_without_idle_time(tmp_path: Path) -> None:
    """Ticks of user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    (tmp_path / "proc").mkdir()
    lines = ["cpu  0 0 0 0", "cpu0 100 20 30 9000 900 1 2 3 50 0", "cpu1 5 5 5 5 5 5 5 5 0 0"]
    (tmp_path / "proc/stat").write_text("\n".join([*lines, "intr 1 2 3"]))
    ticks = os.sysconf("SC_CLK_TCK")

    assert busy_seconds([0], tmp_path) == pytest.approx((100 + 20 + 30 + 1 + 2 + 3) / ticks)
    assert busy_seconds([0, 1], tmp_path) == pytest.approx((156 + 30) / ticks)
    assert busy_seconds([0], tmp_path / "missing") is None
