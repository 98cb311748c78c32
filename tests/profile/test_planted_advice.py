"""A plain DDP script has a planted cause; following the advice must give the predicted gain.

Real processes, two gloo ranks. Steps and shares are medians: on a shared machine one step in ten
may take ten times as long. A prediction holds if the gain lies in its band.
"""

import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from tutti.profile.trace_reader import read_rank
from worlds import run_tutti

SCRIPT = Path(__file__).parent / "plain_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SCHEDULE = ["--wait", "2", "--warmup", "1", "--active", "8"]
# 30 layers of 4 KB, two weights of 200 KB and a bias of 6, each in a bucket of its own.
MANY_LAYERS = {"LAYERS": "32", "WIDTH": "32", "WIDE": "1536"}
MESSAGES, TINY_MB = 33, 0.004
# Here compute, not communication, is most of a step.
HEAVY = {"LAYERS": "4", "WIDTH": "384", "BATCH": "512", "BUCKET_MB": "25"}
PLANTED_INPUT = 0.06  # seconds, in plain_ddp.py


def _profile(folder: Path, **planted: str) -> dict[str, Any]:
    result = folder / "result.json"
    words = ["profile", "--out", folder / "out", *SCHEDULE, "--json", result, "--"]
    done = run_tutti(*words, *TORCHRUN, SCRIPT, "gloo", "13", env=planted, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, Any] = json.loads(result.read_text())
    return rows


def _named(rows: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in rows["advice"] if each["id"] == name), None)


def _share(rows: dict[str, Any], part: str) -> float:
    """Median over a rank's steps, mean over ranks."""
    shares: dict[int, list[float]] = {}
    for each in rows["steps"]:
        shares.setdefault(each["rank"], []).append(each["parts_s"][part] / each["seconds"])
    return mean(median(each) for each in shares.values())


def _length(rows: dict[str, Any]) -> float:
    return median(each["seconds"] for each in rows["steps"])


def _largest(rows: dict[str, Any]) -> str:
    lost = ("exposed", "wait", "bubble", "input", "host_gap", "rest")
    return max(lost, key=lambda part: _share(rows, part))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run with too many small buckets."""
    return _profile(tmp_path_factory.mktemp("tiny"), BUCKET_MB=str(TINY_MB), **MANY_LAYERS)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run without a planted cause."""
    return _profile(tmp_path_factory.mktemp("even"), **HEAVY)


@pytest.mark.measured  # the first test that needs the fixture: it is measured alone
def test_every_small_bucket_is_found(tiny: dict[str, Any]) -> None:
    of_one_step = [each for each in tiny["buckets"] if (each["rank"], each["step"]) == (0, 5)]

    assert [each["index"] for each in of_one_step] == list(range(MESSAGES))
    parameters = 30 * (32 * 32 + 32) + (32 * 1536 + 1536) + (1536 * 32 + 32)
    assert sum(each["bytes"] for each in of_one_step) == 4 * parameters
    # The buckets that torch was asked to assign are the buckets that DDP has sent.
    (ddp,) = read_rank(Path(tiny["ranks"][0]["trace"])).capture_info["program"]["ddp"]
    assigned = [sum(ddp["bytes"][index] for index in bucket) for bucket in ddp["buckets"]]
    assert assigned == [each["bytes"] for each in of_one_step]
    assert ddp["constructed_at"].startswith(str(SCRIPT))
    assert ddp["other_buckets"] and ddp["buckets"] not in ddp["other_buckets"].values()
    for each in of_one_step:
        assert 0 < each["ready_s"] <= each["started_s"] <= each["done_s"]
    assert [each["axis"] for each in tiny["comm"]] == ["dp"] * len(tiny["comm"])


@pytest.mark.measured
def test_a_larger_bucket_is_advised_and_gains_what_was_predicted(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    found = _named(tiny, "buckets")

    assert _largest(tiny) == "exposed"
    assert found is not None and found["cause"] == "exposed"
    assert found == tiny["advice"][0]
    size = found["change"]["ddp"]["bucket_cap_mb"]

    changed = _profile(tmp_path, BUCKET_MB=str(size), **MANY_LAYERS)

    # The buckets with this size are the buckets that were simulated.
    (ddp,) = read_rank(Path(tiny["ranks"][0]["trace"])).capture_info["program"]["ddp"]
    simulated = [
        sum(ddp["bytes"][index] for index in bucket) for bucket in ddp["other_buckets"][f"{size:g}"]
    ]
    of_one_step = [each for each in changed["buckets"] if (each["rank"], each["step"]) == (0, 5)]
    assert [each["bytes"] for each in of_one_step] == simulated
    low, high = found["gain_s_band"]
    assert low < _length(tiny) - _length(changed) < high
    again = _named(changed, "buckets")
    assert again is None or again["change"] != found["change"]


@pytest.mark.measured
def test_an_uneven_batch_is_found_and_an_even_batch_is_not_reported(
    even: dict[str, Any], tmp_path: Path
) -> None:
    uneven = _profile(tmp_path, UNEVEN="1", **HEAVY)
    found, late = _named(uneven, "straggler"), uneven["stragglers"][0]

    assert (late["rank"], late["excess"]["part"]) == (1, "compute")
    assert _largest(uneven) == "wait"
    assert found is not None and f"for rank {late['rank']}" in found["finding"]
    assert "Split the batch evenly: rank 1 has 3.0 times the work" in found["try"]
    assert any("unevenly busy" in note for note in uneven["notes"])

    cost = {each["rank"]: each["cost_share"] for each in even["stragglers"]}
    assert cost.get(1, 0.0) < late["cost_share"]
    assert not any("Split the batch" in each["try"] for each in even["advice"])


@pytest.mark.measured
def test_slow_input_on_one_rank_is_found_and_fast_input_is_not_reported(
    even: dict[str, Any], tmp_path: Path
) -> None:
    slow = _profile(tmp_path, SLOW_INPUT="1", **HEAVY)
    found, late = _named(slow, "input"), slow["stragglers"][0]

    assert (late["rank"], late["excess"]["part"]) == (1, "input")
    assert found is not None and found == slow["advice"][0]
    assert found["finding"].startswith("rank 1 waits")
    low, high = found["gain_s_band"]
    assert low < PLANTED_INPUT < high

    assert _named(even, "input") is None
