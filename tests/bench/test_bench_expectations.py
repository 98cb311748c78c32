"""--expect: invalid expectations are refused before measuring; results are checked."""

import copy
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from bench_results import operation, result

from tutti.bench.bandwidth.link_verdicts import VERDICTS
from tutti.bench.collectives.cases import DTYPES
from tutti.bench.expectations import (
    ALLOWED_VALUES,
    FIELDS,
    Expectation,
    baseline_differences,
    read_expectation,
    unmet_expectations,
)
from tutti.cli.bench_collectives import Collectives
from tutti.world.errors import UsageError
from worlds import run_tutti

# A run that measured anything with these flags would take hours.
LONG = ["--budget", "1000", "--device", "cpu"]


@pytest.mark.parametrize(
    ("bench", "rule", "message"),
    [
        ("collectives", "busbw_gb = { min = 3 }", "'busbw_gb': did you mean busbw_gbs?"),
        ("collectives", "time_us = { max = 3 }", "'time_us': did you mean time_us."),
        ("collectives", '"time_us.p05" = { max = 3 }', "'time_us.p05': did you mean time_us.p95?"),
        ("collectives", "time_us.p05 = { max = 3 }", "'time_us.p05': did you mean time_us.p95?"),
        ("collectives", "gbs_uni = { min = 3 }", "bench collectives has no 'gbs_uni'"),
        ("collectives", 'op = "all_redcue"', "no op 'all_redcue': did you mean all_reduce?"),
        ("collectives", 'op = ["all_reduce", 3]', "op = all_reduce or 3 must be a string"),
        ("collectives", 'backend = "goo x16"', "no backend 'goo x16': did you mean gloo?"),
        ("collectives", 'dtype = "float23"', "no dtype 'float23': did you mean float32?"),
        ("collectives", 'bytes = "64Q"', "bytes = '64Q' is not a number. Write 64M or 1024"),
        ("collectives", 'bytes = { min = "x" }', "bytes.min = 'x' is not a number"),
        ("collectives", 'ranks = "two"', "ranks = 'two' is not a number. Write a number"),
        ("collectives", 'algbw_gbs = { min = "3" }', "algbw_gbs.min = '3' is not a number"),
        ("collectives", "algbw_gbs = { min = true }", "algbw_gbs.min = True is not a number"),
        ("collectives", "algbw_gbs = { min = nan }", "algbw_gbs.min = nan is not a number"),
        ("collectives", "algbw_gbs = 3", "not a bound. Give one, such as algbw_gbs = { min = 3 }"),
        ("collectives", "wrong = 0", "not a bound. Give one, such as wrong = { max = 0 }"),
        ("collectives", "wrong = { least = 3 }", "must have min, max or both"),
        ("collectives", "wrong = { min = 3, max = 2 }", "no value is at least 3 and at most 2"),
        ("bandwidth", 'part = "pears"', "no part 'pears': did you mean pairs?"),
        ("bandwidth", 'class = "NVlink"', "no class 'NVlink': did you mean NVLink?"),
        ("bandwidth", 'part = "copies"\ngbs_uni = { min = 3 }', "gbs_uni is a field of pairs"),
        ("bandwidth", 'class = "PCIe"\nbusbw_gbs = { min = 3 }', "all_to_all and ring_vs_tree, "),
        ("pairs", 'name = "overlapp"', "no name 'overlapp': did you mean overlap?"),
        ("pairs", "speed_up = { min = 1 }", "'speed_up': did you mean speedup?"),
    ],
)
def test_a_rule_that_can_match_no_row_is_refused(
    tmp_path: Path, bench: str, rule: str, message: str
) -> None:
    file = tmp_path / "t.toml"
    good = {"collectives": "busbw_gbs", "bandwidth": "gbs", "pairs": "speedup"}[bench]
    further = "" if "gbs_uni" in rule or "busbw" in rule else f"{good} = {{ min = 1 }}\n"
    file.write_text(f"[[expect]]\n{good} = {{ min = 1 }}\n[[expect]]\n{rule}\n{further}")
    with pytest.raises(UsageError) as refused:
        read_expectation(str(file), bench, allowed={"name": ["overlap"]})
    error = str(refused.value)
    assert error.startswith(f"--expect {file}, rule 2: ") and message in error, error


@pytest.mark.parametrize("bench", ["collectives", "bandwidth", "pairs"])
def test_nothing_is_measured_with_an_invalid_expect(bench: str, tmp_path: Path) -> None:
    file, other = tmp_path / "t.toml", tmp_path / "symmetric.json"
    file.write_text("[[expect]]\nwrogn = { max = 0 }\n")
    other.write_text(json.dumps({"schema": "tutti.bench.symmetric/1", "rows": []}))
    cases = {str(file): f"--expect {file}, rule 1: bench {bench} has no 'wrogn'"}
    cases[str(other)] = f"--expect {other} is a result of bench symmetric, but this is bench"
    if bench != "bandwidth":  # bandwidth compares CPU links with each other
        cases["catalogue"] = "--expect catalogue"
    for text, message in cases.items():
        done = run_tutti("bench", bench, *LONG, "--expect", text)
        assert done.returncode == 2 and not done.stdout, done.stdout
        assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_baseline_without_common_rows_is_refused_before_measuring(tmp_path: Path) -> None:
    bench = ["bench", "collectives", "--backends", "gloo", "--device", "cpu"]
    then = ["--sizes", "1K", "--budget", "0.01", "--json", tmp_path / "then.json"]
    assert run_tutti(*bench, *then).returncode == 0
    now = ["--budget", "1000", "--expect", tmp_path / "then.json"]
    done = run_tutti(*bench, "--sizes", "4K", *now)
    assert done.returncode == 2 and not done.stdout
    assert "then.json has no row in common with this run" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    done = run_tutti(*bench, "--sizes", "1K,4K", "--budget", "0.01", *now[2:])
    assert done.returncode in (0, 1), done.stderr  # some rows are common: they may be slower

    row = {"name": "grouped", "speedup": 2.0, "spread": {"p25": 1.9, "p75": 2.1}}
    then = {"schema": "tutti.bench.pairs/1", "rows": [row], "world": {"size": 2}}
    (tmp_path / "then.json").write_text(json.dumps(then))
    done = run_tutti("bench", "pairs", "--only", "overlap", "--device", "cpu", *now)
    assert done.returncode == 2 and not done.stdout
    assert "then.json has no row in common with this run" in done.stderr


def test_fields_of_rules_are_the_fields_of_rows(tmp_path: Path) -> None:
    file, result = tmp_path / "t.toml", tmp_path / "r.json"
    file.write_text(
        "[[expect]]\nop = 'all_reduce'\nbytes = { max = '1K' }\nwrong = { max = 0 }\n"
        "time_us.p50 = { min = 1e-9 }\n"
    )
    short = ["--sizes", "1K", "--budget", "0.01", "--device", "cpu", "--json", result]
    done = run_tutti("bench", "collectives", "--backends", "gloo", *short, "--expect", file)
    assert done.returncode == 0 and f"--expect {file}: all expectations are met" in done.stdout
    rows = json.loads(result.read_text())["rows"]
    assert {_flat(row) for row in rows} == {frozenset(FIELDS["collectives"]["rows"])}

    done = run_tutti("bench", "bandwidth", "--backend", "gloo", *short)
    content = json.loads(result.read_text())
    for part, fields in FIELDS["bandwidth"].items():
        found = {_flat(row) - {"causes"} for row in content[part]}
        assert found == (set() if part == "copies" else {frozenset(fields)}), part

    only = ["--only", "grouped", "--quick", *short[2:]]
    done = run_tutti("bench", "pairs", *only)
    rows = json.loads(result.read_text())["rows"]
    assert {_flat(row) for row in rows} == {frozenset(FIELDS["pairs"]["rows"])}


def test_allowed_values_are_those_of_the_flags() -> None:
    words, flags = ALLOWED_VALUES["collectives"], get_type_hints(Collectives)
    assert [*words["dtype"]] == [*get_args(flags["dtype"])] and {*words["dtype"]} <= {*DTYPES}
    assert {*words["timing"]} == {*get_args(flags["timing"])} - {"both"}
    assert ALLOWED_VALUES["bandwidth"]["verdict"] == [*VERDICTS]


def _flat(row: dict[str, Any]) -> frozenset[str]:
    names = []
    for name, value in row.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]
    return frozenset(names)


# ---- --expect ----


def thresholds(tmp_path: Path, text: str) -> Expectation:
    (tmp_path / "t.toml").write_text(text)
    return read_expectation(str(tmp_path / "t.toml"), "collectives")


MEASURED = result("collectives", rows=[operation(1 << 20, 100.0), operation(1 << 26, 1000.0)])


def test_thresholds_apply_to_the_rows_they_select(tmp_path: Path) -> None:
    rule = '[[expect]]\nop = "all_reduce"\nbytes = "64M"\n'
    assert (
        unmet_expectations(MEASURED, thresholds(tmp_path, rule + "busbw_gbs = { min = 60 }")) == []
    )
    (miss,) = unmet_expectations(
        MEASURED, thresholds(tmp_path, rule + '"time_us.p50" = { max = 900 }')
    )
    assert miss.startswith("op all_reduce, backend nccl, bytes 67108864: time_us.p50 is 1000")
    assert miss.endswith("time_us.p50 at most 900")
    every = '[[expect]]\nbackend = ["nccl", "gloo"]\nbytes = { min = "1M" }\nwrong = { max = 0 }'
    assert unmet_expectations(MEASURED, thresholds(tmp_path, every)) == []
    (miss,) = unmet_expectations(MEASURED, thresholds(tmp_path, every.replace("nccl", "mpi")))
    assert "nothing was checked" in miss


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expect = 3", r"a list of \[\[expect\]\] tables"),
        ('[[expect]]\nop = "all_reduce"', "rule 1: the rule has no bound"),
        ("[[expect]]\nbusbw_gbs = { least = 3 }", "must have min, max or both"),
        ("[[expect", "not TOML"),
    ],
)
def test_an_invalid_file_of_thresholds_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        thresholds(tmp_path, text)


def test_a_baseline_allows_for_its_spread(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(MEASURED))
    source = read_expectation(str(tmp_path / "b.json"), "collectives")
    slower = result("collectives", rows=[operation(1 << 20, 103.0), operation(1 << 26, 1500.0)])
    assert unmet_expectations(MEASURED, source) == []
    assert baseline_differences(MEASURED, source) == []
    (miss,) = unmet_expectations(slower, source)
    assert "bytes 67108864" in miss and miss.endswith("1500, expected 1000 within 6 %")
    with pytest.raises(UsageError, match="has no row in common with this run"):
        unmet_expectations(result("collectives", rows=[operation(8, 1.0)]), source)


def test_only_rows_with_a_catalogue_figure_are_checked() -> None:
    on_gpus = [{"device": f"cuda:{n}", "node": 0, "ranks_on_device": 1} for n in range(8)]
    known = copy.deepcopy(MEASURED)
    known["world"]["ranks"] = on_gpus
    known["environment"]["gpus"] = [{"name": "NVIDIA H200"}] * 8
    known["rows"] = [operation(1 << 28, 700.0, busbw_gbs=400.0)]
    assert unmet_expectations(known, Expectation("catalogue")) == []
    known["rows"] = [operation(1 << 28, 700.0, busbw_gbs=300.0), operation(8, 1.0, busbw_gbs=0.1)]
    (miss,) = unmet_expectations(known, Expectation("catalogue"))
    assert "busbw is 300 GB/s" in miss and "0.8 × 432 GB/s (Azure" in miss
    for change in ({"node": 1}, {"ranks_on_device": 2}):
        other = copy.deepcopy(known)
        other["world"]["ranks"][7] |= change
        with pytest.raises(UsageError, match="has no figure for this run"):
            unmet_expectations(other, Expectation("catalogue"))
    with pytest.raises(UsageError, match=r"on this machine\. Give an earlier result"):
        unmet_expectations(MEASURED, Expectation("catalogue"))
