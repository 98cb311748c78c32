"""Given ranks on one host, when torch.distributed calls shm, then every result is exact."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from shm_cases import (
    FLOATS,
    INTS,
    OPS,
    SIZES,
    Checks,
    all_gather_flat,
    group_of,
    reduced,
    valid,
    values,
)
from worlds import in_world


def every_operation(world: Any) -> list[str]:
    checks = Checks(group_of())
    checks.everything(SIZES)
    checks.large()
    assert checks.count > 500
    return checks.wrong[:20]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_operation_dtype_reduction_and_size_is_exact(ranks: int) -> None:
    assert in_world(every_operation, ranks, timeout=110) == [[]] * ranks


def subgroups_and_large_tensors(world: Any) -> list[str]:
    wrong = []
    for ranks in ([0, 2, 4], [3, 1], [4], [1, 2, 3, 4]):
        group = group_of(ranks)
        if world.rank in ranks:
            checks = Checks(group)
            checks.everything((3,))
            checks.large((131071, 300001))
            wrong += [f"{ranks}: {text}" for text in checks.wrong]
            dist.destroy_process_group(group)
    return wrong[:20]


def test_subgroups_work_at_the_same_time_and_large_tensors_are_exact() -> None:
    assert in_world(subgroups_and_large_tensors, 5, timeout=110) == [[]] * 5


def the_rest(world: Any) -> list[str]:
    wrong: list[str] = []
    group = group_of()
    checks = Checks(group)
    _many_in_flight(checks)
    _coalesced(checks)
    _not_contiguous(checks)
    _lazy(checks)
    _uneven_gathers(checks)
    _messages(checks)
    _futures(checks)
    _mistakes(checks)
    wrong += checks.wrong
    assert dist.get_backend(group) == "shm" and group.name() in ("shm", "custom")
    dist.destroy_process_group(group)
    return wrong


def _many_in_flight(checks: Checks) -> None:
    tensors = [values(checks.rank, 100 + i, torch.float32) for i in range(200)]
    works = [dist.all_reduce(t, group=checks.group, async_op=True) for t in tensors]
    now = torch.ones(5)
    dist.all_reduce(now, group=checks.group)  # takes its turn after the ones before
    checks.same(now, torch.full((5,), float(checks.size)), "a synchronous one among them")
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    for i, tensor in enumerate(tensors):
        checks.same(tensor, reduced(checks.inputs(100 + i, torch.float32), "SUM"), "in flight", i)


def _coalesced(checks: Checks) -> None:
    group, size = checks.group, checks.size
    for counts in ((3, 5, 700), (300000, 7)):  # one flat message; one each
        tensors = [values(checks.rank, count, torch.float32) for count in counts]
        with dist._coalescing_manager(group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        for count, tensor in zip(counts, tensors, strict=True):
            checks.same(tensor, reduced(checks.inputs(count, torch.float32), "SUM"), "coalesced")
    outs = [torch.empty(size * 4), torch.empty(size * 9)]
    parts = [values(checks.rank, 4, torch.float32), values(checks.rank, 9, torch.float32)]
    with dist._coalescing_manager(group, async_ops=True) as works:
        for out, part in zip(outs, parts, strict=True):
            all_gather_flat(out, part, group=group)
    works.wait()
    for out, count in zip(outs, (4, 9), strict=True):
        checks.same(out, torch.cat(checks.inputs(count, torch.float32)), "coalesced gather", count)
    with dist._coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as works:
        for root in range(size):
            dist.broadcast(parts[root % 2], checks.ranks[root], group=group, async_op=True)
    works.wait()
    lists = [[torch.empty(4), torch.empty(9)] for _ in range(size)]
    local = [values(checks.rank, count, torch.float32) for count in (4, 9)]
    group.allgather_coalesced(lists, local).wait()
    for rank, (four, nine) in enumerate(lists):
        checks.same(four, values(rank, 4, torch.float32), "coalesced lists", rank)
        checks.same(nine, values(rank, 9, torch.float32), "coalesced lists", rank)
    mixed = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
    opts = dist.AllreduceCoalescedOptions()
    group.allreduce_coalesced(mixed, opts).wait()
    checks.same(mixed[1], torch.full((2,), size), "coalesced, two dtypes")


def _lazy(checks: Checks) -> None:
    """A view whose memory holds the negatives of its values. (torch itself refuses conjugates, and
    hands a compiled backend a copy, so that nothing can be received into either.)"""
    negative, expected = torch._neg_view(torch.tensor([1.0, 2.0])), torch.tensor([-1.0, -2.0])
    got = negative if checks.rank == 0 else torch.zeros(2)
    dist.broadcast(got, checks.ranks[0], group=checks.group)
    checks.same(got.resolve_neg(), expected, "broadcast of a negative view")
    whole = torch.empty(checks.size, 2)
    all_gather_flat(whole, negative.view(1, 2), group=checks.group)
    checks.same(whole, expected.expand(checks.size, 2), "all_gather of negative views")


def _not_contiguous(checks: Checks) -> None:
    base = values(checks.rank, 60, torch.float32).view(6, 10)
    parts = [part.view(6, 10) for part in checks.inputs(60, torch.float32)]
    for async_op in (False, True):
        for view in (lambda t: t.T, lambda t: t[:, ::2], lambda t: t[::3, 1:4]):
            tensor = base.clone()
            work = dist.all_reduce(view(tensor), group=checks.group, async_op=async_op)
            if async_op:
                work.wait()
            expected = base.clone()
            view(expected).copy_(reduced([view(part) for part in parts], "SUM"))
            checks.same(tensor, expected, "not contiguous", async_op)
    outs = torch.zeros(checks.size, 6, 10)
    dist.all_gather([out.T for out in outs], base.T, group=checks.group)
    checks.same(outs, torch.stack(parts), "gathered into views")
    for async_op in (False, True):  # tensors of inference mode may be written outside of it, too
        with torch.inference_mode():
            received = torch.zeros(checks.size, 6, 10)
            view = base.clone().T
        views = [out.T for out in received]
        work = dist.all_gather(views, view, group=checks.group, async_op=async_op)
        if async_op:
            work.wait()
        checks.same(received, torch.stack(parts), "gathered into tensors of inference mode")
    parameter = torch.nn.Parameter(values(checks.rank, 4, torch.float32))
    dist.broadcast(parameter, checks.ranks[0], group=checks.group)
    checks.same(parameter.data, values(0, 4, torch.float32), "a parameter")


def _uneven_gathers(checks: Checks) -> None:
    counts = [rank % 3 * 5 for rank in range(checks.size)]
    expected = [values(rank, count, torch.float32) for rank, count in enumerate(counts)]
    outs = [torch.empty(count) for count in counts]
    dist.all_gather(outs, expected[checks.rank], group=checks.group)
    for out, part in zip(outs, expected, strict=True):
        checks.same(out, part, "uneven all_gather")


def _messages(checks: Checks) -> None:
    group, size, rank, ranks = checks.group, checks.size, checks.rank, checks.ranks
    # Tags tell messages apart, whatever the order in which they are received.
    after, before = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
    sends = [dist.isend(torch.full((7,), float(tag)), after, group, tag) for tag in range(5)]
    for tag in (3, 0, 4, 2, 1):
        out = torch.empty(7)
        dist.recv(out, before, group, tag)
        checks.same(out, torch.full((7,), float(tag)), "tag", tag)
    for send in sends:
        send.wait()
    # Both ways at once, more than any ring holds.
    big, out = torch.full((1 << 20,), float(rank)), torch.empty(1 << 20)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, big, after, group), dist.P2POp(dist.irecv, out, before, group)]
    )
    for work in works:
        work.wait()
    checks.same(out, torch.full((1 << 20,), float((rank - 1) % size)), "batched")
    # From anyone: rank 0 hears from all.
    if rank == 0:
        heard = set()
        for _ in range(size - 1):
            out = torch.empty(2)
            source = dist.recv(out, None, group, tag=9)
            checks.same(out, torch.full((2,), float(source)), "from anyone", source)
            heard.add(source)
        assert heard == set(ranks[1:]), heard
    else:
        dist.send(torch.full((2,), float(ranks[rank])), ranks[0], group, tag=9)


def _futures(checks: Checks) -> None:
    tensor = values(checks.rank, 12, torch.float32)
    work = dist.all_reduce(tensor, group=checks.group, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    expected = reduced(checks.inputs(12, torch.float32), "SUM")
    checks.same(doubled.wait(), expected * 2, "future")
    checks.same(work.get_future().wait()[0], expected, "future asked for again")
    assert work.wait(timedelta(seconds=5)) and work.is_completed()


_OPTIONS = {
    **{"allreduce": "Allreduce", "allreduce_coalesced": "AllreduceCoalesced"},
    **{"broadcast": "Broadcast", "reduce": "Reduce", "gather": "Gather", "scatter": "Scatter"},
    **{"allgather": "Allgather", "allgather_coalesced": "Allgather"},
    **{"reduce_scatter": "ReduceScatter", "alltoall": "AllToAll", "alltoall_base": "AllToAll"},
}


def _wrong_calls(backend: Any, rank: int, size: int, one: torch.Tensor) -> list[Any]:
    """Calls of every kind of operation with wrong arguments.

    `one` is a valid tensor of 2 elements, which no refused call may change.
    """
    other = (rank + 1) % size
    many, wide, deep = ([torch.ones(*shape)] * size for shape in ((2,), (3,), (2, 1)))
    double, sparse = torch.ones(2, dtype=torch.float64), torch.ones(2).to_sparse()
    meta, csr = torch.empty(2, device="meta"), torch.eye(2).to_sparse_csr()
    calls: list[Any] = []

    def wrong(method: str, *arguments: Any, **values: Any) -> None:
        name = _OPTIONS.get(method)
        options = [getattr(distributed_c10d, f"{name}Options")()] if name else []
        for key, value in values.items():
            setattr(options[0], key, value)
        calls.append((method, lambda: getattr(backend, method)(*arguments, *options)))

    for tensors in ([], [one, one], [one, double], [meta], [csr], [one.to(torch.float8_e4m3fn)]):
        wrong("allreduce", tensors)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        wrong("allreduce", [one], reduceOp=op)
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        wrong("allreduce", [sparse], reduceOp=op)
    for tensors in ([], [one, sparse], [sparse, sparse.clone()], [one, meta]):
        wrong("allreduce_coalesced", tensors)
    for method in ("broadcast", "reduce"):
        for root in (-1, size):
            wrong(method, [one], rootRank=root)
        for tensors in ([], [one, one], [sparse], [meta]):
            wrong(method, tensors, rootRank=rank)
        wrong(method, [one], rootRank=rank, rootTensor=1)
    for lists in ([], [many, many], [many[1:]], [[*many, one]], [wide], [deep], [[double] * size]):
        wrong("allgather", lists, [one])
    for inputs in ([], [one, one], [sparse], [meta]):
        wrong("allgather", [many], inputs)
    wrong("allgather_coalesced", [[]] * size, [])
    wrong("allgather_coalesced", [[*many[:2]]] * (size + 1), [one, one])
    for outputs in ([torch.ones(2)], [torch.ones(2), double], [torch.ones(2), torch.ones(3)]):
        wrong("allgather_coalesced", [outputs] * size, [one, one])
    for lists in ([], [many, many], [many[1:]], [[*many, one]], [wide], [deep], [[double] * size]):
        wrong("reduce_scatter", [one], lists)
    for root in (-1, size):
        wrong("gather", [], [one], rootRank=root)
    for lists in ([], [many, many], [many[1:]], [[*many, one]], [wide], [deep], [[double] * size]):
        wrong("gather", lists, [one], rootRank=rank)
    for inputs in ([], [one, one]):
        wrong("gather", [many], inputs, rootRank=rank)
    wrong("gather", [many], [one], rootRank=other)
    for root in (-1, size):
        wrong("scatter", [one], [], rootRank=root)
    for lists in ([], [many, many], [many[1:]], [[*many, one]], [wide], [deep], [[double] * size]):
        wrong("scatter", [one], lists, rootRank=rank)
    for outputs in ([], [one, one]):
        wrong("scatter", outputs, [many], rootRank=rank)
    wrong("scatter", [one], [many], rootRank=other)
    wrong("alltoall", many[1:], many)
    wrong("alltoall", many, [*many, one])
    wrong("alltoall", [double] * size, many)
    flat = torch.ones(2 * size)
    for splits in ([2] * (size - 1), [3] * size, [-1] * size):
        wrong("alltoall_base", flat, flat.clone(), splits, [2] * size)
        wrong("alltoall_base", flat, flat.clone(), [2] * size, splits)
    wrong("alltoall_base", torch.ones(2 * size + 1), flat, [], [])
    for tensors, peer, tag in (([one], other, -1), ([one], rank, 0), ([one], size, 0)):
        wrong("send", tensors, peer, tag)
        wrong("recv", tensors, peer, tag)
    for tensors in ([], [one, one], [sparse], [meta]):
        wrong("send", tensors, other, 0)
        wrong("recv", tensors, other, 0)
    wrong("recv", [one], -1, 0)
    return calls


def _mistakes(checks: Checks) -> None:
    backend = checks.group._get_backend(torch.device("cpu"))
    one = torch.ones(2)
    for method, call in _wrong_calls(backend, checks.rank, checks.size, one):
        try:
            call()
            checks.wrong.append(f"{method} was not refused")
        except (ValueError, TypeError) as error:
            name = method.replace("_", "").replace("base", "").replace("coalesced", "")
            text = str(error).replace("_", "")
            if name not in text or "incompatible function arguments" in text:
                checks.wrong.append(f"{method}: {error}")
    with pytest.raises(ValueError, match="bytes"):
        all_gather_flat(torch.ones(2 * checks.size), torch.ones(3), group=checks.group)
    checks.same(one, torch.ones(2), "a tensor of refused calls")
    checks.all_reduce(5, torch.float32, "SUM")  # the group is as good as before


def test_asynchrony_coalescing_views_tags_and_futures() -> None:
    assert in_world(the_rest, 3, timeout=100) == [[]] * 3


# ---- Random sequences of operations on random subgroups ----

REDUCTIONS = [
    (str(dtype).removeprefix("torch."), op)
    for dtype in (*FLOATS, *INTS, torch.bool, torch.complex64)
    for op in OPS
    if valid(dtype, op)
]
WHAT = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter"),
    *("all_to_all", "all_to_all_uneven", "ring", "barrier", "in flight"),
)
STEP = st.tuples(
    st.integers(0, 5),  # which subgroup
    st.sampled_from(WHAT),
    st.sampled_from([0, 1, 3, 5, 63, 65, 1000, 4097, 40001]),
    st.sampled_from(REDUCTIONS),
    st.integers(0, 3),  # the root
)
SUBGROUP = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
PLAN = st.tuples(
    st.lists(SUBGROUP, min_size=2, max_size=4), st.lists(STEP, min_size=20, max_size=60)
)

Step = tuple[int, str, int, tuple[str, str], int]
Late = list[tuple[Any, Any, Any, Checks]]


def generated_plans(count: int) -> list[Any]:
    """Cases are collected first and run in one world, because starting a world takes seconds."""
    plans: list[Any] = []

    @settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(PLAN)
    def collect(plan: Any) -> None:
        plans.append(plan)

    collect()
    return plans


def run_plans(world: Any, plans: list[Any]) -> list[str]:
    wrong: list[str] = []
    for subgroups, steps in plans:
        found = run_plan(world, subgroups, steps)
        if found:
            wrong.append(f"{found[:3]} in {subgroups} {steps}")
    return wrong[:3]


def run_plan(world: Any, subgroups: list[list[int]], steps: list[Step]) -> list[str]:
    made = [group_of(ranks) for ranks in subgroups]
    checks = [
        Checks(group) if world.rank in ranks else None
        for group, ranks in zip(made, subgroups, strict=True)
    ]
    late: Late = []
    for which, *step in steps:
        check = checks[which % len(checks)]
        if check is not None:
            _take(check, late, *step)
    for work, tensor, expected, check in late:
        work.wait()
        check.same(tensor, expected, "in flight")
    local = [check for check in checks if check is not None]
    for check in local:
        dist.barrier(check.group)
        dist.destroy_process_group(check.group)
    return [text for check in local for text in check.wrong]


def _take(
    check: Checks, late: Late, what: str, count: int, reduction: tuple[str, str], root: int
) -> None:
    dtype, op = getattr(torch, reduction[0]), reduction[1]
    root %= check.size
    if what == "barrier":
        dist.barrier(check.group)
    elif what == "in flight":
        parts = check.inputs(count, dtype)
        tensor = parts[check.rank].clone()
        reduce_op = getattr(dist.ReduceOp, op)
        work = dist.all_reduce(tensor, reduce_op, group=check.group, async_op=True)
        late.append((work, tensor, reduced(parts, op), check))
    elif what in ("all_reduce", "reduce_scatter"):
        getattr(check, what)(count, dtype, op)
    elif what == "reduce":
        check.reduce(count, dtype, op, root)
    elif what in ("broadcast", "gather", "scatter"):
        getattr(check, what)(count, dtype, root)
    else:
        getattr(check, what)(count, dtype)


def test_random_sequences_on_random_subgroups_are_exact() -> None:
    plans = generated_plans(25)
    assert len(plans) > 10
    assert in_world(run_plans, 4, plans, timeout=100) == [[]] * 4


# ---- Long and crowded ----

SOAK = 100_000


def soak(world: Any) -> int:
    exact = 0
    group = group_of()
    tensor = torch.zeros(16)
    for _ in range(SOAK):
        tensor.fill_(1.0)
        dist.all_reduce(tensor, group=group)
        exact += bool(tensor[7] == world.size)
    return exact


def test_a_hundred_thousand_small_operations() -> None:
    assert in_world(soak, 2, timeout=110) == [SOAK] * 2


def crowded(world: Any) -> list[str]:
    checks = Checks(group_of())
    for count in (1, 1025, 100_001):
        for _ in range(3):
            checks.all_reduce(count, torch.float32, "SUM")
        checks.move_everything(count, torch.float32, 0)
    return checks.wrong


def test_four_times_as_many_ranks_as_cores() -> None:
    import os

    ranks = min(16, 4 * (os.cpu_count() or 1))
    assert in_world(crowded, ranks, timeout=110) == [[]] * ranks
