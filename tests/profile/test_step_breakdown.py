"""Mesh axes and DDP buckets in traces that are written by hand.

Times are microseconds; a step takes 1000.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from trace_events import x

from tutti.profile.explain import Explanation, explain
from tutti.profile.merged_trace import write_merged_trace
from tutti.profile.trace_file import TraceFile

ENGINE = "autograd::engine::evaluate_function: "
FLOATS = 1000


def _step(end: float = 1000) -> dict[str, Any]:
    return x("user_annotation", "ProfilerStep#0", 0, end)


def _write(
    folder: Path,
    rank: int,
    events: list[dict[str, Any]],
    groups: list[tuple[str, str, list[int]]] | None = None,
    world: int = 2,
) -> Path:
    described = [
        {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}
        for name, description, ranks in groups or [("0", "default_pg", list(range(world)))]
    ]
    info = {"backend": "gloo", "rank": rank, "world_size": world, "pg_config": described}
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return path


def _on_a_cpu(first: float, second: float) -> list[dict[str, Any]]:
    """Two buckets, ready at `first` and `second`. One gloo thread sends them."""
    shape = {"Input Dims": [[[FLOATS]]], "Input type": ["TensorList"]}
    kind = {"Input type": ["float"], "Input Dims": [[FLOATS]]}
    events = [_step(), x("cpu_op", f"{ENGINE}AddmmBackward0", 50, 100)]
    for at, (start, end) in ((first, (450, 600)), (second, (600, 750))):
        events += [
            x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", at - 10, at + 30),
            x("cpu_op", "c10d::allreduce_", at, at + 20, **shape),
            x("user_annotation", "gloo:all_reduce", start, end, **kind) | {"tid": 9},
        ]
    # The all-reduce of the loss is not a gradient, so it is not a bucket.
    events.append(x("cpu_op", "c10d::allreduce_", 800, 900, **shape))
    return events


def _two_cpu_ranks(folder: Path) -> Explanation:
    return explain([_write(folder, 0, _on_a_cpu(200, 300)), _write(folder, 1, _on_a_cpu(450, 500))])


def test_a_bucket_is_ready_at_its_call_and_starts_after_the_last_arrival(
    tmp_path: Path,
) -> None:
    rows = _two_cpu_ranks(tmp_path).rows()

    shown = [
        [each["rank"], each["index"], each["bytes"]]
        + [round(1e6 * each[key], 3) for key in ("ready_s", "started_s", "done_s")]
        for each in rows["buckets"]
    ]
    assert shown == [
        [0, 0, 4000, 200, 450, 600],  # rank 1 arrives at 450
        [0, 1, 4000, 300, 600, 750],  # both arrived at 500, but the first bucket still moves
        [1, 0, 4000, 450, 450, 600],
        [1, 1, 4000, 500, 600, 750],
    ]


def test_backward_ends_with_the_last_autograd_function(tmp_path: Path) -> None:
    rows = _two_cpu_ranks(tmp_path).rows()

    moments = [tuple(round(1e6 * each) for each in row["gradients_s"]) for row in rows["steps"]]
    assert moments == [(190, 330), (440, 530)]


def test_buckets_have_rows_in_the_merged_trace(tmp_path: Path) -> None:
    write_merged_trace(tmp_path / "merged.json", _two_cpu_ranks(tmp_path))

    events = [
        event
        for event in TraceFile(tmp_path / "merged.json").events()
        if event.get("cat") == "DDP bucket"
    ]
    of_first_bucket = [event for event in events if event["id"] == events[0]["id"]]
    assert [(e["ph"], e["name"], round(e["ts"])) for e in of_first_bucket] == [
        ("b", "bucket 0, 3.91 KiB", 200),
        ("b", "transfer", 450),
        ("e", "transfer", 600),
        ("e", "bucket 0, 3.91 KiB", 600),
    ]
    assert len(events) == 4 * 4


def test_on_a_gpu_a_bucket_is_ready_when_earlier_kernels_have_ended(
    tmp_path: Path,
) -> None:
    """The host calls at 30. The gradient's kernel, launched at 20, ends at 400."""
    fields = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "In msg nelems": FLOATS,
        "Out msg nelems": FLOATS,
        "dtype": "Float",
        "Seq": 1,
        "Group size": 2,
        "Process Group Ranks": "[0, 1]",
        "External id": 5,
    }
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"

    def rank(moves: float) -> list[dict[str, Any]]:
        return [
            _step(100),
            x("cuda_runtime", "cudaLaunchKernel", 20, 22, correlation=1),
            x("kernel", "gemm_backward", 150, 400, correlation=1),
            x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", 25, 40),
            x("cpu_op", "record_param_comms", 30, 35, **fields),
            x("kernel", nccl, moves, 700, **fields),
            x("cuda_runtime", "cudaLaunchKernel", 50, 52, correlation=2),
            x("kernel", "optimizer", 700, 800, correlation=2),
        ]

    rows = explain([_write(tmp_path, 0, rank(410)), _write(tmp_path, 1, rank(500))]).rows()

    assert [round(1e6 * each["ready_s"]) for each in rows["buckets"]] == [250, 250]
    assert [round(1e6 * each["started_s"]) for each in rows["buckets"]] == [350, 350]
    assert [round(1e6 * each["done_s"]) for each in rows["buckets"]] == [550, 550]
    assert [round(1e6 * each["gradients_s"][1]) for each in rows["steps"]] == [250, 250]


def _tagged(group: str, start: float, end: float, ranks: int = 2) -> dict[str, Any]:
    description = f"group={group}|bytes=4|dtype=float32|seq=1|ranks={ranks}"
    return x("user_annotation", f"tutti::all_reduce|phase=run|{description}", start, end)


def test_communication_is_split_by_axis_and_adds_up_to_the_parts(tmp_path: Path) -> None:
    """dp2.tp2: all groups of an axis have the same description and different ranks."""
    files = []
    for rank in range(4):
        tp = [0, 1] if rank < 2 else [2, 3]
        dp = [rank % 2, rank % 2 + 2]
        groups = [("0", "default_pg", [0, 1, 2, 3]), (f"d{rank % 2}", "mesh_dp", dp)]
        groups.append((f"t{rank // 2}", "mesh_tp", tp))
        late = 100 if rank in (2, 3) else 0  # the second replica is always late
        events = [
            _step(),
            _tagged("mesh_tp", 100 + late, 250 + late),
            _tagged("mesh_dp", 400 + late, 550),
            x("cpu_op", "aten::mm", 510, 530) | {"tid": 8},
            _tagged("default", 700, 800, ranks=4),
        ]
        files.append(_write(tmp_path, rank, events, groups, world=4))

    rows = explain(files).rows()

    axes = {each["axis"]: each for each in rows["axes"]}
    micro = {
        axis: [round(1e6 * each[f"{name}_s"], 3) for name in ("hidden", "exposed", "wait")]
        for axis, each in axes.items()
    }
    # dp moves from 500 to 550, with 20 of compute; the first replica waits 100 for the second.
    assert micro == {"tp": [0, 150, 0], "dp": [20, 30, 50], "world": [0, 100, 0]}
    assert axes["dp"]["share"] == pytest.approx(0.1)
    parts = [each["parts_s"] for each in rows["ranks"]]
    for name in ("hidden", "exposed", "wait"):
        total = sum(each[name] for each in parts) / 4
        assert sum(each[f"{name}_s"] for each in rows["axes"]) == pytest.approx(total)
    assert {each["axis"]: each["ranks"] for each in rows["comm"]} == {"tp": 2, "dp": 2, "world": 4}
    assert all(each["count"] == each["matched"] for each in rows["comm"])


def test_the_default_group_belongs_to_the_only_axis_of_a_mesh(tmp_path: Path) -> None:
    """shard2: the groups of pp, dp and tp have one rank each."""
    groups = [("0", "default_pg", [0, 1])]
    groups += [(str(n), f"mesh_{axis}", [0]) for n, axis in enumerate(("pp", "dp", "tp"), 1)]
    events = [_step(), x("cpu_op", "c10d::allreduce_", 100, 200)]

    rows = explain([_write(tmp_path, 0, events, groups)]).rows()

    assert [each["axis"] for each in rows["axes"]] == ["shard"]


@pytest.mark.parametrize(
    ("call", "axis"), [("allreduce_", "dp"), ("_allgather_base_", "shard"), ("send", "pp")]
)
def test_without_a_mesh_the_operation_decides_the_axis(
    tmp_path: Path, call: str, axis: str
) -> None:
    events = [_step(), x("cpu_op", f"c10d::{call}", 100, 200)]

    rows = explain([_write(tmp_path, 0, events)]).rows()

    assert [each["axis"] for each in rows["axes"]] == [axis]


def test_a_batch_of_sends_without_a_group_belongs_to_the_pipeline(tmp_path: Path) -> None:
    """dp2.pp2 on NCCL: batches of sends and receives have no annotation."""
    groups = [("0", "default_pg", [0, 1, 2, 3])]
    groups += [("1", "mesh_dp", [0, 2]), ("2", "mesh_pp", [0, 1])]
    kernel = x("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 100, 200)

    rows = explain([_write(tmp_path, 0, [_step(), kernel], groups)]).rows()

    assert [each["axis"] for each in rows["axes"]] == ["pp"]
