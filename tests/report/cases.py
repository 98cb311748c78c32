"""What the tests of reports are made of."""

import json
from pathlib import Path

from worlds import TUTTI, run_command

SCALE = Path(__file__).parent / "scale.json"
ROOT = Path(__file__).parents[2]
HOSTILE = "</script><img src=x onerror=window.hit=1><a href='https://example.org'>a & b</a>"


def train(out: Path, *flags: str) -> Path:
    """A run directory of a few steps."""
    words = [*TUTTI, "train", "--recipe", "lenet", "--device", "cpu", "--no-evaluate"]
    done = run_command([*words, "--out", out, *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def report(*words: object) -> Path:
    """Run the command; returns the path that it prints last."""
    done = run_command([*TUTTI, "report", *map(str, words)])
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1])


def hostile_result(folder: Path) -> Path:
    """A benchmark whose every name is a trap."""
    content = json.loads((ROOT / "benchmarks/cpu_all_reduce_epyc2_20261115_run1.json").read_text())
    for row in content["rows"]:
        row["backend"] = HOSTILE
    content["command"] = ["tutti", HOSTILE]
    content["environment"]["host"] = HOSTILE
    path = folder / "<img src=x onerror=window.hit=2>.json"
    path.write_text(json.dumps(content))
    return path
