"""Traces with kernels and communication other than NCCL: symmetric memory, gloo on the host."""

from pathlib import Path
from typing import Any

import pytest
from trace_events import all_reduce, launched, parts, step, tag, write, x

from tutti.profile.explain import explain


@pytest.mark.parametrize("name", ["sum_of_peers", "void one_shot_all_reduce_kernel<float, 4>"])
def test_kernels_launched_by_tutti_comm_are_communication(tmp_path: Path, name: str) -> None:
    """A one-shot reduction on symmetric memory spins until rank 1 arrives at 600."""

    def rank(compute: float) -> list[dict[str, Any]]:
        return [
            step(0),
            *launched("gemm", 10, 0, compute, 1),
            x("user_annotation", tag("all_reduce", "run", 3), 20, 40),
            *launched("barrier_kernel", 25, compute, 700, 2),
            *launched(name, 30, 700, 800, 3),
            *launched("gemm", 50, 800, 1000, 4),
            # Another thread launches a kernel meanwhile, which is not part of the call.
            x("cuda_runtime", "cudaLaunchKernel", 32, 33, correlation=5) | {"tid": 8},
            x("kernel", "gemm", compute - 10, compute, correlation=5) | {"tid": 21},
        ]

    explanation = explain([write(tmp_path, n, rank(c)) for n, c in enumerate((300, 600))])

    (collective,) = explanation.matched
    one = collective.members[0]
    assert (one.operation, one.group, one.sequence) == ("all_reduce", "tutti dp", 3)
    assert (one.bytes, one.thread) == (4096, 20)
    early, late = parts(explanation, 0, 0), parts(explanation, 1, 0)
    assert early["compute"] == 500 and late["compute"] == 800
    assert early["wait"] == 300 and "wait" not in late


def test_kernels_of_symmetric_memory_are_recognized_by_name(tmp_path: Path) -> None:
    sum_ = "void c10d::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>()"
    events = [step(0), x("kernel", "gemm", 0, 600), x("kernel", sum_, 600, 1000)]

    explanation = explain([write(tmp_path, 0, events)])

    assert parts(explanation, 0, 0) == {"compute": 600, "exposed": 400}
    assert explanation.rows()["comm"][0]["op"] == "all_reduce"


def test_gloo_on_the_host_counts_as_communication_in_a_trace_with_kernels(tmp_path: Path) -> None:
    """The trace also has an NCCL all-reduce. A call with an NCCL kernel does not count as gloo."""

    def rank(called: float) -> list[dict[str, Any]]:
        fields = all_reduce(0, 0, 0)["args"] | {"External id": 5}
        nccl = x("kernel", "ncclDevKernel_AllReduce()", 200, 300, correlation=2, **fields)
        return [
            step(0),
            *launched("gemm", 10, 0, 200, 1),
            x("cpu_op", "c10d::allreduce_", 20, 30),
            x("cpu_op", "record_param_comms", 21, 29, **fields),
            x("cuda_runtime", "cudaLaunchKernelExC", 25, 26, correlation=2),
            nccl,
            x("cpu_op", "c10d::allreduce_", called, called + 10),
            x("user_annotation", "gloo:all_reduce", called, 800) | {"tid": 9},
            *launched("gemm", 810, 900, 1000, 3),
        ]

    explanation = explain([write(tmp_path, n, rank(c)) for n, c in enumerate((400.0, 700.0))])

    assert parts(explanation, 0, 0) == {
        "compute": 300,
        "exposed": 200,
        "wait": 300,
        "host_gap": 200,
    }
    assert len(explanation.matched) == 2
