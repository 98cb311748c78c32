"""The collectives bench: exact payloads, an interleaved and checked sweep, and correct backends."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.collectives.cases import DTYPES, CollectiveCase, Payload, case_groups, payload
from tutti.bench.rank_control import share_of_cpus
from tutti.measure.collective_bandwidth import OPERATIONS, uneven_shards
from worlds import in_world

# ---- Payloads ----


def payloads(op: str, count: int, ranks: int, dtype: torch.dtype = torch.float32) -> list[Payload]:
    """Return the payload of every rank."""
    operation = OPERATIONS[op]
    cases = [CollectiveCase(operation, count, dtype, "out", rank, ranks) for rank in range(ranks)]
    return [payload(case) for case in cases]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_sums_of_payloads_are_exact_in_any_order_and_never_zero(
    dtype: torch.dtype, ranks: int
) -> None:
    parts = payloads("all_reduce", 9000, ranks, dtype)
    forwards, backwards = parts[0].sent.clone(), parts[-1].sent.clone()
    for part in parts[1:]:
        forwards += part.sent
    for part in reversed(parts[:-1]):
        backwards += part.sent
    assert torch.equal(forwards, backwards)
    assert parts[0].count_wrong(forwards) == 0
    assert parts[0].count_wrong(torch.zeros_like(forwards)) == 9000
    if ranks > 1:
        assert not torch.equal(parts[0].sent, parts[1].sent)


@pytest.mark.parametrize("count", [1, 3, 8191, 10000])
def test_expected_shards_match_the_data_of_other_ranks(count: int) -> None:
    scattered = payloads("reduce_scatter", count, 3)
    total = sum(part.sent for part in scattered)
    assert torch.equal(torch.cat([part.expected for part in scattered]), total)
    exchanged = payloads("all_to_all", count, 3)
    for receiver in range(3):
        shards = [part.sent.chunk(3)[receiver] for part in exchanged]
        assert torch.equal(exchanged[receiver].expected, torch.cat(shards))


@pytest.mark.parametrize("count", [1, 3, 8191])
def test_uneven_shards_differ_and_match_the_data_of_other_ranks(count: int) -> None:
    shards = uneven_shards(count, 3)
    assert sum(shards) == count * 3 and (len(set(shards)) == 3 or count == 1)
    gathered = payloads("all_gather_uneven", count, 3)
    assert [len(part.sent) for part in gathered] == shards
    assert torch.equal(gathered[1].expected, torch.cat([part.sent for part in gathered]))
    exchanged = payloads("all_to_all_uneven", count, 3)
    for receiver in range(3):
        parts = []
        for sender, part in enumerate(exchanged):
            splits = [shards[(sender + peer) % 3] for peer in range(3)]
            parts.append(part.sent.split(splits)[receiver])
        assert torch.equal(exchanged[receiver].expected, torch.cat(parts))


def test_wrong_elements_are_counted_one_by_one() -> None:
    part = payloads("all_reduce", 100, 2)[0]
    received = part.expected.clone()
    received[7] += 1
    received[9] = float("nan")
    assert part.count_wrong(received) == 2


@given(st.integers(1, 64), st.integers(1, 64))
def test_pinned_ranks_share_no_cpu_unless_there_are_more_ranks_than_cpus(
    cpus: int, ranks: int
) -> None:
    shares = [share_of_cpus(tuple(range(cpus)), rank, ranks) for rank in range(ranks)]
    used = [cpu for share in shares for cpu in share]
    assert all(shares) and set(used) == set(range(min(cpus, max(ranks, cpus))))
    if ranks <= cpus:
        assert len(used) == len(set(used))


# ---- The sweep ----

_KEYS = {
    *("op", "backend", "ranks", "bytes", "count", "dtype", "placement", "time_us", "algbw_gbs"),
    *("busbw_gbs", "wrong"),
}


def _cases(world: Any, op: str, counts: list[int], dtype: torch.dtype = torch.float32) -> Any:
    shards = world.size if OPERATIONS[op].sharded else 1
    sizes = [count * dtype.itemsize * shards for count in counts]
    return case_groups(op, sizes, dtype, world, "both")


def _sweep_with_faulty_backends(world: Any) -> Any:
    from tutti.bench import Unsupported
    from tutti.bench.collectives.backends import open_backends
    from tutti.bench.collectives.cases import Backend, PreparedCase
    from tutti.bench.collectives.interleaved_sweep import Sweep
    from tutti.bench.rank_control import RankControl

    def corrupt_one_element(case: CollectiveCase) -> PreparedCase:
        if case.operation.name == "barrier":
            raise Unsupported("no barrier")
        good = gloo.prepare(case)

        def call() -> None:
            good.call()
            if world.rank == 1 and good.received.numel() > 2:
                good.received[2] += 1

        return PreparedCase(good.sent, good.received, call)

    def work_once(case: CollectiveCase) -> PreparedCase:
        """Only the first call is correct, so only a check of the last call finds the error."""
        good, done = gloo.prepare(case), []

        def call() -> None:
            if not done:
                good.call()
                done.append(True)

        return PreparedCase(good.sent, good.received, call)

    with open_backends(["gloo", "nccl"], world, largest=2400) as ((gloo,), missing):
        groups = [
            group
            for op in OPERATIONS
            for group in _cases(world, op, [0] if op == "barrier" else [1, 300])
        ]
        timings, control = ("back-to-back", "isolated"), RankControl()
        sweep = Sweep([gloo], control, world, 0.002, timings, max_warmup=2, max_rounds=2)
        sweep.run(groups, lambda rows: None)
        backends = [
            gloo,
            Backend("corrupts", "", corrupt_one_element),
            Backend("once", "", work_once),
        ]
        faulty = Sweep(backends, control, world, budget=0.002)
        groups = [*_cases(world, "all_reduce", [8]), *_cases(world, "barrier", [0])]
        faulty.run(groups, lambda rows: None)
    return {
        "rows": sweep.rows,
        "skipped": sweep.skipped,
        "missing": missing,
        "faulty": faulty.rows,
        "faulty_skipped": faulty.skipped,
    }


def test_every_operation_is_measured_and_wrong_results_are_counted() -> None:
    first, second = in_world(_sweep_with_faulty_backends, 2)
    rows = first["rows"]
    assert [row["wrong"] for row in rows] == [0] * len(rows)
    # twelve operations, most of them in both placements and at two counts, with two timings
    assert len(rows) == 2 * (2 * 7 * 2 + 4 * 2 + 1) and not first["skipped"]
    for row in rows:
        assert row.keys() >= _KEYS
        assert row["time_us"].keys() >= {"p50", "p95", "min", "mean", "cv"}
        assert 0 < row["time_us"]["min"] <= row["time_us"]["p50"] <= row["time_us"]["p95"]
    assert first["missing"][0]["backend"] == "nccl" and "--device cuda" in str(first["missing"])
    # all ranks have the same figures: those of the slowest rank of each call
    assert rows == second["rows"]

    by_name: dict[str, list[int]] = {}
    for row in first["faulty"]:
        by_name.setdefault(row["backend"], []).append(row["wrong"])
    assert by_name["gloo"] == [0, 0, 0]
    # one element on one of two ranks, in the first and in the last checked call
    assert by_name["corrupts"] == [2, 2]
    # everything is wrong after the timed calls, on both ranks
    assert by_name["once"] == [16, 16, 0]
    assert [each["reason"] for each in first["faulty_skipped"]] == ["no barrier"]


def _call_order(world: Any) -> Any:
    from tutti.bench.collectives.cases import Backend, PreparedCase
    from tutti.bench.collectives.interleaved_sweep import Sweep
    from tutti.bench.rank_control import RankControl

    called: list[str] = []

    def named(name: str) -> Backend:
        nothing = torch.empty(0)
        prepared = PreparedCase(nothing, nothing, lambda: called.append(name))
        return Backend(name, "", lambda case: prepared)

    case = CollectiveCase(OPERATIONS["barrier"], 0, torch.float32, "out", 0, 1)
    backends, settings = [named("a"), named("b")], {"iterations": 16, "max_warmup": 1}
    sweep = Sweep(backends, RankControl(), world, 0.5, **settings)
    sweep.run([[case]], lambda rows: None)
    return called


def test_backends_alternate_and_the_first_of_each_round_rotates() -> None:
    (called,) = in_world(_call_order, 1)
    turns = [name for at, name in enumerate(called) if called[at - 1 : at] != [name]]
    assert turns[:2] == ["a", "b"] and len(turns) >= 10
    assert turns.count("a") >= 5 and turns.count("b") >= 5


# ---- Backends ----

_NAMES = ["gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"]


def _sweep_backends(world: Any) -> Any:
    from tutti.bench.collectives.backends import open_backends, with_grouped
    from tutti.bench.collectives.interleaved_sweep import Sweep
    from tutti.bench.rank_control import RankControl

    groups = [
        group
        for op in OPERATIONS
        for dtype, counts in ((torch.float32, [1, 1025]), (torch.bfloat16, [77]))
        for group in _cases(world, op, counts if op != "barrier" else [0], dtype)
    ]
    largest = max(case.bytes for group in groups for case in group)
    with open_backends(_NAMES, world, largest) as (backends, missing):
        backends = list(with_grouped(backends, 3, world.device))
        sweep = Sweep(backends, RankControl(), world, 0.001, max_warmup=1, max_rounds=2)
        sweep.run(groups, lambda rows: None)
    return {
        "measured": [[row["backend"], row["op"]] for row in sweep.rows],
        "wrong": [row for row in sweep.rows if row["wrong"]],
        "groups": {row["backend"]: row["group"] for row in sweep.rows},
        "skipped": sweep.skipped,
        "missing": missing,
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_backend_gives_correct_results_for_every_operation_it_supports(ranks: int) -> None:
    first, *_ = in_world(_sweep_backends, ranks, timeout=110)
    assert first["missing"] == [] and first["wrong"] == []
    measured: dict[str, set[str]] = {}
    for backend, op in first["measured"]:
        measured.setdefault(backend, set()).add(op)
    assert len(measured["gloo"]) == 12
    assert measured["shm"] == measured["symmetric"] == measured["gloo"]
    for name in ("one-shot", "two-shot", "ring"):
        assert measured[name] == {"all_reduce"}
    # Only torch.distributed backends are grouped, in the operations that comm.group() supports.
    grouped = {"gloo x3", "shm x3"}
    assert {name for name, times in first["groups"].items() if times == 3} == grouped
    ungrouped = {"all_gather_uneven", "all_to_all_uneven", "barrier"}
    for name in grouped:
        assert measured[name] == measured["gloo"] - ungrouped
    skipped = {each["backend"] for each in first["skipped"]}
    assert skipped <= grouped | {"one-shot", "two-shot", "ring"}
