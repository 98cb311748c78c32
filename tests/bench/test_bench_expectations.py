"""--expect is checked before anything is measured: what could never be met is a mistake."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tutti.bench.bandwidth.link_verdicts import VERDICTS
from tutti.bench.collectives.cases import DTYPES
from tutti.bench.expectations import ALLOWED_VALUES, FIELDS, read_expectation
from tutti.cli.bench_collectives import Collectives
from tutti.world.errors import UsageError
from worlds import TUTTI, run_command, run_tutti

# Who measured at all with this would be at it for hours.
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
        ("collectives", 'op = ["all_reduce", 3]', "op = all_reduce or 3: write a string"),
        ("collectives", 'backend = "goo x16"', "no backend 'goo x16': did you mean gloo?"),
        ("collectives", 'dtype = "float23"', "no dtype 'float23': did you mean float32?"),
        ("collectives", 'bytes = "64Q"', "bytes = '64Q' is not a number: write 64M or 1024"),
        ("collectives", 'bytes = { min = "x" }', "bytes.min = 'x' is not a number"),
        ("collectives", 'ranks = "two"', "ranks = 'two' is not a number: write a number"),
        ("collectives", 'algbw_gbs = { min = "3" }', "algbw_gbs.min = '3' is not a number"),
        ("collectives", "algbw_gbs = { min = true }", "algbw_gbs.min = True is not a number"),
        ("collectives", "algbw_gbs = { min = nan }", "algbw_gbs.min = nan is not a number"),
        ("collectives", "algbw_gbs = 3", "give a bound, such as algbw_gbs = { min = 3 }"),
        ("collectives", "wrong = 0", "give a bound, such as wrong = { max = 0 }"),
        ("collectives", "wrong = { least = 3 }", "a bound has min, max or both"),
        ("collectives", "wrong = { min = 3, max = 2 }", "no value is at least 3 and at most 2"),
        ("bandwidth", 'part = "pears"', "no part 'pears': did you mean pairs?"),
        ("bandwidth", 'class = "NVlink"', "no class 'NVlink': did you mean NVLink?"),
        ("bandwidth", 'part = "copies"\ngbs_uni = { min = 3 }', "gbs_uni is a field of pairs"),
        ("bandwidth", 'class = "PCIe"\nbusbw_gbs = { min = 3 }', "all_to_all and ring_vs_tree, "),
        ("pairs", 'name = "overlapp"', "no name 'overlapp': did you mean overlap?"),
        ("pairs", "speed_up = { min = 1 }", "'speed_up': did you mean speedup?"),
    ],
)
def test_a_rule_that_no_row_can_fit_is_refused(
    tmp_path: Path, bench: str, rule: str, message: str
) -> None:
    file = tmp_path / "t.toml"
    good = {"collectives": "busbw_gbs", "bandwidth": "gbs", "pairs": "speedup"}[bench]
    further = "" if "gbs_uni" in rule or "busbw" in rule else f"{good} = {{ min = 1 }}\n"
    file.write_text(f"[[expect]]\n{good} = {{ min = 1 }}\n[[expect]]\n{rule}\n{further}")
    with pytest.raises(UsageError) as refused:
        read_expectation(str(file), bench, {"name": ["overlap"]})
    said = str(refused.value)
    assert said.startswith(f"--expect {file}: rule 2: ") and message in said, said


@pytest.mark.parametrize("bench", ["collectives", "bandwidth", "pairs"])
def test_nothing_is_measured_where_expect_is_wrong(bench: str, tmp_path: Path) -> None:
    file, other = tmp_path / "t.toml", tmp_path / "symmetric.json"
    file.write_text("[[expect]]\nwrogn = { max = 0 }\n")
    other.write_text(json.dumps({"schema": "tutti.bench.symmetric/1", "rows": []}))
    cases = {str(file): f"--expect {file}: rule 1: bench {bench} has no 'wrogn'"}
    cases[str(other)] = f"--expect {other}: it is a result of bench symmetric, this is bench"
    if bench != "bandwidth":  # which judges a CPU's links by themselves
        cases["catalogue"] = "--expect catalogue: "
    for text, message in cases.items():
        done = run_command([*TUTTI, "bench", bench, *LONG, "--expect", text])
        assert done.returncode == 2 and not done.stdout, done.stdout
        assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_baseline_of_other_flags_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    bench = ["bench", "collectives", "--backends", "gloo", "--device", "cpu"]
    then = ["--sizes", "1K", "--budget", "0.01", "--json", tmp_path / "then.json"]
    assert run_tutti(*bench, *then).returncode == 0
    now = ["--budget", "1000", "--expect", tmp_path / "then.json"]
    done = run_tutti(*bench, "--sizes", "4K", *now)
    assert done.returncode == 2 and not done.stdout
    assert "then.json: it has no row in common with this run" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    done = run_tutti(*bench, "--sizes", "1K,4K", "--budget", "0.01", *now[2:])
    assert done.returncode in (0, 1), done.stderr  # some of it is: fast enough or not

    row = {"name": "grouped", "speedup": 2.0, "spread": {"p25": 1.9, "p75": 2.1}}
    then = {"schema": "tutti.bench.pairs/1", "rows": [row], "world": {"size": 2}}
    (tmp_path / "then.json").write_text(json.dumps(then))
    done = run_tutti("bench", "pairs", "--only", "overlap", "--device", "cpu", *now)
    assert done.returncode == 2 and not done.stdout
    assert "then.json: it has no row in common with this run" in done.stderr


def test_rules_know_what_rows_have(tmp_path: Path) -> None:
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


def test_rules_know_the_words_that_flags_take() -> None:
    words, flags = ALLOWED_VALUES["collectives"], get_type_hints(Collectives)
    assert [*words["dtype"]] == [*get_args(flags["dtype"])] and {*words["dtype"]} <= {*DTYPES}
    assert {*words["timing"]} == {*get_args(flags["timing"])} - {"both"}
    assert ALLOWED_VALUES["bandwidth"]["verdict"] == VERDICTS


def _flat(row: dict[str, Any]) -> frozenset[str]:
    names = []
    for name, value in row.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]
    return frozenset(names)
