"""tutti bench compare and --expect: what changed beyond the spread, and what missed its mark."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.compare_results import compare, environment_differences
from tutti.bench.expectations import (
    Expectation,
    baseline_differences,
    read_expectation,
    unmet_expectations,
)
from tutti.cli import run
from tutti.world.errors import UsageError

ENVIRONMENT = {
    "host": "a", "system": "Linux", "cpu": "x", "cpus": "0-1", "cpu_quota": None,
    "memory_bytes": 1, "gpus": [], "versions": {"torch": "2.13"}, "variables": {},
}  # fmt: skip


def operation(size: int, p50: float, cv: float = 0.02, **changes: Any) -> dict[str, Any]:
    times = {"p50": p50, "p95": p50 * (1 + 2 * cv), "min": p50 * (1 - 2 * cv), "cv": cv}
    return {
        "op": "all_reduce", "backend": "nccl", "ranks": 8, "bytes": size, "dtype": "float32",
        "redop": "sum", "placement": "in", "timing": "back-to-back", "time_us": times,
        "busbw_gbs": size / p50 / 1e3, "wrong": 0,
    } | changes  # fmt: skip


def result(kind: str, **parts: Any) -> dict[str, Any]:
    world = {"size": 2, "ranks": [{"device": "cpu", "node": 0, "ranks_on_device": 1}]}
    return {
        "schema": f"tutti.bench.{kind}/1",
        "environment": copy.deepcopy(ENVIRONMENT),
        "complete": True,
        "world": world,
    } | parts


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [change.verdict for change in compare(old, new)]


def test_only_what_is_beyond_the_spread_has_changed() -> None:
    old = result("collectives", rows=[operation(1 << n, 100.0) for n in range(10, 16)])
    times = [100.0, 103.0, 140.0, 70.0, 100.0]
    rows = [operation(1 << n, p50) for n, p50 in enumerate(times, 10)]
    rows += [operation(1 << 20, 5.0)]
    rows[4]["wrong"] = 3
    new = result("collectives", rows=rows)
    assert verdicts(old, new) == ["same", "same", "slower", "faster", "wrong", "new", "gone"]
    noisy = result("collectives", rows=[operation(1 << n, p50, cv=0.3) for n, p50 in
                                        enumerate(times[:4], 10)])  # fmt: skip
    assert set(verdicts(old, noisy)) == {"same", "gone"}, "40 % is little where σ is 30 %"


def test_ratios_are_of_speeds_whatever_the_unit() -> None:
    pair = {
        "src": 0, "dst": 1, "class": "other host", "backend": "gloo", "bytes": 1, "gbs_uni": 1.0,
        "gbs_bi": 2.0, "spread": 0.01, "wrong": 0,
    }  # fmt: skip
    old = result("bandwidth", pairs=[pair])
    new = result("bandwidth", pairs=[pair | {"gbs_uni": 2.0, "gbs_bi": 1.0}])
    one_way, both = compare(old, new)
    assert (one_way.ratio, one_way.verdict) == (2.0, "faster")
    assert (both.ratio, both.verdict) == (0.5, "slower")
    times = {"p50_us": 2.0, "p99_us": 2.1, "min_us": 1.9, "wrong": 0}
    row = {"name": "put", "backend": "shm", "bytes": 8} | times
    (change,) = compare(
        result("symmetric", rows=[row]), result("symmetric", rows=[row | {"p50_us": 1.0}])
    )
    assert (change.ratio, change.verdict) == (2.0, "faster")


def test_pairs_of_baseline_and_optimized_are_compared_by_their_speed_up() -> None:
    quartiles = {"p25": 1.95, "p75": 2.05}
    row = {"name": "overlap", "speedup": 2.0, "spread": quartiles, "check": "equal"}
    other = {"name": "pinned", "speedup": None, "spread": None, "check": "skipped: no GPU"}
    slower = row | {"speedup": 1.2}
    old, new = result("pairs", rows=[row, row, other]), result("pairs", rows=[row, slower, other])
    assert verdicts(old, new) == ["same", "slower"], "rows that nothing tells apart go by order"
    new["rows"] = [row | {"check": "different: 3 elements"}]
    assert verdicts(old, new) == ["wrong", "gone"]


def test_results_without_groups_are_those_of_one_operation_at_a_time() -> None:
    old = result("collectives", rows=[operation(8, 1.0)])
    new = result("collectives", rows=[operation(8, 1.0, group=1), operation(8, 1.0, group=4)])
    assert verdicts(old, new) == ["same", "new"]


def test_another_machine_is_told() -> None:
    old, new = result("collectives", rows=[]), result("collectives", rows=[], complete=False)
    new["environment"] |= {"host": "b", "gpus": [{"name": "NVIDIA H200"}] * 2}
    new["environment"]["versions"] = {"torch": "2.12"}
    new["environment"]["variables"] = {"TUTTI_RUN_ID": "other each time", "NCCL_ALGO": "ring"}
    assert environment_differences(old, new) == [
        "host: a → b",
        "gpus: none → 2 × NVIDIA H200",
        "torch: 2.13 → 2.12",
        "NCCL_ALGO: none → ring",
        "the new result was interrupted",
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = result("collectives", rows=[operation(1024, 100.0), operation(2048, 100.0)])
    new = result("collectives", rows=[operation(1024, 200.0), operation(2048, 101.0)])
    new["environment"]["host"] = "b"
    files = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    for file, content in zip(files, (old, new), strict=True):
        Path(file).write_text(json.dumps(content))
    command = ["bench", "compare", *files]
    assert run([*command, "--json", str(tmp_path / "c.json")]) == 0
    said = capsys.readouterr()
    assert "slower" in said.out and "bytes 1024" in said.out and "bytes 2048" not in said.out
    assert "# 1 slower, 1 same" in said.out and "other environment: host: a → b" in said.err
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["schema"] == "tutti.bench.compare/1"
    assert [row["verdict"] for row in content["rows"]] == ["slower", "same"]
    assert run([*command, "--fail-on", "slower"]) == 1
    assert run([*command[:2], files[0], files[0], "--fail-on", "slower"]) == 0
    assert run([*command, "--tolerance", "5"]) == 2
    # Nothing to compare is no pass.
    Path(files[1]).write_text(json.dumps(result("collectives", rows=[operation(4096, 1.0)])))
    assert run([*command, "--fail-on", "slower"]) == 2
    assert "no row in common (2 in OLD alone, 1 in NEW alone)" in capsys.readouterr().err


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.json"
    for content in ("no json", '{"schema": "tutti.world/1"}', "[]"):
        other.write_text(content)
        assert run(["bench", "compare", str(other), str(other)]) == 2
    with pytest.raises(UsageError, match="give two results of the same bench"):
        compare(result("collectives", rows=[]), result("symmetric", rows=[]))


# ---- --expect ----


def thresholds(tmp_path: Path, text: str) -> Expectation:
    (tmp_path / "t.toml").write_text(text)
    return read_expectation(str(tmp_path / "t.toml"), "collectives")


MEASURED = result("collectives", rows=[operation(1 << 20, 100.0), operation(1 << 26, 1000.0)])


def test_thresholds_are_held_against_the_rows_they_name(tmp_path: Path) -> None:
    rule = '[[expect]]\nop = "all_reduce"\nbytes = "64M"\n'
    assert (
        unmet_expectations(MEASURED, thresholds(tmp_path, rule + "busbw_gbs = { min = 60 }")) == []
    )
    (miss,) = unmet_expectations(
        MEASURED, thresholds(tmp_path, rule + '"time_us.p50" = { max = 900 }')
    )
    assert str(miss) == (
        "op all_reduce, backend nccl, bytes 67108864: time_us.p50 is 1000, "
        "expected time_us.p50 at most 900"
    )
    every = '[[expect]]\nbackend = ["nccl", "gloo"]\nbytes = { min = "1M" }\nwrong = { max = 0 }'
    assert unmet_expectations(MEASURED, thresholds(tmp_path, every)) == []
    (miss,) = unmet_expectations(MEASURED, thresholds(tmp_path, every.replace("nccl", "mpi")))
    assert "nothing was checked" in str(miss)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expect = 3", r"a list of \[\[expect\]\] tables"),
        ('[[expect]]\nop = "all_reduce"', "rule 1: it has no bound"),
        ("[[expect]]\nbusbw_gbs = { least = 3 }", "a bound has min, max or both"),
        ("[[expect", "not TOML"),
    ],
)
def test_a_file_of_thresholds_that_cannot_be_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        thresholds(tmp_path, text)


def test_a_baseline_allows_for_its_spread(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(MEASURED))
    source = read_expectation(str(tmp_path / "b.json"), "collectives")
    slower = result("collectives", rows=[operation(1 << 20, 103.0), operation(1 << 26, 1500.0)])
    assert (
        unmet_expectations(MEASURED, source) == [] and baseline_differences(MEASURED, source) == []
    )
    (miss,) = unmet_expectations(slower, source)
    assert "bytes 67108864" in miss.what and miss.expected == "1000 within 6 %"
    with pytest.raises(UsageError, match="it has no row in common with this run"):
        unmet_expectations(result("collectives", rows=[operation(8, 1.0)]), source)


def test_the_catalogue_is_for_what_it_knows() -> None:
    on_gpus = [{"device": f"cuda:{n}", "node": 0, "ranks_on_device": 1} for n in range(8)]
    known = copy.deepcopy(MEASURED)
    known["world"]["ranks"] = on_gpus
    known["environment"]["gpus"] = [{"name": "NVIDIA H200"}] * 8
    known["rows"] = [operation(1 << 28, 700.0, busbw_gbs=400.0)]
    assert unmet_expectations(known, Expectation("catalogue")) == []
    known["rows"] = [operation(1 << 28, 700.0, busbw_gbs=300.0), operation(8, 1.0, busbw_gbs=0.1)]
    (miss,) = unmet_expectations(known, Expectation("catalogue"))
    assert miss.observed == "busbw is 300 GB/s" and "0.8 × 432 GB/s (Azure" in miss.expected
    for change in ({"node": 1}, {"ranks_on_device": 2}):
        other = copy.deepcopy(known)
        other["world"]["ranks"][7] |= change
        with pytest.raises(UsageError, match="has no figure for this run"):
            unmet_expectations(other, Expectation("catalogue"))
    with pytest.raises(UsageError, match="on this machine: give an earlier result"):
        unmet_expectations(MEASURED, Expectation("catalogue"))
