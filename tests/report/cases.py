"""Run directories, pages and a result with hostile text for the report tests."""

import json
from pathlib import Path

from worlds import run_tutti

SCALE = Path(__file__).parent / "scale.json"
ROOT = Path(__file__).parents[2]
HOSTILE = "</script><img src=x onerror=window.hit=1><a href='https://example.org'>a & b</a>"


def train(out: Path, *flags: str) -> Path:
    """Train a few steps and return the run directory."""
    words = ["train", "--recipe", "lenet", "--device", "cpu", "--no-evaluate"]
    done = run_tutti(*words, "--out", out, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def report(*words: object) -> Path:
    """Run tutti report and return the path that it prints last."""
    done = run_tutti("report", *map(str, words))
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1])


def hostile_result(folder: Path) -> Path:
    """Return a benchmark result in which every name contains HTML."""
    content = json.loads((ROOT / "benchmarks/cpu_all_reduce_epyc2_20261115_run1.json").read_text())
    for row in content["rows"]:
        row["backend"] = HOSTILE
    content["command"] = ["tutti", HOSTILE]
    content["environment"]["host"] = HOSTILE
    path = folder / "<img src=x onerror=window.hit=2>.json"
    path.write_text(json.dumps(content))
    return path
