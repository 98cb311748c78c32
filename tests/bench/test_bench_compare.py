"""tutti bench compare: differences beyond the spread, and differences of the environment."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_results import operation, result

from tutti.bench.compare_results import compare, environment_differences
from tutti.cli import run_cli
from tutti.world.errors import UsageError


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [change.verdict for change in compare(old, new)]


def test_only_differences_beyond_the_spread_count() -> None:
    old = result("collectives", rows=[operation(1 << n, 100.0) for n in range(10, 16)])
    times = [100.0, 103.0, 140.0, 70.0, 100.0]
    rows = [operation(1 << n, p50) for n, p50 in enumerate(times, 10)]
    rows += [operation(1 << 20, 5.0)]
    rows[4]["wrong"] = 3
    new = result("collectives", rows=rows)
    assert verdicts(old, new) == ["same", "same", "slower", "faster", "wrong", "new", "gone"]
    noisy = result("collectives", rows=[operation(1 << n, p50, cv=0.3) for n, p50 in
                                        enumerate(times[:4], 10)])  # fmt: skip
    assert set(verdicts(old, noisy)) == {"same", "gone"}, "40 % is within the spread if σ is 30 %"


def test_a_ratio_above_1_means_faster_for_speeds_and_for_times() -> None:
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


def test_results_of_bench_pairs_are_compared_by_their_speed_up() -> None:
    quartiles = {"p25": 1.95, "p75": 2.05}
    row = {"name": "overlap", "speedup": 2.0, "spread": quartiles, "check": "equal"}
    other = {"name": "pinned", "speedup": None, "spread": None, "check": "skipped: no GPU"}
    slower = row | {"speedup": 1.2}
    old, new = result("pairs", rows=[row, row, other]), result("pairs", rows=[row, slower, other])
    assert verdicts(old, new) == ["same", "slower"], (
        "rows with equal keys are matched by their order"
    )
    new["rows"] = [row | {"check": "different: 3 elements"}]
    assert verdicts(old, new) == ["wrong", "gone"]


def test_rows_without_a_group_field_match_group_1() -> None:
    old = result("collectives", rows=[operation(8, 1.0)])
    new = result("collectives", rows=[operation(8, 1.0, group=1), operation(8, 1.0, group=4)])
    assert verdicts(old, new) == ["same", "new"]


def test_environment_differences_are_listed() -> None:
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


def test_the_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = result("collectives", rows=[operation(1024, 100.0), operation(2048, 100.0)])
    new = result("collectives", rows=[operation(1024, 200.0), operation(2048, 101.0)])
    new["environment"]["host"] = "b"
    files = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    for file, content in zip(files, (old, new), strict=True):
        Path(file).write_text(json.dumps(content))
    command = ["bench", "compare", *files]
    assert run_cli([*command, "--json", str(tmp_path / "c.json")]) == 0
    output = capsys.readouterr()
    assert "slower" in output.out and "bytes 1024" in output.out and "bytes 2048" not in output.out
    assert (
        "# 1 slower, 1 same" in output.out and "the environment differs (host: a → b)" in output.err
    )
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["schema"] == "tutti.bench.compare/1"
    assert [row["verdict"] for row in content["rows"]] == ["slower", "same"]
    assert run_cli([*command, "--fail-on", "slower"]) == 1
    assert run_cli([*command[:2], files[0], files[0], "--fail-on", "slower"]) == 0
    assert run_cli([*command, "--tolerance", "5"]) == 2
    # A comparison without common rows fails.
    Path(files[1]).write_text(json.dumps(result("collectives", rows=[operation(4096, 1.0)])))
    assert run_cli([*command, "--fail-on", "slower"]) == 2
    assert "no row in common (2 in OLD alone, 1 in NEW alone)" in capsys.readouterr().err


def test_files_that_are_not_results_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.json"
    for content in (
        "no json",
        '{"schema": "tutti.world/1"}',
        '{"schema": "tutti.bench.pairs/99"}',
        "[]",
    ):
        other.write_text(content)
        assert run_cli(["bench", "compare", str(other), str(other)]) == 2
    with pytest.raises(UsageError, match="give two results of the same bench"):
        compare(result("collectives", rows=[]), result("symmetric", rows=[]))
