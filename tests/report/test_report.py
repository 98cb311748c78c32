"""What a report is made of, and what it says when something is missing; no browser."""

import gzip
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from report.cases import HOSTILE, ROOT, SCALE, hostile_result, report
from tutti.report.collect import Material, Result, Run, collect
from tutti.report.figure import MOST_POINTS, Figure, thin
from tutti.report.figures import (
    SECTIONS,
    parts,
    recipes,
    scaling,
    throughput,
    timeline,
    topology,
    traffic,
    waits,
)
from tutti.report.page import build, check_installed, data_for_script, show
from tutti.report.summary import tiles
from tutti.world.errors import UsageError
from worlds import TUTTI, run_command


def _column(figure: Figure, name: str) -> list[Any]:
    return [row[list(figure.table.head).index(name)] for row in figure.table.rows]


def test_a_run_directory_becomes_a_page_inside_it(two_ranks: Path, tmp_path: Path) -> None:
    run = shutil.copytree(two_ranks, tmp_path / "run")

    page = report(run)

    assert page == run / "report.html"
    text = page.read_text()
    assert text.count("plotly.js v") == 1
    # Nothing refers to the outside but names of XML's own, which nobody asks for.
    assert (
        re.findall(r'(?:src|href)=(?!["\']?(?:data:|#))[^\s>]*', text.partition("<script")[0]) == []
    )
    assert "2 ranks, layout dp2" in text


def test_of_several_runs_the_page_is_here_and_its_large_numbers_say_of_which(
    two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [shutil.copytree(two_ranks, tmp_path / name) for name in ("one", "two")]
    monkeypatch.chdir(tmp_path)

    page = report(*runs)

    assert page.resolve() == tmp_path / "report.html"
    (computing,) = [tile for tile in tiles(collect(runs)) if tile.name == "computing"]
    assert computing.about == "of the step, in one"


def test_the_same_material_gives_the_same_page(two_ranks: Path) -> None:
    assert build(collect([two_ranks])) == build(collect([two_ranks]))


def test_a_profiled_run_shows_parts_that_add_up_a_timeline_and_who_waited(two_ranks: Path) -> None:
    (run,) = collect([two_ranks]).runs

    share, time = parts.figures(run)
    for figure in (share, time):
        for row in figure.table.rows:
            assert sum(row[2:]) == pytest.approx(row[1], rel=1e-6)
    assert _column(share, "rank") == [0, 1]
    (line,) = timeline.figures(run)
    assert {row[0] for row in line.table.rows} == {0, 1}
    assert {"compute", "exposed communication"} <= set(_column(line, "part"))
    # A lane never shows more than the step has.
    length = line.layout["xaxis"]["range"][1]
    ends = [start + long for _, _, _, start, long, _ in line.table.rows]
    assert max(ends) <= length * 1.000001
    # What it shows as waiting is what the step's parts count as waiting.
    assert run.profile is not None
    number = int(line.title.rpartition(" ")[2])
    for step in (each for each in run.profile["steps"] if each["step"] == number):
        bars = [row for row in line.table.rows if row[0] == step["rank"] and row[2] == "wait"]
        assert sum(row[4] for row in bars) == pytest.approx(
            1e3 * step["parts_s"]["wait"], abs=0.01 * length
        )
    matrix = next(iter(waits.figures(run)))
    assert matrix.traces[0]["z"][0][0] is None and matrix.traces[0]["z"][0][1] is not None
    assert next(iter(traffic.figures(run))).table.rows


def test_several_runs_stand_side_by_side_with_what_differs(two_ranks: Path, one_rank: Path) -> None:
    table, differences = recipes.figures(collect([two_ranks, one_rank]).runs)

    assert _column(table, "run") == ["two-ranks", "one-rank"]
    assert _column(table, "ranks") == [2, 1]
    assert differences.table.head == ["setting", "two-ranks", "one-rank"]
    assert [0.05, 0.1] in [list(row[1:]) for row in differences.table.rows]
    assert set(_column(differences, "setting")) == {"optimization.lr", "length.steps"}


def test_losses_of_scaling_are_stacked_to_what_is_missing_and_a_forecast_is_called_one() -> None:
    (result,) = collect([SCALE]).results

    figures = {figure.title: figure for figure in scaling.figures(result)}
    lost = figures["Where the lost efficiency went"]
    for number, row in enumerate(lost.table.rows):
        assert sum(trace["x"][number] for trace in lost.traces) == pytest.approx(row[1])
    efficiency = figures["Efficiency over ranks"]
    assert _column(efficiency, "is") == ["measured"] * 3 + ["forecast"] * 3
    dashed = [each for each in efficiency.traces if each["line"].get("dash") == "dash"]
    assert [each["name"] for each in dashed] == ["forecast"]
    assert "under 90 % at 4, 80 % at 8, 50 % at 32 ranks" in efficiency.about


def test_flags_of_a_sweep_are_compared_where_a_scaling_has_one() -> None:
    (result,) = collect([SCALE]).results
    rows = result.content["rows"]
    slow = [row | {"samples_per_s": row["samples_per_s"] / 2} for row in rows]
    result.content["sweep"] = [row | {"flags": {"bucket-mb": "25"}} for row in rows]
    result.content["sweep"] += [row | {"flags": {"bucket-mb": "1"}} for row in slow]
    result.content |= {"rows": [], "forecast": None, "fit": None}

    speed, efficiency, lost = scaling.figures(result)

    names = [each["name"] for each in speed.traces]
    assert names == ["ideal", "--bucket-mb 25", "--bucket-mb 1"]
    assert len(efficiency.table.rows) == len(lost.table.rows) == 6
    assert "4 ranks with --bucket-mb 25 are 3.20 times" in build(Material(results=[result]))


def test_a_scale_folder_brings_one_run_for_each_number_of_ranks(
    two_ranks: Path, one_rank: Path, tmp_path: Path
) -> None:
    shutil.copy(SCALE, tmp_path / "scale.json")
    for name, run in (
        ("ranks1-repeat0", one_rank),
        ("ranks2-repeat0", two_ranks),
        ("ranks2-repeat1", two_ranks),
    ):
        shutil.copytree(run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))

    material = collect([tmp_path])

    assert [run.name for run in material.runs] == ["ranks1-repeat0", "ranks2-repeat0"]
    assert [run.name for run in material.profiled] == ["ranks2-repeat0"]  # the largest
    assert [result.schema for result in material.results] == ["tutti.scale"]
    assert "4 ranks are 3.20 times as fast as 1" in build(material)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.json")), ids=lambda f: f.stem)
def test_every_recorded_result_has_figures_and_none_is_left_out(file: Path) -> None:
    material = collect([file])

    made = [
        figure
        for section in SECTIONS
        for source in section.sources(material)
        for maker in section.makers
        for figure in maker(source)
        if section.title != "Environment"
    ]

    assert made
    assert all(len(row) == len(each.table.head) for each in made for row in each.table.rows)


def test_axes_buckets_and_advice_are_shown_where_a_profile_has_them(two_ranks: Path) -> None:
    material = collect([two_ranks])
    profile = material.runs[0].profile
    assert profile is not None
    step = next(iter(timeline.figures(material.runs[0]))).title.rpartition(" ")[2]
    profile["axes"] = [
        {"axis": "dp", "hidden_s": 0.001, "exposed_s": 0.002, "wait_s": 0.003, "share": 0.2}
    ]
    bucket = {"rank": 1, "step": int(step), "index": 0, "bytes": 4096}
    profile["buckets"] = [bucket | {"ready_s": 0.001, "started_s": 0.002, "done_s": 0.004}]
    advice = {"id": "buckets", "finding": "exposed communication is 18 % of the step"}
    advice |= {"try": "--bucket-mb 50", "share": 0.18, "gain_s": 0.002, "gain_share": 0.07}
    profile["advice"] = [advice | {"remains_share": 0.11, "cause": "exposed"}]

    page = build(material)

    assert "Communication by axis" in page
    assert "7.0 % of the step, 2.00 ms; 11.0 % would remain of 18.0 %" in page
    (line,) = timeline.figures(material.runs[0])
    assert [row[5] for row in line.table.rows if row[1] == "buckets"] == ["bucket 0, 4 KiB"] * 2


def test_live_waiting_is_a_curve_of_every_rank(two_ranks: Path) -> None:
    (run,) = collect([two_ranks]).runs
    for rank, rows in run.metrics.items():
        rows[:] = [{"step": 13, "wait_fraction": 0.1 + 0.2 * rank}]

    waiting = [each for each in throughput.figures([run]) if "Waiting" in each.title]

    assert [[trace["name"], trace["y"]] for trace in waiting[0].traces] == [
        ["rank 0", [pytest.approx(10.0)]],
        ["rank 1", [pytest.approx(30.0)]],
    ]


def test_the_topology_beside_a_run_is_drawn_and_without_one_no_machine_is(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"environment": {"host": "far away"}}')
    alone = build(collect([tmp_path]))
    done = run_command([*TUTTI, "topo", "--json", tmp_path / "topo.json"])
    assert done.returncode == 0, done.stderr

    material = collect([tmp_path])

    (picture,) = topology.figures(material.results[0])
    assert picture.pictures is not None
    light, dark = picture.pictures
    assert light.startswith("<svg") and light != dark
    assert "prefers-color-scheme" not in light + dark
    assert ">Topology</h2>" in build(material)
    assert ">Topology</h2>" not in alone


def test_what_is_damaged_or_missing_is_a_note_and_the_rest_is_shown(
    two_ranks: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_ranks, run)
    (run / "summary.json").write_text('{"steps": ')
    (run / "recipe.toml").write_text("model = [")
    with (run / "metrics/rank0.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    with gzip.open(run / "traces/rank1.json.gz", "wt") as file:
        file.write("not a trace")

    material = collect([run])
    page = build(material)

    assert len(material.notes) == 3
    for name in ("summary.json", "recipe.toml", "rank0.jsonl", "rank1.json.gz"):
        assert name in page
    assert material.runs[0].profile is not None  # of the rank whose trace is whole
    for empty in ("metrics", "traces"):
        shutil.rmtree(run / empty)
    assert "Machine: " in build(collect([run]))


def test_a_result_without_what_its_schema_promises_costs_its_figure_only(tmp_path: Path) -> None:
    bad = Result("bad", tmp_path, "tutti.bench.collectives", {"rows": [{"op": "all_reduce"}]})
    run = Run("half", tmp_path, profile={"ranks": [{"rank": 0}], "steps": []})

    page = build(Material(runs=[run], results=[bad, *collect([SCALE]).results]))

    assert "Collectives of bad: a part is left out" in page
    assert "Where the lost efficiency went" in page


def test_no_text_from_a_file_can_end_the_script_or_become_a_tag(tmp_path: Path) -> None:
    page = build(collect([hostile_result(tmp_path)]))

    assert HOSTILE not in page
    assert "onerror=window.hit=2>" not in page
    assert json.loads(data_for_script({"a": HOSTILE}))["a"] == HOSTILE
    assert "</script" not in data_for_script({"a": HOSTILE})


def test_long_curves_are_thinned_to_means() -> None:
    points = [(float(step), float(step % 2)) for step in range(10 * MOST_POINTS)]

    thinned = thin(points)

    assert len(thinned) == MOST_POINTS
    assert {y for _, y in thinned} == {0.5}
    assert thin(points[:10]) == points[:10]


def test_numbers_are_rounded_for_the_eye_only() -> None:
    assert [show(each) for each in (1234567, 0.123456, 12345.6, None, True)] == [
        "1,234,567",
        "0.1235",
        "12,346",
        "–",
        "yes",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: there is no such file or folder"),
        ([], "PATH"),
        (["plain.json"], "has no `schema` of tutti's"),
        (["text.json"], "is no JSON"),
        (["."], "holds nothing to report"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    if words != ["."]:
        (tmp_path / "plain.json").write_text('{"a": 1}')
        (tmp_path / "text.json").write_text("hello")

    done = run_command([*TUTTI, "report", *words], cwd=tmp_path)

    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_its_packages_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)

    with pytest.raises(UsageError, match=r"plotly is missing.*pip install 'tutti\[report\]'"):
        check_installed()
