"""Every contender does every operation right, on odd numbers of ranks and elements, too."""

from typing import Any

import pytest

from worlds import in_world

_NAMES = ["gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"]


def _measure(world: Any, names: list[str]) -> Any:
    import torch

    from tutti.bench.case import Case
    from tutti.bench.contenders import contenders
    from tutti.bench.control import Control
    from tutti.bench.grouped_calls import with_groups
    from tutti.bench.sweep import Plan, Sweep
    from tutti.measure.bus_bandwidth import OPERATIONS

    lines = [
        [
            Case(operation, count, dtype, placement, world.rank, world.size)
            for placement in operation.placements
        ]
        for operation in OPERATIONS.values()
        for dtype, counts in ((torch.float32, (1, 1025)), (torch.bfloat16, (77,)))
        for count in (counts if operation.name != "barrier" else (0,))
    ]
    largest = max(case.bytes for line in lines for case in line)
    with contenders(names, world, largest) as (found, missing):
        found = with_groups(found, 3, world.device)
        sweep = Sweep(found, Plan(budget=0.001, warmup=1, rounds=2), Control(), world.device)
        sweep.run(lines, lambda rows: None)
    return {
        "measured": [
            [row["backend"], row["op"], row["placement"], row["dtype"], row["bytes"]]
            for row in sweep.rows
        ],
        "wrong": [row for row in sweep.rows if row["wrong"]],
        "groups": {row["backend"]: row["group"] for row in sweep.rows},
        "skipped": sweep.skipped,
        "missing": missing,
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_contenders_are_right(ranks: int) -> None:
    first, *_ = in_world(_measure, ranks, _NAMES, timeout=110)
    assert first["missing"] == [] and first["wrong"] == []
    measured = {(backend, op) for backend, op, *_ in first["measured"]}
    every = {op for backend, op in measured if backend == "gloo"}
    assert len(every) == 12
    for name in ("shm", "symmetric"):
        assert {op for backend, op in measured if backend == name} == every, name
    for name in ("one-shot", "two-shot", "ring"):
        assert {op for backend, op in measured if backend == name} == {"all_reduce"}
    # Groups take what comm.group() collects, and only torch's backends are grouped.
    grouped = {"gloo x3", "shm x3"}
    assert {name for name, times in first["groups"].items() if times == 3} == grouped
    alone = {"all_gather_uneven", "all_to_all_uneven", "barrier"}
    for name in grouped:
        assert {op for backend, op in measured if backend == name} == every - alone
    # What is left out says why, and only what has no such form is left out.
    left_out = {(each["backend"], each["op"]) for each in first["skipped"]}
    assert {name for name, _ in left_out} <= grouped | {"one-shot", "two-shot", "ring"}
