"""What a page shows of a scaling: its file is written by hand, nothing is run."""

import json
from pathlib import Path

from report.cases import SCALE
from tutti.report.collect import collect


def test_of_repeats_the_one_that_a_row_explains_is_shown(tmp_path: Path) -> None:
    content = json.loads(SCALE.read_text())
    content["rows"][0]["folder"] = "/elsewhere/out/ranks1-repeat2"
    (tmp_path / "scale.json").write_text(json.dumps(content))
    for name in ("ranks1-repeat0", "ranks1-repeat2", "ranks2-repeat1", "ranks2-repeat10"):
        (tmp_path / name).mkdir()

    names = [run.name for run in collect([tmp_path]).runs]

    assert names == ["ranks1-repeat2", "ranks2-repeat1"]  # of two ranks no row names one
