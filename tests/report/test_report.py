"""The content of a page, and its notes about missing or damaged files; no browser."""

import gzip
import json
import math
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from report.cases import HOSTILE, ROOT, SCALE, hostile_result, report
from tutti.report.figures.machine_health import topology
from tutti.report.figures.scaling_curves import scaling
from tutti.report.figures.step_profile import communication, parts, waits
from tutti.report.figures.step_timeline import operators, short_name, timeline
from tutti.report.figures.training_curves import curves, memory_by_cause, runs_table, waiting
from tutti.report.page import (
    SECTIONS,
    build_page,
    check_installed,
    script_json,
    select,
    show,
)
from tutti.report.plot import MAX_POINTS, Figure, log_axis, thin
from tutti.report.sources import ReportSources, Run, read_sources
from tutti.report.summary import sentences, tiles
from tutti.world.errors import UsageError
from worlds import run_tutti


def _column(figure: Figure, name: str) -> list[Any]:
    return [row[list(figure.table.head).index(name)] for row in figure.table.rows]


def _median_step(line: Figure) -> int:
    return int(next(label for label in line.variants if "median" in label).partition(":")[0])


def test_a_run_directory_becomes_a_page_inside_it(two_ranks: Path, tmp_path: Path) -> None:
    run = shutil.copytree(two_ranks, tmp_path / "run")

    page = report(run)

    assert page == run / "report.html"
    text = page.read_text()
    assert text.count("plotly.js v") == 1
    # No reference leaves the page, except XML names, which no browser requests.
    assert (
        re.findall(r'(?:src|href)=(?!["\']?(?:data:|#))[^\s>]*', text.partition("<script")[0]) == []
    )
    assert "2 ranks, layout dp2" in text


def test_a_page_of_several_runs_is_in_the_current_directory_and_tiles_name_the_run(
    two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [shutil.copytree(two_ranks, tmp_path / name) for name in ("one", "two")]
    monkeypatch.chdir(tmp_path)

    page = report(*runs)

    assert page.resolve() == tmp_path / "report.html"
    (computing,) = [tile for tile in tiles(read_sources(runs)) if tile.name == "computing"]
    assert computing.about == "of the step, in one"


def test_the_same_sources_give_the_same_page(two_ranks: Path) -> None:
    assert build_page(read_sources([two_ranks])) == build_page(read_sources([two_ranks]))


def test_a_profiled_run_has_parts_that_add_up_a_timeline_and_a_wait_matrix(two_ranks: Path) -> None:
    (run,) = read_sources([two_ranks]).runs

    share, time = parts(run)
    for figure in (share, time):
        for row in figure.table.rows:
            assert sum(row[2:]) == pytest.approx(row[1], rel=1e-6)
    assert _column(share, "rank") == [0, 1]
    (line,) = timeline(run)
    assert {row[0] for row in line.table.rows} == {0, 1}
    assert {"compute", "exposed communication"} <= set(_column(line, "part"))
    # Hovering shows the length of a bar: plotly's x is the end of a bar with a base.
    for trace in line.traces:
        assert [length for length, _ in trace["customdata"]] == trace["x"]
        assert "%{customdata[0]" in trace["hovertemplate"] and "%{x" not in trace["hovertemplate"]
    # Bars stay within the step.
    length = line.layout["xaxis"]["range"][1]
    ends = [start + long for _, _, _, start, long, _ in line.table.rows]
    assert max(ends) <= length * 1.000001
    # The waiting bars add up to the part `wait` of the step.
    assert run.profile is not None
    number = _median_step(line)
    for step in (row for row in run.profile["steps"] if row["step"] == number):
        bars = [row for row in line.table.rows if row[0] == step["rank"] and row[2] == "wait"]
        assert sum(row[4] for row in bars) == pytest.approx(
            1e3 * step["parts_s"]["wait"], abs=0.01 * length
        )
    # Operators are named. The list of steps has all of them.
    assert "aten::conv2d" in _column(line, "details")
    (named,) = operators(run)
    assert sum(_column(named, "share of step %")) <= 100.001
    assert "aten::convolution_backward" in _column(named, "operator")
    assert not [name for name in _column(named, "operator") if "all_reduce" in name]
    labels = list(line.variants)
    assert len(labels) == len({step["step"] for step in run.profile["steps"]})
    assert [sum(word in label for label in labels) for word in ("median", "fastest")] == [1, 1]
    lengths = [layout["xaxis"]["range"][1] for _, layout in line.variants.values()]
    assert lengths[1] == min(lengths) and lengths[2] == max(lengths)
    matrix = next(waits(run))
    assert matrix.traces[0]["z"][0][0] is None and matrix.traces[0]["z"][0][1] is not None
    assert next(communication(run)).table.rows


def test_several_runs_are_listed_with_recipe_differences(two_ranks: Path, one_rank: Path) -> None:
    table, differences = runs_table(read_sources([two_ranks, one_rank]).runs)

    assert _column(table, "run") == ["two-ranks", "one-rank"]
    assert _column(table, "ranks") == [2, 1]
    page = build_page(read_sources([two_ranks, one_rank]))
    assert "The columns <code>step ms</code> and <code>computing %</code> are" in page
    assert differences.table.head == ["setting", "two-ranks", "one-rank"]
    assert [0.05, 0.1] in [list(row[1:]) for row in differences.table.rows]
    assert set(_column(differences, "setting")) == {"optimization.lr", "length.steps", "ranks"}


def test_memory_by_cause_adds_up_to_the_peak_of_each_rank(two_ranks: Path) -> None:
    runs = read_sources([two_ranks]).runs
    (figure,) = memory_by_cause(runs)
    peaks = runs[0].summary["memory"]["host_peak_bytes"]
    drawn = [sum(values) for values in zip(*(bar["x"] for bar in figure.traces), strict=True)]
    assert drawn == pytest.approx([peak / 2**30 for peak in peaks], rel=0.02)
    assert _column(figure, "total GiB") == pytest.approx(drawn)
    assert "conv" in figure.description  # a module of LeNet


def test_curves_have_a_learning_rate_a_gradient_norm_and_three_x_axes(
    two_ranks: Path, one_rank: Path
) -> None:
    runs = read_sources([two_ranks, one_rank]).runs

    found = {figure.title: figure for figure in curves(runs)}

    assert {"Loss", "Throughput", "Learning rate", "Gradient norm"} == set(found)
    for figure in found.values():
        assert [trace["run"] for trace in figure.traces] == ["two-ranks", "one-rank"]
        for trace in figure.traces:
            assert {len(xs) for xs in trace["xs"].values()} == {len(trace["x"])}
            assert all(a < b for xs in trace["xs"].values() for a, b in pairwise(xs))
    for run, trace in zip(runs, found["Loss"].traces, strict=True):
        assert trace["x"][-1] == run.summary["steps"] - 1
        assert trace["xs"]["samples"][-1] == pytest.approx(run.summary["samples"])
    norm = found["Gradient norm"].traces[0]["y"]
    assert all(value > 0 for value in norm)
    assert set(found["Learning rate"].traces[1]["y"]) <= {
        row["lr"] for row in runs[1].metrics[0] if "lr" in row
    }


def test_scaling_losses_add_up_and_a_forecast_is_labelled() -> None:
    (result,) = read_sources([SCALE]).results

    figures = {figure.title: figure for figure in scaling(result)}
    lost = figures["Lost efficiency by cause"]
    for number, row in enumerate(lost.table.rows):
        assert sum(trace["x"][number] for trace in lost.traces) == pytest.approx(row[1])
    efficiency = figures["Efficiency over ranks"]
    assert _column(efficiency, "measured or forecast") == ["measured"] * 3 + ["forecast"] * 3
    dashed = [trace for trace in efficiency.traces if trace["line"].get("dash") == "dash"]
    assert [trace["name"] for trace in dashed] == ["forecast"]
    assert "below 90 % with 4, 80 % with 8, 50 % with 32 ranks" in efficiency.description


def test_the_values_of_a_sweep_are_compared() -> None:
    (result,) = read_sources([SCALE]).results
    rows = result.content["rows"]
    slow = [row | {"samples_per_s": row["samples_per_s"] / 2} for row in rows]
    result.content["sweep"] = [row | {"flags": {"bucket-mb": "25"}} for row in rows]
    result.content["sweep"] += [row | {"flags": {"bucket-mb": "1"}} for row in slow]
    result.content |= {"rows": [], "forecast": None, "fit": None}

    speed, efficiency, lost = scaling(result)

    names = [trace["name"] for trace in speed.traces]
    assert names == ["ideal", "--bucket-mb 25", "--bucket-mb 1"]
    assert len(efficiency.table.rows) == len(lost.table.rows) == 6
    assert "4 ranks with --bucket-mb 25 are 3.20 times" in build_page(
        ReportSources(results=[result])
    )


def test_a_scale_folder_shows_one_run_for_each_number_of_ranks(
    two_ranks: Path, one_rank: Path, tmp_path: Path
) -> None:
    shutil.copy(SCALE, tmp_path / "scale.json")
    for name, run in (
        ("ranks1-repeat0", one_rank),
        ("ranks2-repeat0", two_ranks),
        ("ranks2-repeat1", two_ranks),
    ):
        shutil.copytree(run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))

    sources = read_sources([tmp_path])

    assert [run.name for run in sources.runs] == ["ranks1-repeat0", "ranks2-repeat0"]
    assert [run.name for run in sources.profiled] == ["ranks2-repeat0"]  # the largest
    assert [result.schema for result in sources.results] == ["tutti.scale"]
    assert "4 ranks are 3.20 times as fast as 1 rank" in build_page(sources)
    # The throughput of 2 ranks is that of the scaling, not that of the repeat that is shown.
    assert [tile.value for tile in tiles(sources) if tile.name == "samples/s"] == ["320"]
    assert "samples/s" not in " ".join(sentences(sources))
    assert "samples/s" not in next(runs_table(sources.runs)).table.head


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.json")), ids=lambda f: f.stem)
def test_every_recorded_result_has_figures(file: Path) -> None:
    sources = read_sources([file])

    made = [
        figure
        for title, kind, makers in SECTIONS
        for source in select(sources, kind)
        for make in makers
        for figure in make(source)
        if title != "Environment"
    ]

    assert made
    assert all(len(row) == len(figure.table.head) for figure in made for row in figure.table.rows)


def test_axes_buckets_and_advice_of_a_profile_are_shown(two_ranks: Path) -> None:
    sources = read_sources([two_ranks])
    profile = sources.runs[0].profile
    assert profile is not None
    step = _median_step(next(timeline(sources.runs[0])))
    profile["axes"] = [
        {"axis": "dp", "hidden_s": 0.001, "exposed_s": 0.002, "wait_s": 0.003, "share": 0.2}
    ]
    bucket = {"rank": 1, "step": step, "index": 0, "bytes": 4096}
    profile["buckets"] = [bucket | {"ready_s": 0.001, "started_s": 0.002, "done_s": 0.004}]
    advice = {"id": "buckets", "finding": "exposed communication is 18 % of the step"}
    advice |= {"try": "--bucket-mb 50", "share": 0.18, "gain_s": 0.002, "gain_share": 0.07}
    profile["advice"] = [advice | {"remains_share": 0.11, "cause": "exposed"}]

    page = build_page(sources)

    assert "Communication by axis" in page
    assert "7.0 % of the step, 2.00 ms; 11.0 % would remain of 18.0 %" in page
    (line,) = timeline(sources.runs[0])
    assert [row[5] for row in line.table.rows if row[1] == "buckets"] == ["bucket 0, 4 KiB"] * 2


def test_live_waiting_has_a_curve_for_every_rank(two_ranks: Path) -> None:
    (run,) = read_sources([two_ranks]).runs
    for rank, rows in run.metrics.items():
        rows[:] = [{"step": 13, "wait_fraction": 0.1 + 0.2 * rank}]

    (figure,) = waiting([run])

    assert [[trace["name"], *trace["y"]] for trace in figure.traces] == [
        ["rank 0", pytest.approx(10.0)],
        ["rank 1", pytest.approx(30.0)],
    ]


def test_only_a_recorded_topology_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"environment": {"host": "far away"}}')
    alone = build_page(read_sources([tmp_path]))
    done = run_tutti("topo", "--json", tmp_path / "topo.json")
    assert done.returncode == 0, done.stderr

    sources = read_sources([tmp_path])

    (picture,) = topology(sources.results[0])
    assert picture.pictures is not None
    light, dark = picture.pictures
    assert light.startswith("<svg") and light != dark
    assert "prefers-color-scheme" not in light + dark
    assert ">Topology</h2>" in build_page(sources)
    assert ">Topology</h2>" not in alone
    content = json.loads((tmp_path / "topo.json").read_text())
    wrong = {"devices": 7, "links": {"a": 1}, "nics": [3], "numa": [{"distances": ["far"]}]}
    wrong |= {"machines": "text"}
    for key, value in wrong.items():
        (tmp_path / "topo.json").write_text(json.dumps({**content, key: value}))
        with pytest.raises(UsageError, match=r"topo\.json: a value has a wrong type"):
            build_page(read_sources([tmp_path / "topo.json"]))


def test_damaged_files_become_notes_and_the_rest_is_shown(two_ranks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_ranks, run)
    (run / "summary.json").write_text('{"steps": ')
    (run / "recipe.toml").write_text("model = [")
    with (run / "metrics/rank0.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    with gzip.open(run / "traces/rank1.json.gz", "wt") as file:
        file.write("not a trace")

    sources = read_sources([run])
    page = build_page(sources)

    assert len(sources.notes) == 3
    for name in ("summary.json", "recipe.toml", "rank0.jsonl", "rank1.json.gz"):
        assert name in page
    assert sources.runs[0].profile is not None  # of the rank whose trace is whole
    for empty in ("metrics", "traces"):
        shutil.rmtree(run / empty)
    assert "Machine: " in build_page(read_sources([run]))


def test_a_run_with_missing_keys_loses_only_its_figures(tmp_path: Path) -> None:
    run = Run("half", tmp_path, profile={"ranks": [{"rank": 0}], "steps": []})

    page = build_page(ReportSources(runs=[run], results=read_sources([SCALE]).results))

    assert "The step of half: a part is omitted" in page
    assert "Lost efficiency by cause" in page


BENCH = {"schema": "tutti.bench.collectives/1"}
RECORDED = json.loads((ROOT / "benchmarks/cpu_all_reduce_epyc2_20261115_run1.json").read_text())
P95 = RECORDED["rows"][0] | {"time_us": {**RECORDED["rows"][0]["time_us"], "p95": "slow"}}
WORD = RECORDED["rows"][0] | {"time_us": {"p50": "fast", "p95": 1, "min": 1, "cv": 0}}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("old.json", BENCH | {"rows": [{"op": "all_reduce"}]}, "no key 'bytes'"),
        ("text.json", BENCH | {"rows": "none"}, "wrong type"),
        ("number.json", BENCH | {"rows": [3]}, "wrong type"),
        ("word.json", RECORDED | {"rows": [WORD]}, "wrong type"),
        ("p95.json", RECORDED | {"rows": [P95]}, "time_us.p95 is 'slow'"),
        ("empty.json", BENCH | {"rows": []}, "has nothing to report"),
        ("next.json", {"schema": "tutti.scale/99", "rows": []}, "tutti.scale/99"),
        ("train.json", {"schema": "tutti.train/1", "samples_per_s": "fast"}, "wrong type"),
        ("rank0.json", {"traceEvents": "none"}, "no trace could be read"),
        ("run/traces/rank0.json", {"traceEvents": [], "a": 1}, "no trace could be read"),
        ("run/metrics/rank0.jsonl", {"step": 0, "loss": "low"}, "no line has"),
        ("run/summary.json", {"schema": "tutti.train/2"}, "tutti.train/2"),
    ],
)
def test_a_file_of_which_nothing_can_be_shown_fails_with_its_name(
    name: str, content: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    named = tmp_path / name.partition("/")[0]

    with pytest.raises(UsageError, match=expected) as error:
        build_page(read_sources([named, SCALE]))

    assert str(named) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_long_run_of_many_ranks_gives_a_small_page(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    sync = {"seconds_per_step": 0.01, "samples_per_s": 100.0, "wait_fraction": 0.1}
    steps = [{"step": step, "loss": 1.0, "lr": 0.1} for step in range(20_000)]
    rows = [row | (sync if row["step"] % 100 == 99 else {}) for row in steps]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for rank in range(64):
        (tmp_path / f"metrics/rank{rank}.jsonl").write_text(text)

    sources = read_sources([tmp_path])

    assert [len(sources.runs[0].metrics[rank]) for rank in (0, 63)] == [20_000, 200]
    for figure in (*curves(sources.runs), *waiting(sources.runs)):
        assert len(figure.table.rows) <= 16 * MAX_POINTS
        assert all(len(trace["x"]) <= MAX_POINTS for trace in figure.traces)
        assert len(figure.traces) <= 16


def test_text_from_a_file_cannot_end_the_script_or_become_a_tag(tmp_path: Path) -> None:
    page = build_page(read_sources([hostile_result(tmp_path)]))

    assert HOSTILE not in page
    assert "onerror=window.hit=2>" not in page
    assert json.loads(script_json({"a": HOSTILE}))["a"] == HOSTILE
    assert "</script" not in script_json({"a": HOSTILE})


def test_long_curves_are_reduced_to_means() -> None:
    points = [(float(step), float(step % 2)) for step in range(10 * MAX_POINTS)]

    thinned = thin(points)

    assert len(thinned) == MAX_POINTS
    assert {y for _, y in thinned} == {0.5}
    assert thin(points[:10]) == points[:10]


@pytest.mark.parametrize(
    "values", [[3e-4, 7e3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 64.0], [2.1, 2.9], [5.0], []]
)
@pytest.mark.parametrize("at_values", [False, True])
def test_ticks_of_logarithmic_axes_do_not_overlap(values: list[float], at_values: bool) -> None:
    axis = log_axis("ms", values, at_values=at_values)

    ticks = axis["tickvals"]
    assert len(axis["ticktext"]) == len(ticks) <= 15
    assert bool(ticks) == bool(values)
    if len(ticks) > 1:
        length = math.log(max(values) / min(values))
        assert all(math.log(b / a) >= 0.06 * length for a, b in pairwise(ticks))


def test_kernels_have_short_names() -> None:
    assert [
        short_name(name)
        for name in (
            "aten::convolution_backward",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*)",
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4",
        )
    ] == [
        "aten::convolution_backward",
        "vectorized_elementwise_kernel",
        "cunn_SoftMaxForward",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_st",
    ]


def test_displayed_numbers_are_rounded() -> None:
    assert [show(value) for value in (1234567, 0.123456, 12345.6, None, True)] == [
        "1,234,567",
        "0.1235",
        "12,346",
        "–",
        "yes",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([], "there is nothing to report. Add the path"),
        (["plain.json"], "has no tutti `schema`"),
        (["text.json"], "is not JSON"),
        (["."], "has nothing to report"),
    ],
)
def test_wrong_usage_prints_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    if words != ["."]:
        (tmp_path / "plain.json").write_text('{"a": 1}')
        (tmp_path / "text.json").write_text("hello")

    done = run_tutti("report", *words, cwd=tmp_path)

    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)

    with pytest.raises(UsageError, match=r"plotly.*pip install 'tutti-torch\[report\]'"):
        check_installed()
