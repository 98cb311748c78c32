"""Explanations of traces that are written by hand."""

from pathlib import Path
from typing import Any

import pytest
from trace_events import STEP, all_reduce, parts, step, tag, write, x

from tutti.profile.explain import Explanation, explain, trace_files
from tutti.profile.merged_trace import write_merged_trace
from tutti.profile.profile_table import profile_lines
from tutti.profile.step_breakdown import find_period, late_rank, lateness_text
from tutti.profile.trace_file import TraceFile
from tutti.report.figures.step_timeline import timeline
from tutti.report.plot import NAMES
from tutti.report.sources import Run, read_sources
from tutti.world.errors import UsageError


def _two_ranks(folder: Path, base: int = 0, host: str = "n0") -> Explanation:
    """Two steps. Rank 1 arrives 300 µs after rank 0. Moving the data takes 200 µs."""
    early, late = [], []
    for n in range(2):
        at = n * STEP
        early += [step(n), x("kernel", "gemm", at, at + 400), all_reduce(at + 300, at + 800, n)]
        early.append(x("gpu_memcpy", "Memcpy HtoD", at + 900, at + 950))
        late += [step(n), x("kernel", "gemm", at, at + 600), all_reduce(at + 600, at + 800, n)]
    return explain([write(folder, 0, early), write(folder, 1, late, base, host)])


def test_every_moment_of_a_step_is_in_exactly_one_part(tmp_path: Path) -> None:
    explanation = _two_ranks(tmp_path)

    for number in (0, 1):
        # Waits from the end of compute at 400 until rank 1 arrives at 600.
        assert parts(explanation, 0, number) == {
            "compute": 300,
            "hidden": 100,
            "wait": 200,
            "exposed": 200,
            "rest": 50,
            "host_gap": 150,
        }
        assert parts(explanation, 1, number) == {"compute": 600, "exposed": 200, "host_gap": 200}
    for each in explanation.steps:
        assert sum(each.parts.values()) == pytest.approx(each.seconds, rel=1e-9)


def test_overlap_is_defined_as_in_hta(tmp_path: Path) -> None:
    rows = _two_ranks(tmp_path).rows()

    # |communication ∩ compute| / |communication| = 100 / 500
    assert rows["ranks"][0]["overlap"] == pytest.approx(0.2)
    assert rows["ranks"][1]["overlap"] == 0


def test_the_straggler_arrives_last_and_has_the_shorter_kernel(
    tmp_path: Path,
) -> None:
    (row,) = _two_ranks(tmp_path).rows()["stragglers"]

    assert row["rank"] == 1
    assert row["straggler"]
    assert (row["last"], row["of_collectives"]) == (2, 2)
    assert row["cost_s"]["mean"] == pytest.approx(200e-6)
    assert row["late_by_s"]["p50"] == pytest.approx(300e-6)
    assert row["made_wait"] == {"0": pytest.approx(400e-6)}
    # Rank 1 computes for 600 and the other rank for 300: that is why rank 1 is late.
    assert row["excess"] == {"part": "compute", "seconds": pytest.approx(300e-6)}


def test_bandwidth_excludes_waiting(tmp_path: Path) -> None:
    (row,) = _two_ranks(tmp_path).rows()["comm"]

    assert (row["op"], row["bytes"], row["count"], row["matched"]) == ("all_reduce", 4e6, 2, 2)
    assert row["transfer_s"]["p50"] == pytest.approx(200e-6)
    assert row["algbw_gbs"] == pytest.approx(4e6 / 200e-6 / 1e9)
    assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 2 * (2 - 1) / 2)


@pytest.mark.parametrize("ahead_ns", [7_000_000_000, -40_000_000, 300_000])
def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path: Path, ahead_ns: int) -> None:
    aligned, skewed = tmp_path / "aligned", tmp_path / "skewed"
    aligned.mkdir(), skewed.mkdir()

    explanation = _two_ranks(skewed, base=ahead_ns, host="n1")

    assert explanation.clocks[1].applied_s == pytest.approx(-ahead_ns / 1e9)
    for rank in (0, 1):
        assert parts(explanation, rank, 0) == parts(_two_ranks(aligned), rank, 0)


def test_a_missing_rank_is_noted_and_the_others_are_explained(tmp_path: Path) -> None:
    _two_ranks(tmp_path)

    explanation = explain([tmp_path / "rank1.json"])

    assert any("rank 0" in note and "missing" in note for note in explanation.notes)
    assert parts(explanation, 1, 0) == {"compute": 600, "exposed": 200, "host_gap": 200}
    assert explanation.rows()["stragglers"] == []


def test_a_damaged_file_is_noted_and_left_out(tmp_path: Path) -> None:
    _two_ranks(tmp_path)
    (tmp_path / "rank0.json").write_text("not a trace")

    explanation = explain([tmp_path / "rank0.json", tmp_path / "rank1.json"])

    assert [trace.rank for trace in explanation.traces] == [1]
    assert any(note.startswith("rank0.json is omitted") for note in explanation.notes)


def test_the_newest_trace_of_a_rank_is_explained(tmp_path: Path) -> None:
    """Two profiler cycles on two ranks. The newer traces have the first names in sorted order."""
    files = []
    for cycle, name in enumerate("ba"):
        for rank in (0, 1):
            events = [step(n) for n in (3 * cycle, 3 * cycle + 1)]
            events += [x("kernel", "gemm", 3 * cycle * STEP, 3 * cycle * STEP + 900)]
            files.append(write(tmp_path, rank, events, name=f"{name}{rank}.json"))

    explanation = explain(files)

    assert [trace.path.name for trace in explanation.traces] == ["a0.json", "a1.json"]
    assert any(note.startswith("b0.json, b1.json are not used") for note in explanation.notes)


def test_traces_without_a_rank_get_the_free_ranks(tmp_path: Path) -> None:
    events = [step(0), x("kernel", "gemm", 0, 900)]
    unknown = {"distributedInfo": {"rank": -1, "world_size": 3}}
    files = [write(tmp_path, 0, events, name=f"{name}.json", **unknown) for name in "ab"]

    explanation = explain([*files, write(tmp_path, 1, events)])

    names = [(trace.rank, trace.path.name) for trace in explanation.traces]
    assert names == [(0, "a.json"), (1, "rank1.json"), (2, "b.json")]
    assert any("in file order" in note for note in explanation.notes)


def test_a_straggler_in_every_fifth_step_has_a_period(tmp_path: Path) -> None:
    """Rank 1 is 400 µs late in steps 3, 8 and 13 of 15, and 30 or 40 µs in all others."""
    late = dict.fromkeys(range(15), 30.0) | {3: 400.0, 8: 400.0, 13: 400.0, 5: 40.0}
    files = []
    for rank in range(2):
        events = []
        for n in range(15):
            arrival = n * STEP + 100 + (late.get(n, 0.0) if rank else 0.0)
            end = n * STEP + 200 + late.get(n, 0.0)
            events += [step(n), x("kernel", "gemm", n * STEP, arrival), all_reduce(arrival, end, n)]
        files.append(write(tmp_path, rank, events))

    (row,) = explain(files).rows()["stragglers"]

    assert (row["rank"], row["period"], row["steady"]) == (1, 5, False)
    assert row["late_steps"] == [3, 8, 13] and (row["steps"], row["of_steps"]) == (3, 15)
    assert row["late_cost_s"] == pytest.approx(400e-6)
    assert row["excess"] == {"part": "compute", "seconds": pytest.approx(400e-6)}
    assert "0.4 ms in every 5th step (20 %" in lateness_text(row)


def test_ranks_that_are_late_in_turn_are_not_called_stragglers(tmp_path: Path) -> None:
    """Rank 0 is 300 µs late in steps 1, 4 and 11, rank 1 in steps 2, 8 and 9 of 15."""
    late = {0: (1, 4, 11), 1: (2, 8, 9)}
    files = []
    for rank in range(2):
        events = []
        for n in range(15):
            arrival = n * STEP + 100 + 300.0 * (n in late[rank])
            end = n * STEP + 200 + 300.0 * (n in late[0] + late[1])
            events += [step(n), x("kernel", "gemm", n * STEP, arrival), all_reduce(arrival, end, n)]
        files.append(write(tmp_path, rank, events))

    rows = explain(files).rows()

    assert late_rank(rows["stragglers"]) is None
    text = "\n".join(profile_lines(rows, 200))
    assert text.count("in turn with other ranks") == 2 and "the others wait" not in text


@pytest.mark.parametrize(
    ("late", "period"),
    [([1, 6], 5), ([1, 3, 5, 7, 9], 2), ([1, 2, 6], None), ([4], None), ([], None), ([1, 3], None)],
)
def test_a_period_is_found_only_if_all_distances_agree(late: list[int], period: int | None) -> None:
    assert find_period(late, range(10)) == period


def test_steps_of_a_trace_without_profiler_steps(tmp_path: Path) -> None:
    """Steps end with the optimizer; without an optimizer the longest repeated range begins one."""
    forward = [x("user_annotation", f"batch {n}", n * STEP, n * STEP + 600) for n in range(4)]
    forward += [x("user_annotation", "copy", n * STEP, n * STEP + 50) for n in range(4)]
    forward += [x("cpu_op", "aten::mm", n * STEP, n * STEP + 500) for n in range(4)]
    updates = [
        x("user_annotation", "Optimizer.step#SGD.step", n * STEP + 800, n * STEP + 900)
        for n in range(4)
    ]

    inference = explain([write(tmp_path, 0, forward)])
    training = explain([write(tmp_path, 0, forward + updates)])

    starts = [round(1e6 * each.start) for each in inference.traces[0].steps]
    assert starts == [0, 1000, 2000]
    assert [round(1e6 * each.start) for each in training.traces[0].steps] == [900, 1900, 2900]
    assert any("batch" in note for note in inference.notes)


def test_gathers_of_replicas_are_not_sharding(tmp_path: Path) -> None:
    """Hugging Face's Trainer all-reduces gradients, and gathers the loss."""

    def axes(*operations: str) -> set[str | None]:
        events = [step(0)] + [
            x("cpu_op", f"c10d::{name}_", 100.0 * n, 100.0 * n + 50)
            for n, name in enumerate(operations)
        ]
        trace = explain([write(tmp_path, 0, events, distributedInfo={"backend": "gloo"})]).traces[0]
        return {each.axis for each in trace.collectives}

    assert axes("allreduce", "allgather") == {"dp"}
    assert axes("allgather", "reduce_scatter") == {"shard"}
    assert axes("allgather") == {"shard"}


def test_an_unfinished_step_is_ignored(tmp_path: Path) -> None:
    """Three steps of 1000 µs, and an unfinished step that torch closes when the program ends."""
    events = [step(n) for n in range(3, 6)] + [step(6) | {"dur": 5.0}]
    events += [x("cpu_op", "aten::mm", n * STEP, n * STEP + 900) for n in range(3, 6)]

    known = explain([write(tmp_path, 0, events, tutti={"steps": 6})])
    without_metadata = explain([write(tmp_path, 0, events)])

    assert [each.step for each in known.steps] == [3, 4, 5]
    assert known.rows()["ranks"][0]["step_s"]["mean"] == pytest.approx(1e-3)
    assert len(without_metadata.steps) == 4


def test_on_a_gpu_a_step_is_the_time_of_its_kernels(tmp_path: Path) -> None:
    """The host runs ahead: its second step ends before the device begins that step."""
    events = [step(0) | {"dur": 50.0}, step(1) | {"ts": 50.0, "dur": 50.0}]
    for n, (start, end) in enumerate([(100, 700), (800, 1600)]):
        events.append(
            x("cuda_runtime", "cudaLaunchKernel", 50 * n + 10, 50 * n + 12, correlation=n)
        )
        events.append(x("kernel", "gemm", start, end, correlation=n))

    explanation = explain([write(tmp_path, 0, events)])

    assert parts(explanation, 0, 0) == {"compute": 600, "host_gap": 100}
    assert parts(explanation, 0, 1) == {"compute": 800}


def _message(operation: str, peer: int, start: float, end: float) -> dict[str, Any]:
    key = "Dst Rank" if operation == "send" else "Src Rank"
    fields = {
        "Collective name": operation,
        "Process Group Name": "0",
        "In msg nelems": 100,
        "Out msg nelems": 100,
        "dtype": "Float",
        "Group size": 2,
        "Process Group Ranks": "[0, 1]",
        key: peer,
    }
    return x("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgs)", start, end, **fields)


def test_waiting_for_the_previous_stage_is_a_pipeline_bubble(tmp_path: Path) -> None:
    first = [step(0), x("kernel", "gemm", 0, 500), _message("send", 1, 500, 550)]
    second = [step(0), _message("recv", 0, 0, 550), x("kernel", "gemm", 550, 1000)]

    explanation = explain([write(tmp_path, 0, first), write(tmp_path, 1, second)])

    assert parts(explanation, 1, 0) == {"bubble": 500, "exposed": 50, "compute": 450}
    assert parts(explanation, 0, 0) == {"compute": 500, "exposed": 50, "host_gap": 450}


def test_a_batch_of_sends_and_receives_without_a_peer_is_a_bubble(tmp_path: Path) -> None:
    batch = "ncclDevKernel_SendRecv(ncclDevKernelArgs)"
    first = [step(0), x("kernel", "gemm", 0, 500), x("kernel", batch, 500, 550)]
    second = [step(0), x("kernel", batch, 0, 550), x("kernel", "gemm", 550, 1000)]

    explanation = explain([write(tmp_path, 0, first), write(tmp_path, 1, second)])

    assert parts(explanation, 1, 0) == {"bubble": 550, "compute": 450}
    # The timeline of a report shows the same.
    (figure,) = timeline(Run("run", tmp_path, explanation=explanation))
    drawn = {(row[0], row[2]): row[4] for row in figure.table.rows}
    assert drawn[1, NAMES["bubble"]] == pytest.approx(0.55)
    assert (1, NAMES["exposed"]) not in drawn


def test_the_merged_trace_has_aligned_ranks_and_arrows_from_the_late_rank(tmp_path: Path) -> None:
    explanation = _two_ranks(tmp_path, base=5_000_000, host="n1")
    merged = tmp_path / "merged.json.gz"

    arrows = write_merged_trace(merged, explanation)
    events = list(TraceFile(merged).events())

    kernels = [e for e in events if e["name"].startswith("ncclDev")]
    ends = sorted(round(e["ts"] + e["dur"], 3) for e in kernels)
    assert ends == [800, 800, 1800, 1800]  # one clock
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {"rank 0 n0", "rank 1 n1"}
    begun = [e for e in events if e["ph"] == "s"]
    ended = {e["id"]: e for e in events if e["ph"] == "f"}
    assert arrows == len(begun) == len(ended) == 2
    for source in begun:
        assert source["pid"] == processes["rank 1 n1"]
        assert ended[source["id"]]["pid"] == processes["rank 0 n0"]
        assert source["ts"] <= ended[source["id"]]["ts"]


@pytest.mark.parametrize("name", ["all.json.gz", "a.json"])
def test_a_merged_trace_beside_the_traces_is_ignored(tmp_path: Path, name: str) -> None:
    write_merged_trace(tmp_path / name, _two_ranks(tmp_path))

    assert [path.name for path in trace_files(tmp_path)] == ["rank0.json", "rank1.json"]
    with pytest.raises(UsageError, match="merged trace of all ranks"):
        trace_files(tmp_path / name)
    (run,) = read_sources([tmp_path]).runs
    assert [row["rank"] for row in (run.profile or {})["ranks"]] == [0, 1]


def test_a_tutti_comm_call_is_one_collective_with_any_backend_events(
    tmp_path: Path,
) -> None:
    """A blocking call with backend events inside, then issue and wait of a non-blocking call."""
    events = [
        step(0),
        x("user_annotation", tag("all_reduce", "run", 4), 100, 300),
        x("cpu_op", "c10d::allreduce_", 110, 290),
        x("user_annotation", "shm:all_reduce", 120, 280),
        x("user_annotation", tag("all_gather", "issue", 5), 400, 410),
        x("cpu_op", "aten::mm", 410, 600),
        x("user_annotation", tag("all_gather", "wait", 5), 600, 700),
    ]

    explanation = explain([write(tmp_path, 0, events)])
    first, second = explanation.traces[0].collectives

    assert (first.operation, first.group, first.sequence) == ("all_reduce", "tutti dp", 4)
    assert (first.bytes, first.group_size) == (4096, 2)
    assert (second.operation, second.sequence) == ("all_gather", 5)
    assert (second.end - second.start) * 1e6 == pytest.approx(300)
    assert parts(explanation, 0, 0)["exposed"] == 310  # 100 to 300, 400 to 410, 600 to 700
    assert sum(parts(explanation, 0, 0).values()) == pytest.approx(STEP)


def test_waiting_on_a_cpu_begins_at_the_call_and_excludes_moving_data(tmp_path: Path) -> None:
    """Two calls on gloo's threads are in flight. The first moves data from 500 on."""
    early = [
        step(0),
        x("cpu_op", "c10d::allreduce_", 100, 110),
        x("cpu_op", "c10d::allgather_", 120, 130),
        x("user_annotation", "gloo:all_reduce", 200, 600) | {"tid": 9},
        x("user_annotation", "gloo:all_gather", 210, 900) | {"tid": 10},
    ]
    late = [
        step(0),
        x("cpu_op", "c10d::allreduce_", 500, 510),
        x("cpu_op", "c10d::allgather_", 700, 710),
        x("user_annotation", "gloo:all_reduce", 500, 600) | {"tid": 9},
        x("user_annotation", "gloo:all_gather", 700, 900) | {"tid": 10},
    ]

    explanation = explain([write(tmp_path, 0, early), write(tmp_path, 1, late)])

    # Waits 100 to 500 and 600 to 700; data moves 500 to 600 and 700 to 900.
    assert parts(explanation, 0, 0) == {"wait": 500, "exposed": 300, "host_gap": 200}
    assert explanation.rows()["stragglers"][0]["rank"] == 1


def test_collectives_without_a_group_are_not_matched_if_there_are_subgroups(
    tmp_path: Path,
) -> None:
    """{0, 2} and {1, 3} all-reduce at different times; gloo does not record the group."""
    files = []
    for rank in range(4):
        start = 100.0 if rank % 2 else 600.0
        events = [
            step(0),
            x("cpu_op", "c10d::allreduce_", start, start + 10),
            x("user_annotation", "gloo:all_reduce", start, start + 100) | {"tid": 9},
        ]
        group = {"pg_name": "1", "pg_desc": "mesh_dp", "pg_size": 2}
        group["ranks"] = [rank % 2, rank % 2 + 2]
        world = {"backend": "gloo", "world_size": 4, "pg_config": [group]}
        files.append(write(tmp_path, rank, events, distributedInfo=world))

    explanation = explain(files)

    assert explanation.matched == []
    assert all(each.parts["wait"] == 0 for each in explanation.steps)
    assert any(note.startswith("4 collectives do not name") for note in explanation.notes)


def test_peak_memory_is_of_the_device_not_of_the_cpu_allocator(tmp_path: Path) -> None:
    def memory_event(device: int, total: int) -> dict[str, Any]:
        fields = {"Device Type": device, "Device Id": 0, "Total Allocated": total}
        return {"ph": "i", "name": "[memory]", "ts": 1, "pid": 0, "tid": 7, "args": fields}

    def peak(counted: int) -> int | None:
        events = [
            step(0),
            x("kernel", "gemm", 0, 900),
            memory_event(0, 9000),
            memory_event(1, 500),
            memory_event(1, 400),
        ]
        path = write(tmp_path, 0, events, tutti={"device_memory_bytes": counted})
        return explain([path]).traces[0].memory_bytes

    assert peak(counted=700) == 700  # before the recording
    assert peak(counted=300) == 500
