"""`--try-advice` applies a change to an unchanged program, and compares runs with and without."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tutti.cli.profile import main
from tutti.profile.try_advice import (
    choose_advice,
    compare_with_prediction,
    tried_lines,
    try_change,
    with_flags,
)
from tutti.world.errors import UsageError

PROGRAM = Path(__file__).parent / "changed_program.py"


def _last_settings(folder: Path) -> dict[str, Any]:
    lines = (folder / "output.txt").read_text().splitlines()
    settings: dict[str, Any] = json.loads([line for line in lines if line.startswith("{")][-1])
    return settings


def test_a_change_reaches_the_program_only_in_the_runs_with_the_change(tmp_path: Path) -> None:
    """All changes at once: arguments of DDP and of one of two loaders, and no_sync."""
    lines = PROGRAM.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if "loader = DataLoader" in line)
    change = {
        "ddp": {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
        "loader": {"num_workers": 1, "persistent_workers": True},
        "loader_at": f"{PROGRAM.relative_to(Path.cwd())}:{at}",
        "no_sync": 2,
    }
    command = [sys.executable, str(PROGRAM), str(tmp_path)]

    result = try_change(command, change, step_s=0.1, folder=tmp_path / "tried", pairs=1)

    without = _last_settings(tmp_path / "tried" / "1-without")
    changed = _last_settings(tmp_path / "tried" / "1-with")
    assert (without["view"], without["workers"], without["sent"]) == (False, [0, 0], 2)
    assert (changed["view"], changed["workers"]) == (True, [1, 0])
    assert changed["cap"] == int(0.02 * 2**20)
    assert changed["sent"] == 3  # buckets of two layers, once for both passes
    assert changed["gradient"] == pytest.approx(without["gradient"], rel=1e-4)
    (before,), (after,) = result["without_s"], result["with_s"]
    assert result["gain_s"]["p50"] == pytest.approx(before - after)
    assert result["change"] == change


def test_the_measured_gain_is_compared_with_the_band() -> None:
    advice = {"id": "buckets", "gain_s_band": [0.010, 0.020], "gain_share_band": [0.1, 0.2]}
    measured = {"without_s": [0.1], "with_s": [0.085], "pairs": 1, "steps": 20, "gain_share": 0.15}
    measured |= {"change": {"ddp": {"bucket_cap_mb": 25.0}}}

    results = {}
    for gain in (0.015, 0.025):
        times = {"gain_s": {"p50": gain, "quartiles": [gain, gain]}}
        tried = compare_with_prediction(advice, measured | times)
        results[gain] = tried["within"]
        text = "\n".join(tried_lines(advice, tried))
        assert "bucket_cap_mb=25.0" in text and "10 to 20 ms" in text
    assert results == {0.015: True, 0.025: False}


def test_the_first_advice_that_can_be_applied_is_chosen() -> None:
    straggler = {"id": "straggler", "change": None}
    loader = {"id": "input", "change": {"loader": {"num_workers": 2}}}

    assert choose_advice({"advice": [straggler, loader]})[0] is loader
    assert "straggler" in choose_advice({"advice": [straggler, loader]})[1][0]
    assert choose_advice({"advice": [straggler]})[0] is None


def test_flags_of_tutti_train_replace_flags_of_the_same_name() -> None:
    command = ["tutti", "train", "--bucket-mb", "1", "--steps", "9", "--bucket-mb=2"]

    assert with_flags(command, {"--bucket-mb": "25"}) == [
        *("tutti", "train", "--steps", "9", "--bucket-mb", "25")
    ]
    assert with_flags(["tutti", "train"], {"--x": None}) == ["tutti", "train", "--x"]


@pytest.mark.parametrize(
    "arguments",
    [["--try-advice"], ["--try-advice", "--"], ["--try-advice", "--trace", "."]],
)
def test_try_advice_without_a_program_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="--try-advice"):
        main(arguments)
