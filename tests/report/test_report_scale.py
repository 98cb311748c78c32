"""The page of a scaling whose file is written by hand; nothing is run."""

import json
from pathlib import Path

from report.cases import SCALE
from tutti.report.figures.scaling_curves import learning_rates, scaling
from tutti.report.page import build_page
from tutti.report.sources import ReportSources, read_sources
from tutti.report.summary import tiles


def test_the_repeat_that_a_row_names_is_shown(tmp_path: Path) -> None:
    content = json.loads(SCALE.read_text())
    content["rows"][0]["folder"] = "/elsewhere/out/ranks1-repeat2"
    (tmp_path / "scale.json").write_text(json.dumps(content))
    for name in ("ranks1-repeat0", "ranks1-repeat2", "ranks2-repeat1", "ranks2-repeat10"):
        (tmp_path / name).mkdir()

    names = [run.name for run in read_sources([tmp_path]).runs]

    assert names == ["ranks1-repeat2", "ranks2-repeat1"]  # no row names a repeat of two ranks


def test_throughput_has_the_recorded_unit() -> None:
    (result,) = read_sources([SCALE]).results
    result.content["unit"] = "ranks × steps/s"
    sources = ReportSources(results=[result])

    figures = {figure.title: figure for figure in scaling(result)}

    assert next(tiles(sources)).name == "ranks × steps/s"
    assert "ranks × steps/s" in figures["Throughput over ranks"].table.head
    assert "samples/s" not in figures["Throughput over ranks"].table.head


def test_a_learning_rate_sweep_is_shown_as_losses(tmp_path: Path) -> None:
    """As `tutti scale --sweep lr=…` writes it: no speed-up, and 1.0 diverged."""
    content = json.loads(SCALE.read_text()) | {"rows": [], "fit": None, "mode": None, "unit": None}
    content["forecast"] = {"rows": [], "below": {}, "reason": "no forecast: a flag was swept"}
    kept = dict.fromkeys(("test_loss", "test_accuracy", "samples_per_s", "steps", "diverged"))
    content["sweep"] = [
        {"flags": {"lr": rate}, "ranks": ranks, "final_loss": loss, **kept}
        for rate, ranks, loss in ((1.0, 2, None), (0.1, 2, 0.25), (0.01, 2, 0.5), (0.1, 1, 0.2))
    ]
    content["sweep"][0]["diverged"] = True
    (tmp_path / "scale.json").write_text(json.dumps(content))
    sources = read_sources([tmp_path / "scale.json"])

    assert list(scaling(sources.results[0])) == []
    (figure,) = learning_rates(sources.results[0])
    curves = {trace["name"]: (trace["x"], trace["y"]) for trace in figure.traces}
    assert curves == {
        "1 rank": ([0.1], [0.2]),
        "2 ranks": ([0.01, 0.1, 1.0], [0.5, 0.25, None]),
    }
    page = build_page(sources)
    assert "Of 3 learning rates with 2 ranks, 0.1 has the lowest final loss: 0.25" in page
    assert "a part is omitted" not in page


def test_latency_is_unknown_with_one_message_size() -> None:
    (result,) = read_sources([SCALE]).results
    result.content["fit"] |= {"alpha_s": 0.0, "best_case": True}

    fitted = next(fig for fig in scaling(result) if fig.title.startswith("Time of"))

    assert "latency unknown" in fitted.description
