"""The sweep in a real world: rows are complete, turns are taken, and lies are counted."""

from typing import Any

from worlds import in_world

_KEYS = {
    *("op", "backend", "ranks", "bytes", "count", "dtype", "placement", "time_us", "algbw_gbs"),
    *("busbw_gbs", "wrong"),
}


def _measure(world: Any) -> Any:
    from tutti.bench.contenders import contenders

    with contenders(["gloo", "nccl"], world, largest=2400) as ((gloo,), missing):
        return _measured(world, gloo, missing)


def _measured(world: Any, gloo: Any, missing: Any) -> Any:
    import torch

    from tutti.bench.attempt import Unsupported
    from tutti.bench.case import Case, Prepared
    from tutti.bench.control import Control
    from tutti.bench.sweep import Plan, Sweep
    from tutti.measure.bus_bandwidth import OPERATIONS

    calls: list[str] = []

    class Liar:
        name = "liar"
        about = ""

        def prepare(self, case: Case) -> Prepared:
            if case.operation.name == "barrier":
                raise Unsupported("liars do not wait")
            honest = gloo.prepare(case)

            def call() -> None:
                calls.append("liar")
                honest.call()
                if world.rank == 1 and honest.received.numel() > 2:
                    honest.received[2] += 1

            return Prepared(honest.sent, honest.received, call)

    class Lazy:
        """Right the first time, and then never again: as a result that is left over would look."""

        name = "lazy"
        about = ""

        def prepare(self, case: Case) -> Prepared:
            honest = gloo.prepare(case)
            done = []

            def call() -> None:
                calls.append("lazy")
                if not done:
                    honest.call()
                    done.append(True)

            return Prepared(honest.sent, honest.received, call)

    def cases(op: str, counts: list[int]) -> list[list[Case]]:
        operation = OPERATIONS[op]
        return [
            [
                Case(operation, count, torch.float32, placement, world.rank, world.size)
                for placement in operation.placements
            ]
            for count in counts
        ]

    lines = [line for op in OPERATIONS for line in cases(op, [0] if op == "barrier" else [1, 300])]
    plan = Plan(timings=("back-to-back", "isolated"), budget=0.002, warmup=2, rounds=2)
    control = Control()
    sweep = Sweep([gloo], plan, control, world.device)
    sweep.run(lines, lambda rows: None)

    lies = Sweep([gloo, Liar(), Lazy()], Plan(budget=0.002), control, world.device)
    lies.run([*cases("all_reduce", [8]), *cases("barrier", [0])], lambda rows: None)
    return {
        "rows": sweep.rows,
        "skipped": sweep.skipped,
        "missing": missing,
        "lies": lies.rows,
        "lies_skipped": lies.skipped,
        "turns": calls,
    }


def test_every_operation_is_measured_and_right_and_a_lie_is_counted() -> None:
    first, second = in_world(_measure, 2)
    rows = first["rows"]
    assert [row["wrong"] for row in rows] == [0] * len(rows)
    # twelve operations, most of them in both placements and at two counts, each timed in two ways
    assert len(rows) == 2 * (2 * 7 * 2 + 4 * 2 + 1) and not first["skipped"]
    for row in rows:
        assert row.keys() >= _KEYS
        assert row["time_us"].keys() >= {"p50", "p95", "min", "mean", "cv"}
        assert 0 < row["time_us"]["min"] <= row["time_us"]["p50"] <= row["time_us"]["p95"]
    assert first["missing"][0]["backend"] == "nccl" and "--device cuda" in str(first["missing"])
    # all ranks come to the same figures: each call counts as its slowest rank saw it
    assert rows == second["rows"]

    by_name: dict[str, list[int]] = {}
    for row in first["lies"]:
        by_name.setdefault(row["backend"], []).append(row["wrong"])
    assert by_name["gloo"] == [0, 0, 0]
    # one element on one of two ranks, in the call before the timed ones and in the one after
    assert by_name["liar"] == [2, 2]
    # what was right the first time only is all wrong after the timed calls, on both ranks
    assert by_name["lazy"] == [16, 16, 0]
    assert [each["reason"] for each in first["lies_skipped"]] == ["liars do not wait"]


def test_contenders_take_turns() -> None:
    (one,) = in_world(_turns, 1)
    # Warm-up one after the other, then rounds: in each the other one begins.
    rounds = [name for position, name in enumerate(one) if one[position - 1 : position] != [name]]
    assert rounds[:2] == ["a", "b"] and len(rounds) >= 10
    assert rounds.count("a") >= 5 and rounds.count("b") >= 5


def _turns(world: Any) -> Any:
    import torch

    from tutti.bench.case import Case, Prepared
    from tutti.bench.control import Control
    from tutti.bench.sweep import Plan, Sweep
    from tutti.measure.bus_bandwidth import OPERATIONS

    called: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name, self.about = name, ""

        def prepare(self, case: Case) -> Prepared:
            nothing = torch.empty(0)
            return Prepared(nothing, nothing, lambda: called.append(self.name))

    case = Case(OPERATIONS["barrier"], 0, torch.float32, "out", 0, 1)
    plan = Plan(iterations=16, warmup=1)
    Sweep([Named("a"), Named("b")], plan, Control(), world.device).run([[case]], lambda rows: None)
    return called
