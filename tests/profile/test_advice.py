"""Advice on traces of a simulated machine, for which the result of every change is known.

The machine sends one message at a time, in α + β·bytes; every 10 µs of backward a gradient of
1 KiB is ready. Times are microseconds.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from trace_events import x

from tutti.profile.explain import explain
from tutti.profile.profile_table import profile_lines
from tutti.profile.step_breakdown import late_rank
from tutti.profile.what_if import fit_message_cost

ENGINE = "autograd::engine::evaluate_function: "
ALPHA, BETA = 200.0, 0.001  # per message, per byte
FORWARD, GRADIENTS = 1000, 400


def _step(end: float) -> dict[str, Any]:
    return x("user_annotation", "ProfilerStep#0", 0, end)


def _rows(folder: Path, *ranks: list[dict[str, Any]], **metadata: Any) -> dict[str, Any]:
    """Explain traces with these events, one list for each rank, and this metadata."""
    folder.mkdir(exist_ok=True)
    files = []
    for rank, events in enumerate(ranks):
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": len(ranks)}
        info = {"backend": "gloo", "rank": rank, "world_size": len(ranks), "pg_config": [group]}
        group["ranks"] = list(range(len(ranks)))
        content = {"distributedInfo": info, "traceEvents": events, "host_name": "n0"}
        files.append(folder / f"rank{rank}.json")
        files[-1].write_text(json.dumps(content | metadata))
    return explain(files).rows()


def _message(called: float, start: float, end: float, size: int) -> list[dict[str, Any]]:
    shape = {"Input Dims": [[[size // 4]]], "Input type": ["TensorList"]}
    kind = {"Input Dims": [[size // 4]], "Input type": ["float"]}
    return [
        x("cpu_op", "c10d::allreduce_", called, called, **shape),
        x("user_annotation", "gloo:all_reduce", start, end, **kind) | {"tid": 9},
    ]


def _ddp(bucket: int, first: int | None = None) -> list[dict[str, Any]]:
    """Return a step of the simulated machine with buckets of `bucket` bytes."""
    end = FORWARD + 10.0 * GRADIENTS + 1
    events = [x("cpu_op", "aten::mm", 0, end) | {"tid": 8}]
    sent, free, limit = 0, 0.0, first or bucket
    for number in range(1, GRADIENTS + 1):
        now = FORWARD + 10.0 * number
        events.append(x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", now - 1, now + 1))
        if 1024 * number - sent >= limit or number == GRADIENTS:
            size = 1024 * number - sent
            start = max(now, free)
            free = start + ALPHA + BETA * size
            events += _message(now, start, free, size)
            sent, limit = sent + size, bucket
    return [_step(max(free, end) + 100), *events]


def _only(rows: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in rows["advice"] if each["id"] == name]
    return found


def _contains(advice: dict[str, Any], gain: float) -> bool:
    """Return whether the band of the predicted gain contains a gain in microseconds."""
    low, high = advice["gain_s_band"]
    assert 0 < low <= advice["gain_s"] <= high
    return bool(low <= gain / 1e6 <= high)


def test_latency_and_bandwidth_are_fitted_and_never_negative() -> None:
    sizes = (1000, 8000, 64_000)

    exact = fit_message_cost([(size, 2e-4 + 1e-9 * size) for size in sizes])
    faster = fit_message_cost([(size, 1e-3 - 1e-9 * size) for size in sizes])
    similar_sizes = fit_message_cost([(4000, 1e-3), (5000, 1e-3)])

    assert exact is not None and faster is not None and similar_sizes is not None
    assert (exact.alpha, exact.beta) == pytest.approx((2e-4, 1e-9))
    assert exact.separated
    assert faster.beta == 0 and faster.alpha == pytest.approx(1e-3, rel=0.1)
    assert not similar_sizes.separated
    assert fit_message_cost([]) is None


def _assigned(sizes: list[int], cap: int) -> list[list[int]]:
    """Return DDP's buckets: whole parameters, and a bucket is closed once its cap is reached."""
    buckets: list[list[int]] = [[]]
    for index in range(len(sizes)):
        buckets[-1].append(index)
        if sum(sizes[each] for each in buckets[-1]) >= cap and index + 1 < len(sizes):
            buckets.append([])
    return buckets


def _program(present: int, others: dict[str, int], **settings: Any) -> dict[str, Any]:
    """Return the metadata of a DDP program with gradients of 1 KiB and these bucket sizes."""
    sizes = [1024] * GRADIENTS
    ddp = {
        "constructed_at": "train.py:12",
        "bytes": sizes,
        "ready_order": list(range(GRADIENTS)),
        "buckets": _assigned(sizes, present),
        "other_buckets": {name: _assigned(sizes, cap) for name, cap in others.items()},
        "find_unused_parameters": False,
        "has_unused": False,
        "gradient_as_bucket_view": True,
    }
    return {"program": {"ddp": [ddp | settings]}, "cpus": [0, 1, 2, 3], "threads": 1}


def test_the_band_of_larger_buckets_contains_the_gain_of_the_simulated_machine(
    tmp_path: Path,
) -> None:
    """Messages of 4 KB need 20 ms after a backward of 4 ms. Larger buckets need less."""
    sizes = {"0.004": 4096, "0.03": 32 << 10, "1": 1 << 20}
    lengths, advised = {}, {}
    for name, bucket in sizes.items():
        others = {other: size for other, size in sizes.items() if other != name}
        program = _program(bucket, others)
        rows = _rows(tmp_path / name, _ddp(bucket), _ddp(bucket), tutti=program)
        lengths[name] = rows["ranks"][0]["step_s"]["mean"]
        advised[name] = [each for each in rows["advice"] if each["id"] == "buckets"]
    best = min(lengths, key=lambda name: lengths[name])

    (advice,) = advised["0.004"]
    assert _contains(advice, 1e6 * (lengths["0.004"] - lengths[best]))
    assert advice["change"] == {"ddp": {"bucket_cap_mb": float(best)}}
    assert f"bucket_cap_mb={best}" in advice["try"] and "train.py:12" in advice["try"]
    assert not advised[best]


def test_gradients_as_bucket_views_save_copies_and_page_faults(tmp_path: Path) -> None:
    """DDP copies for 500 µs. A step has 90 page faults of 10 µs, at most 75 by gradients."""
    sizes = {"bytes": [4 << 10] * 76, "ready_order": list(range(76)), "buckets": [list(range(76))]}
    program = _program(1 << 20, {}, gradient_as_bucket_view=False, **sizes)
    copies = x("cpu_op", "torch.distributed.ddp.reducer::copy_bucket_to_grad", 2000, 2500)
    events = [_step(10_000), x("cpu_op", "aten::mm", 0, 2000), copies]

    def gain(folder: str, faults: int, **settings: Any) -> dict[str, Any]:
        pages = {"page_faults": [[900, 900, faults, faults], [0]], "page_fault_s": 1e-5}
        return _rows(tmp_path / folder, events, events, tutti=program | pages | settings)

    advice = _only(gain("faults", 90), "bucket_view")
    assert _contains(advice, 500 + 75 * 10)
    assert "page faults" in advice["finding"] and "train.py:12" in advice["try"]
    assert advice["change"] == {"ddp": {"gradient_as_bucket_view": True}}
    without = gain("none", 0)
    assert not [each for each in without["advice"] if each["id"] == "bucket_view"]  # 5 % − noise
    present = gain("present", 90, **_program(1 << 20, {}, **sizes))
    assert not [each for each in present["advice"] if each["id"] == "bucket_view"]


def test_tutti_train_gets_its_own_flags(tmp_path: Path) -> None:
    program = _program(4096, {"1": 1 << 20})
    events = [*_ddp(4096), x("user_annotation", "tutti.input", 0, 1)]

    advice = _only(_rows(tmp_path, events, events, tutti=program), "buckets")

    assert "--bucket-mb 1" in advice["try"]
    assert "DistributedDataParallel(" not in advice["try"]
    assert advice["change"] == {"flags": {"--bucket-mb": "1"}}


def test_no_bucket_size_is_advised_if_the_messages_have_one_large_size(tmp_path: Path) -> None:
    """Messages of one size do not show the latency, so larger buckets may gain nothing."""
    program = _program(64 << 10, {"1": 1 << 20})
    size = 64 << 10
    events = [x("cpu_op", "aten::mm", 0, 5000) | {"tid": 8}]
    for number in range(1, GRADIENTS + 1):
        now = FORWARD + 10.0 * number
        events.append(x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", now - 1, now + 1))
        if number % 64 == 0 or number == GRADIENTS:
            start = 5000 + 450.0 * math.ceil(number / 64)
            events += _message(now, start, start + 400, size)
    rows = _rows(tmp_path, [_step(30_000), *events], [_step(30_000), *events], tutti=program)

    assert not [each for each in rows["advice"] if each["id"] == "buckets"]


def test_advice_within_the_noise_of_the_steps_is_not_offered(tmp_path: Path) -> None:
    """Loading takes 400 of about 2000 µs; the lengths of the steps differ by more than that."""
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

    def rank(lengths: list[float]) -> list[dict[str, Any]]:
        events, at = [], 0.0
        for number, length in enumerate(lengths):
            events.append(x("user_annotation", f"ProfilerStep#{number}", at, at + length))
            events.append(x("user_annotation", name, at, at + 400))
            events.append(x("cpu_op", "aten::mm", at + 400, at + length))
            at += length
        return events

    steady = _rows(tmp_path / "steady", rank([20_000.0, 20_100.0, 19_900.0, 20_000.0]))
    fast = _rows(tmp_path / "fast", rank([2000.0, 2010.0, 1990.0, 2000.0]))
    noisy = _rows(tmp_path / "noisy", rank([2000.0, 1200.0, 3000.0, 1500.0]))

    assert "input" not in {each["id"] for each in steady["advice"]}  # 2 % of the step
    assert "input" not in {each["id"] for each in noisy["advice"]}
    assert "input" not in {each["id"] for each in fast["advice"]}  # a worker may cost 1.5 ms


def test_passes_that_need_not_communicate_are_reported(tmp_path: Path) -> None:
    """Both passes of a step wait 606 µs for one bucket; the first pass need not send it."""
    events, at = [x("cpu_op", "aten::mm", 0, 1) | {"tid": 8}], 0.0
    for _ in range(2):
        for number in range(1, 5):
            now = at + 1000.0 * number
            events.append(x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", now - 1, now + 1))
        end = now + ALPHA + BETA * (400 << 10)
        events += _message(now, now, end, 400 << 10)
        at = end
    sizes = {"bytes": [100 << 10] * 4, "ready_order": [0, 1, 2, 3], "buckets": [[0, 1, 2, 3]]}
    program = _program(1 << 20, {}, **sizes)

    rows = _rows(tmp_path, [_step(at), *events], [_step(at), *events], tutti=program)

    advice = _only(rows, "no_sync")
    assert _contains(advice, ALPHA + BETA * (400 << 10))
    assert advice["change"] == {"no_sync": 2}


def test_gradients_reduced_after_backward_could_be_hidden(tmp_path: Path) -> None:
    """All-reduces take 800 µs. Backward computes for 600 µs after its first gradient."""
    events = [
        _step(2000),
        x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", 400, 401),
        x("cpu_op", "aten::mm", 401, 1001) | {"tid": 8},
        x("cpu_op", f"{ENGINE}MmBackward0", 990, 1001),
        *_message(1100, 1100, 1900, 1 << 20),
    ]

    advice = _only(_rows(tmp_path, events, events), "overlap")

    assert _contains(advice, 600)


def test_grouped_messages_save_all_but_one_latency(tmp_path: Path) -> None:
    events, at = [], 100.0
    for number in range(10):
        size = 4096 if number % 2 else 65_536
        events += _message(at, at, at + ALPHA + BETA * size, size)
        at += ALPHA + BETA * size + 50

    advice = _only(_rows(tmp_path, [_step(at), *events], [_step(at), *events]), "grouping")

    assert _contains(advice, 9 * ALPHA)


def test_advice_on_accumulation_mentions_the_learning_rate(tmp_path: Path) -> None:
    rows = _rows(tmp_path, _ddp(1 << 20), _ddp(1 << 20))
    advice = _only(rows, "accumulation")
    exposed = ALPHA + BETA * 1024 * GRADIENTS  # one bucket, after backward

    assert "learning rate" in advice["try"]
    assert "over 4 batches" in advice["try"]  # 11 % of the step is exposed; less than 5 % remains
    assert _contains(advice, exposed * 3 / 4)


def test_accumulation_is_listed_after_other_advice_on_gradients(tmp_path: Path) -> None:
    """Backward could hide 200 of 1400 µs. Accumulation gains more but changes the training."""
    events = [
        _step(2000),
        x("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", 300, 301),
        x("cpu_op", "aten::mm", 301, 501) | {"tid": 8},
        x("cpu_op", f"{ENGINE}MmBackward0", 490, 501),
        *_message(550, 550, 1950, 1 << 20),
    ]

    rows = _rows(tmp_path, events, events)

    overlap, accumulation = _only(rows, "overlap"), _only(rows, "accumulation")
    assert overlap["gain_s"] < accumulation["gain_s"]
    assert rows["advice"].index(overlap) < rows["advice"].index(accumulation)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "num_workers="),
        ("tutti.input", "--workers "),  # the span of `tutti train`, whose loader has a thread
    ],
)
@pytest.mark.parametrize(("load", "workers"), [(50_000.0, (1, 2)), (150_000.0, (4, 5))])
def test_the_number_of_loader_workers_follows_from_the_loading_time(
    tmp_path: Path, load: float, workers: tuple[int, int], name: str, flag: str
) -> None:
    slow = [
        _step(200_000),
        x("user_annotation", name, 0, load),
        *_message(load + 40_000, load + 40_000, load + 45_000, 64),
    ]
    fast = [
        _step(200_000),
        x("user_annotation", name, 0, 1),
        *_message(40_000, 40_000, load + 45_000, 64),
    ]

    rows = _rows(tmp_path, fast, slow)
    advice = rows["advice"][0]

    assert (advice["id"], advice["cause"]) == ("input", "input")
    assert advice["finding"].startswith("rank 1 waits")
    assert f"{flag}{workers[name == 'tutti.input']}" in advice["try"]
    assert _contains(advice, load)
    late = late_rank(rows["stragglers"])
    assert late is not None and advice["finding"].startswith(f"rank {late['rank']} ")


def test_a_slow_rank_and_an_uneven_batch_are_distinguished(tmp_path: Path) -> None:
    def rank(compute: float, batch: int) -> list[dict[str, Any]]:
        sizes = {"Input Dims": [[batch, 64], [64, 64]]}
        return [
            _step(1000),
            x("cpu_op", "aten::mm", 0, compute, **sizes),
            *_message(compute, compute, 900, 4096),
        ]

    uneven = _only(_rows(tmp_path / "a", rank(200, 32), rank(600, 96)), "straggler")
    slow = _only(_rows(tmp_path / "b", rank(200, 32), rank(600, 32)), "straggler")

    assert "Split the batch evenly: rank 1 has 3.0 times the work" in uneven["try"]
    assert "the same work as the others but is slower" in slow["try"]
    assert _contains(uneven, 400)


def test_the_late_rank_is_the_one_whose_own_work_is_longer(tmp_path: Path) -> None:
    """Rank 0 costs 350 µs, but no part of its step is 200 µs longer, as the compute of rank 1."""
    early = [
        _step(1000),
        x("cpu_op", "aten::mm", 0, 100),
        *_message(100, 100, 320, 4096),
        *_message(700, 700, 720, 4096),
        x("user_annotation", "enumerate(DataLoader)", 767, 884),
        x("cpu_op", f"{ENGINE}MmBackward0", 884, 1000),
    ]
    slow = [
        _step(1000),
        x("cpu_op", "aten::mm", 0, 300),
        *_message(300, 300, 320, 4096),
        *_message(350, 350, 720, 4096),
    ]

    rows = _rows(tmp_path, early, slow)

    late = late_rank(rows["stragglers"])
    assert rows["stragglers"][0]["rank"] == 0
    assert late is not None and late["rank"] == 1
    assert "for rank 1" in _only(rows, "straggler")["finding"]


def test_ranks_that_are_late_in_turn_are_not_late_ranks() -> None:
    def row(rank: int, cost: float, **more: Any) -> dict[str, Any]:
        share = {"cost_s": {"mean": cost}, "cost_share": cost, "gain_s": cost}
        return {"rank": rank, "steady": False, "period": None} | share | more

    in_turn = [row(0, 0.12), row(1, 0.1)]

    assert late_rank(in_turn) is None
    for late in (row(1, 0.1, period=5), row(1, 0.1, steady=True), row(1, 0.25)):
        assert late_rank([row(0, 0.12), late]) is late
    assert late_rank([row(0, 0.12, steady=True, gain_s=0.01)]) is None  # less than 2 % of the step


def test_advice_and_table_use_the_same_names_of_parts(tmp_path: Path) -> None:
    early = [_step(1000), *_message(200, 200, 900, 4096)]
    late = [_step(1000), *_message(800, 800, 900, 4096)]

    rows = _rows(tmp_path, early, late)

    assert "0.6 ms longer in gaps" in _only(rows, "straggler")["finding"]
    assert "gaps" in list(profile_lines(rows))[2]


def test_too_many_threads_are_reported_with_a_number_that_fits_the_cpus(tmp_path: Path) -> None:
    def rank(compute: float) -> list[dict[str, Any]]:
        sizes = {"Input Dims": [[32, 64], [64, 64]]}
        return [_step(1000), x("cpu_op", "aten::mm", 0, compute, **sizes)]

    shared_cpus = {"threads": 4, "cpus": [0, 1, 2, 3]}
    uneven = _rows(tmp_path, rank(400), rank(600), tutti=shared_cpus)
    equal = _rows(tmp_path, rank(600), rank(600), tutti=shared_cpus)

    assert _contains(_only(uneven, "binding"), 100)  # the slower rank would take the mean
    assert equal["advice"] == []
    assert any("OMP_NUM_THREADS=2" in note for note in equal["notes"])


def test_twice_the_microbatches_halve_the_bubble(tmp_path: Path) -> None:
    def message(operation: str, peer: int, start: float, end: float) -> dict[str, Any]:
        advice = {
            "Collective name": operation,
            "Process Group Name": "0",
            "In msg nelems": 100,
            "dtype": "Float",
            "Group size": 2,
            "Process Group Ranks": "[0, 1]",
            "Dst Rank" if operation == "send" else "Src Rank": peer,
        }
        return x("kernel", "ncclDevKernel_SendRecv()", start, end, **advice)

    first = [_step(1000), x("kernel", "gemm", 0, 400), message("send", 1, 400, 410)]
    first += [x("kernel", "gemm", 410, 790), message("send", 1, 790, 800)]
    second = [_step(1000), message("recv", 0, 0, 410), message("recv", 0, 410, 800)]
    second.append(x("kernel", "gemm", 800, 1000))

    advice = _only(_rows(tmp_path, first, second), "microbatches")

    assert "with 2 microbatches" in advice["finding"] and "--accumulation 4" in advice["try"]
    bubble = (400 + 380) / 2  # on the second rank; mean over both
    assert _contains(advice, bubble / 2)


def _sharded(kernels: list[tuple[str, int, float, float]]) -> list[dict[str, Any]]:
    events = [_step(1000), x("kernel", "gemm", 0, 100)]
    for sequence, (name, floats, start, end) in enumerate(kernels):
        advice = {
            "Collective name": name,
            "Process Group Name": "0",
            "In msg nelems": floats,
            "dtype": "Float",
            "Seq": sequence,
            "Group size": 2,
            "Process Group Ranks": "[0, 1]",
        }
        events.append(x("kernel", "ncclDevKernel_X()", start, end, **advice))
    return events


def test_sharding_or_replicas_are_advised_by_free_memory(tmp_path: Path) -> None:
    """Replicas of a model of 4 MB need 4 × 4 MB × 1/2 more memory than shards on two ranks."""
    sharded = _sharded(
        [
            ("_allgather_base", 1_000_000, 100, 300),
            ("_allgather_base", 1_000_000, 400, 600),
            ("_reduce_scatter_base", 1_000_000, 700, 900),
        ]
    )
    replicas = _sharded([("allreduce", 1_000_000, 100, 300)])

    def rows(name: str, events: list[dict[str, Any]], used: float, has: float) -> dict[str, Any]:
        metadata = {"tutti": {"device_memory_bytes": used}, "deviceProperties": [{}]}
        metadata["deviceProperties"][0]["totalGlobalMem"] = has
        return _rows(tmp_path / name, events, events, **metadata)

    free = _only(rows("free", sharded, 10e6, 80e6), "replicas")
    full = rows("full", replicas, 76e6, 80e6)

    assert _contains(free, 200)  # a third of 600
    assert any("memory is 95 % full" in note for note in full["notes"])
    assert "replicas" not in {each["id"] for each in rows("no", sharded, 70e6, 80e6)["advice"]}


def test_a_gain_on_another_axis_does_not_reduce_the_gain_of_accumulation(tmp_path: Path) -> None:
    """All-reduces take 300 µs. Sharding takes 300 µs, of which replicas would save a third."""
    events = _sharded(
        [
            ("_allgather_base", 1_000_000, 100, 300),
            ("_reduce_scatter_base", 1_000_000, 400, 500),
            ("allreduce", 1_000_000, 600, 900),
        ]
    )
    metadata = {
        "deviceProperties": [{"totalGlobalMem": 80e6}],
        "tutti": {"device_memory_bytes": 1e6},
    }
    rows = _rows(tmp_path, events, events, **metadata)

    assert _contains(_only(rows, "replicas"), 100)
    assert _contains(_only(rows, "accumulation"), 300 * 7 / 8)


def test_an_idle_gpu_is_noted_without_a_gain(tmp_path: Path) -> None:
    rows = _rows(tmp_path, [_step(1000), x("kernel", "gemm", 0, 400)])

    assert rows["advice"] == []
    assert any("idle for 60 %" in note for note in rows["notes"])


def test_the_table_prints_the_five_largest_gains_in_80_columns(tmp_path: Path) -> None:
    program = _program(4096, {"1": 1 << 20})
    rows = _rows(tmp_path, _ddp(4096), _ddp(4096), tutti=program)
    gains = [each["gain_s"] or 0.0 for each in rows["advice"]]
    rows["advice"] = 6 * rows["advice"]

    printed = list(profile_lines(rows))

    assert gains == sorted(gains, reverse=True)
    assert sum(line.startswith("- ") for line in printed) == 5
    assert max(map(len, printed)) <= 80
    for width in (60, 100):
        assert max(map(len, profile_lines(rows, width))) <= width


def test_a_run_without_losses_gets_no_advice(tmp_path: Path) -> None:
    events = [_step(1000), x("cpu_op", "aten::mm", 0, 1000)]

    assert _rows(tmp_path, events, events)["advice"] == []
