"""What a page shows of a scaling: its file is written by hand, nothing is run."""

import json
from pathlib import Path

from report.cases import SCALE
from tutti.report.collect import Material, collect
from tutti.report.figures import scaling
from tutti.report.summary import tiles


def test_of_repeats_the_one_that_a_row_explains_is_shown(tmp_path: Path) -> None:
    content = json.loads(SCALE.read_text())
    content["rows"][0]["folder"] = "/elsewhere/out/ranks1-repeat2"
    (tmp_path / "scale.json").write_text(json.dumps(content))
    for name in ("ranks1-repeat0", "ranks1-repeat2", "ranks2-repeat1", "ranks2-repeat10"):
        (tmp_path / name).mkdir()

    names = [run.name for run in collect([tmp_path]).runs]

    assert names == ["ranks1-repeat2", "ranks2-repeat1"]  # of two ranks no row names one


def test_throughput_has_the_unit_that_was_counted() -> None:
    (result,) = collect([SCALE]).results
    result.content["unit"] = "ranks × steps/s"
    material = Material(results=[result])

    figures = {figure.title: figure for figure in scaling.figures(result)}

    assert next(tiles(material)).name == "ranks × steps/s"
    assert "ranks × steps/s" in figures["Throughput over ranks"].table.head
    assert "samples/s" not in figures["Throughput over ranks"].table.head
