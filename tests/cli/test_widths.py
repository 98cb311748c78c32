"""Tables and text fit the terminal; output to a file is not wrapped."""

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.collectives.nccl_tests_table import CollectivesTable
from tutti.cli.world import _print_table
from worlds import run_tutti

HOST = "node-0017." + 6 * "a-long-domain." + "example"
TIMES = {"p50": 1.5, "min": 1.0, "p99": 2.0, "cv": 0.1}


@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize(
    "words", [["world"], ["topo"], ["doctor", "--all"], ["bench", "pairs", "--list"]]
)
def test_no_line_is_wider_than_the_terminal(words: list[str], columns: int) -> None:
    done = run_tutti(*words, env={"COLUMNS": str(columns)})
    widest = max(map(len, done.stdout.splitlines()))
    assert widest <= columns, done.stdout
    if words[0] == "doctor" and columns == 140:
        assert widest > 80  # a wide terminal is used fully


@pytest.mark.parametrize("columns", ["60", "80", None])
def test_a_comparison_fits_or_has_one_line_per_row(columns: str | None, tmp_path: Path) -> None:
    row = {
        "op": "all_reduce", "backend": "gloo", "ranks": 2, "bytes": 1024, "dtype": "float32",
        "redop": "sum", "placement": "in", "timing": "back-to-back", "wrong": 0,
        "time_us": {"p50": 1.0, "p95": 1.1, "min": 0.9, "cv": 0.1},
    }  # fmt: skip
    (tmp_path / "a.json").write_text(
        json.dumps({"schema": "tutti.bench.collectives/1", "rows": [row]})
    )
    files = [tmp_path / "a.json"] * 2
    env = {} if columns is None else {"COLUMNS": columns}
    done = run_tutti("bench", "compare", *files, "--show", "all", env=env)
    lines = done.stdout.splitlines()
    assert "back-to-back" in done.stdout and done.returncode == 0, done.stderr
    assert max(map(len, lines)) <= int(columns) if columns else len(lines) == 3


def test_the_world_table_fits_a_terminal_and_is_not_wrapped_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {
        "rank": 0, "local_rank": 0, "node": 0, "host": HOST, "device": "cpu", "backend": "shm",
        "launcher": "slurm", "cpus": "0-63", "threads": 64, "reasons": {}, "ranks_on_device": 1,
    }  # fmt: skip
    monkeypatch.delenv("COLUMNS", raising=False)
    _print_table([row, row | {"rank": 1}])
    assert (
        sum(HOST in line and "slurm" in line for line in capsys.readouterr().out.splitlines()) == 2
    )
    monkeypatch.setenv("COLUMNS", "120")
    _print_table([row, row | {"rank": 1}])
    out = capsys.readouterr().out
    assert out.count(HOST) == 2 and max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("columns", [50, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("placements", [["in"], ["out", "in"]])
def test_a_sweep_shows_as_much_as_fits(
    columns: int,
    placements: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [
        {
            "op": "all_reduce", "backend": "shm", "ranks": 2, "bytes": 1024, "count": 256,
            "dtype": "float32", "redop": "sum", "root": -1, "placement": placement, "group": 1,
            "timing": "back-to-back", "algbw_gbs": 1.0, "busbw_gbs": 1.0, "wrong": 0,
            "time_us": TIMES,
        }
        for placement in placements
    ]  # fmt: skip
    CollectivesTable(spread=True).add(rows)
    out = capsys.readouterr().out
    place = 13 * (len(placements) > 1)  # the column that names the placement
    assert max(map(len, out.splitlines())) <= max(columns, 52 + place), out
    spread_fits = columns >= 77 + place
    assert ("cv%" in out) == spread_fits and ("too narrow" in out) != spread_fits
    assert ("count" in out) == (columns >= 125 + place)
