"""tutti bench pairs: sides alternate, results are compared, unmet requirements are reported."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.bench.pairs import BUILTIN_PAIRS
from tutti.bench.pairs.paired_runs import difference, snapshot
from worlds import TUTTI, run_command, run_tutti

PAIRS = ["bench", "pairs"]
KEYS = {"name", "baseline_ms", "optimized_ms", "speedup", "spread", "check"}
ON_CPU = {
    *("overlap", "grouped", "buckets", "from-scratch", "shm", "symmetric", "accumulation"),
    "bf16-gradients",
}

OWN = '''
"""Pairs that exercise the harness."""
import torch
import torch.distributed as dist
from tutti.bench.pairs import Pair, Setting, Unsupported

turns = []

def takes_turns(setting: Setting) -> Pair:
    """in turns → in turns

    Further lines are not listed.
    """
    def side(name):
        turns.append(name)
        return torch.ones(3)
    return Pair(lambda: side("b"), lambda: side("o"), reason="counted")

def shows_turns(setting):
    """what the last pair did → the same"""
    return Pair(lambda: 0, lambda: 0, reason="".join(turns))

def differs(setting):
    # Different on one rank only.
    wrong = torch.ones(4)
    wrong[2] += 0.25 * (setting.world.rank == 1)
    return Pair(lambda: {"a": torch.ones(4)}, lambda: {"a": wrong}, tolerance=0.1)

def near_enough(setting):
    return Pair(lambda: torch.ones(4), lambda: torch.ones(4) * 1.05, tolerance=0.1)

def wrong_later(setting):
    calls = []
    def lazy():
        calls.append(1)
        return torch.tensor(1.0 if len(calls) < 5 else 2.0)
    return Pair(lambda: torch.tensor(1.0), lazy)

def fails(setting):
    def fail():
        raise RuntimeError("it broke\\nhere")
    return Pair(fail, fail)

def fails_on_one_rank(setting):
    def fail():
        if setting.world.rank == 1:
            raise KeyError("only here")
        dist.all_reduce(torch.ones(1))
    return Pair(fail, fail)

def returns_nothing(setting):
    return Pair(lambda: None, lambda: None)

def needs_more(setting):
    setting.need(setting.world.rank == 0, "only rank 0 has it")
    raise AssertionError("not reached")

PAIRS = [takes_turns, shows_turns, differs, near_enough, wrong_later]
PAIRS += [fails, fails_on_one_rank, returns_nothing, needs_more]
'''


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield all built-in pairs and the pairs in OWN, measured in one world."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "own.py").write_text(OWN)
    own = "takes-turns,shows-turns,differs,near-enough,wrong-later,fails,fails-on-one-rank,"
    own += "returns-nothing,needs-more"
    flags = ["--quick", "--budget", "0.2", "--rounds", "6", "--json", folder / "p.json"]
    names = ["--only", ",".join([*BUILTIN_PAIRS, own]), "--file", folder / "own.py"]
    done = run_tutti(*PAIRS, "--ranks", "2", "--device", "cpu", *flags, *names, timeout=110)
    content = json.loads((folder / "p.json").read_text()) if done.returncode == 1 else {}
    rows = {row["name"]: row for row in content.get("rows", [])}
    yield {"done": done, "content": content, "rows": rows}


def test_list_shows_the_builtin_pairs_or_those_of_a_file(tmp_path: Path) -> None:
    done = run_tutti(*PAIRS, "--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(BUILTIN_PAIRS)
    assert len(BUILTIN_PAIRS) == 12 and done.stdout.count("→") == 12
    (tmp_path / "own.py").write_text(OWN)
    done = run_tutti(*PAIRS, "--list", "--file", tmp_path / "own.py")
    assert done.stdout.splitlines()[0].split(maxsplit=1) == ["takes-turns", "in turns → in turns"]
    (tmp_path / "none.py").write_text("PAIRS = 1")
    done = run_tutti(*PAIRS, "--file", tmp_path / "none.py")
    assert done.returncode == 2 and "must define PAIRS = [function, …]" in done.stderr


def test_every_builtin_pair_gives_equal_results_or_the_reason_it_is_skipped(measured: Any) -> None:
    content, rows = measured["content"], measured["rows"]
    assert content, measured["done"].stdout + measured["done"].stderr
    assert content["schema"] == "tutti.bench.pairs/1" and content["complete"]
    assert content["environment"]["versions"]["torch"] and "--quick" in content["command"]
    assert [name for name in rows if name in BUILTIN_PAIRS] == list(BUILTIN_PAIRS)
    for name in BUILTIN_PAIRS:
        row = rows[name]
        assert row.keys() >= KEYS
        if name not in ON_CPU and name != "placement":
            assert row["check"].startswith("skipped: ") and "GPU" in row["check"], row
        if name in ON_CPU:
            assert row["check"] == "equal" or row["check"].startswith("error"), row
            assert row["baseline_ms"] > 0 and row["optimized_ms"] > 0
            assert row["spread"]["p25"] <= row["speedup"] <= row["spread"]["p75"]
    for name in ("overlap", "grouped", "buckets", "from-scratch", "shm", "symmetric"):
        assert rows[name]["check"] == "equal"  # bit by bit, with two ranks


def test_sides_alternate_and_the_first_side_changes(measured: Any) -> None:
    order = measured["rows"]["shows-turns"]["note"]
    # One call each for the check and for the estimate of its time; then six rounds; then the check.
    assert order.startswith("bobo") and order.endswith("bo")
    turns = [side for side, before in zip(order, " " + order, strict=False) if side != before]
    # b o | o b | b o …: the side that ends a round begins the next one, and the side that ends
    # the last round begins the check.
    assert len(turns) == 4 + 7 + 1 and measured["rows"]["takes-turns"]["rounds"] == 6


def test_a_difference_on_any_rank_is_reported_and_fails_the_run(measured: Any) -> None:
    done, rows = measured["done"], measured["rows"]
    assert done.returncode == 1
    assert rows["differs"]["check"] == "different: error 0.25 exceeds the tolerance 0.1"
    assert rows["differs"]["speedup"] is None  # a side with another result has no speed-up
    assert rows["near-enough"]["check"] == "error 0.05 (tolerance 0.1)"
    # The second check finds this difference.
    assert rows["wrong-later"]["check"] == "different: error 1 exceeds the tolerance 0"
    assert rows["fails"]["check"] == "failed: RuntimeError: it broke"
    assert rows["fails-on-one-rank"]["check"] == "failed: rank 1: KeyError: 'only here'"
    assert "must return tensors" in rows["returns-nothing"]["check"]
    assert rows["needs-more"]["check"] == "skipped: only rank 0 has it"
    assert "# results of 5 pairs differ: FAILED" in done.stdout


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.ones(3), torch.ones(3), 0.0),
        ([torch.tensor([4.0, 1.0]), 2], [torch.tensor([4.0, 2.0]), 2], 0.25),
        (torch.ones(3), torch.ones(4), float("inf")),
        (torch.ones(2), [torch.ones(2)], float("inf")),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), float("inf")),
        (torch.zeros(2), torch.tensor([0.0, 1e-9]), float("inf")),
        (torch.empty(0), torch.empty(0), 0.0),
    ],
)
def test_relative_difference_of_results(one: Any, other: Any, expected: float) -> None:
    assert difference(snapshot(one), snapshot(other)) == expected


@pytest.mark.gpu
def test_gpu_pairs_give_equal_results(tmp_path: Path) -> None:
    flags = ["--device", "cuda", "--ranks", "2", "--ranks-per-gpu", "2", "--quick"]
    done = run_command(
        [*TUTTI, *PAIRS, *flags, "--budget", "1", "--json", tmp_path / "p.json"],
        timeout=110,
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "p.json").read_text())["rows"]}
    for name in ("overlap", "grouped", "buckets", "from-scratch", "pinned", "symmetric", "unified"):
        assert rows[name]["check"] == "equal", rows[name]
