"""Recorded NCCL runs of four ranks on one GPU; overlap is also computed independently.

fixtures/nccl4 is DDP, fixtures/nccl4-shard FSDP2, both of `tutti train --recipe gpt`, reduced by
trim_trace.py; the last test shows that trimming does not change the result.
"""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trace_events import x
from trim_trace import trim

from tutti.profile.explain import Explanation, explain, trace_files

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = ("nccl4", "nccl4-shard")


@pytest.fixture(scope="module", params=FOLDERS)
def explanation(request: pytest.FixtureRequest) -> Explanation:
    return explain(trace_files(FIXTURES / request.param))


def _events(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    events: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return events


def _windows(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (start, end) of each step: its first kernel, and the next step's first kernel."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "Launch" in event["name"]
    }
    starts, ends = [], []
    for step in events:
        if step.get("cat") == "user_annotation" and step["name"].startswith("ProfilerStep#"):
            kernels = [
                event
                for event in events
                if event.get("cat") == "kernel"
                and event["args"].get("correlation") in launched
                and 0 <= launched[event["args"]["correlation"]] - step["ts"] <= step["dur"]
            ]
            starts.append(min(event["ts"] for event in kernels))
            ends.append(max(event["ts"] + event["dur"] for event in kernels))
    return list(pairwise([*sorted(starts), max(ends)]))


def _overlap_as_hta_defines_it(events: list[dict[str, Any]]) -> float:
    """|∪COMM ∩ ∪COMP| / |∪COMM| over the steps, by a sweep over the sorted edges of kernels."""
    windows = _windows(events)
    edges: list[tuple[float, str, int]] = []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        kind = "comm" if event["name"].startswith("nccl") else "comp"
        for low, high in windows:
            start, end = max(event["ts"], low), min(event["ts"] + event["dur"], high)
            if start < end:
                edges += [(start, kind, 1), (end, kind, -1)]
    running: Counter[str] = Counter()
    communicating = both = before = 0.0
    for moment, kind, change in sorted(edges):
        if running["comm"]:
            communicating += moment - before
            if running["comp"]:
                both += moment - before
        running[kind] += change
        before = moment
    return both / communicating


def test_four_ranks_and_their_steps_are_read(explanation: Explanation) -> None:
    rows = explanation.rows()

    assert [each["rank"] for each in rows["ranks"]] == [0, 1, 2, 3]
    assert all(each["clock_of"] == "device" for each in rows["ranks"])
    assert all("nccl" in each["backend"] for each in rows["ranks"])
    assert len(rows["steps"]) == 2 * 4


def test_the_parts_of_recorded_steps_add_up(explanation: Explanation) -> None:
    for each in explanation.steps:
        assert sum(each.parts.values()) == pytest.approx(each.seconds, rel=0.01)
        assert min(each.parts.values()) >= 0


def test_overlap_equals_the_hta_definition_on_the_same_trace(explanation: Explanation) -> None:
    for each in explanation.rows()["ranks"]:
        hta = _overlap_as_hta_defines_it(_events(Path(each["trace"])))
        assert each["overlap"] == pytest.approx(hta, abs=1e-6)


def test_every_collective_is_matched_on_all_ranks(explanation: Explanation) -> None:
    rows = explanation.rows()

    assert rows["comm"]
    for each in rows["comm"]:
        assert each["matched"] == each["count"], each
        assert each["bytes"] and each["axis"] is not None
    assert {each["axis"] for each in rows["comm"]} <= {"dp", "shard"}
    for collective in explanation.matched:
        assert len(collective.members) == collective.first.group_size


def test_buckets_are_found_and_lie_within_their_step() -> None:
    rows = explain(trace_files(FIXTURES / "nccl4")).rows()
    lengths = {(each["rank"], each["step"]): each["seconds"] for each in rows["steps"]}

    assert {each["rank"] for each in rows["buckets"]} == {0, 1, 2, 3}
    for each in rows["buckets"]:
        assert each["ready_s"] <= each["started_s"] <= each["done_s"]
        assert each["done_s"] <= 1.01 * lengths[each["rank"], each["step"]]


def _long_trace(folder: Path, rank: int) -> Path:
    """Five steps of 1000 µs; the device is 300 µs behind the host; some events are not needed."""
    events: list[dict[str, Any]] = []
    for n in range(5):
        host, device = 1000.0 * n, 1000.0 * n + 300
        fields = {
            "Collective name": "allreduce",
            "Process Group Name": "0",
            "In msg nelems": 1000,
            "dtype": "Float",
            "Seq": n,
            "Group size": 2,
            "Process Group Ranks": "[0, 1]",
            "External id": 10 * n,
        }
        events += [
            x("user_annotation", f"ProfilerStep#{n}", host, host + 1000),
            x("cpu_op", "aten::mm", host, host + 50, **{"Input Dims": [[1, 2]]}),
            x("cuda_runtime", "cudaLaunchKernel", host + 10, host + 12, correlation=n),
            x("cuda_runtime", "cudaStreamSynchronize", host + 900, host + 999),
            x("kernel", "gemm" * 30, device, device + 500 + 50 * rank, correlation=n),
            x("cuda_runtime", "cudaLaunchKernelExC", host + 51, host + 52, correlation=100 + n),
            x(
                "cpu_op",
                "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
                host + 40,
                host + 60,
            ),
            x("cpu_op", "record_param_comms", host + 50, host + 55, **fields),
            x(
                "kernel",
                "ncclDevKernel_AllReduce()",
                device + 400,
                device + 800,
                correlation=100 + n,
                **fields,
            ),
        ]
    path = folder / f"rank{rank}.json"
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return path


def test_trimming_does_not_change_the_explanation_of_the_steps(tmp_path: Path) -> None:
    whole = [_long_trace(tmp_path, rank) for rank in (0, 1)]
    (tmp_path / "small").mkdir()
    small = []
    for path in whole:
        small.append(tmp_path / "small" / path.name)
        small[-1].write_text(json.dumps(trim(path, first=1, steps=2)))

    complete, again = explain(whole).rows(), explain(small).rows()

    assert {each["step"] for each in again["steps"]} == {1, 2}
    for key in ("steps", "buckets"):
        kept = [each for each in complete[key] if each["step"] in (1, 2)]
        for before, after in zip(kept, again[key], strict=True):
            # The last step ends with its own range.
            if key == "buckets" or before["step"] == 1:
                assert _close(after, before), (after, before)
    for path in small:
        hta = _overlap_as_hta_defines_it(_events(path))
        row = next(each for each in again["ranks"] if Path(each["trace"]).name == path.name)
        assert row["overlap"] == pytest.approx(hta)
        assert hta == pytest.approx((100 + 50 * row["rank"]) / 400)


def _close(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_close(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_close, one, two))
    return bool(one == (pytest.approx(two, abs=1e-9) if isinstance(two, float) else two))
