"""tutti bench symmetric: every row is measured and correct; Ctrl-C keeps what was measured."""

import json
from pathlib import Path

import pytest

from worlds import run_tutti

BENCH = ["bench", "symmetric", "--device", "cpu"]
_NAMES = {
    *("put", "get", "put_signal one way", "signal one way", "fetch_add", "compare_swap"),
    *("barrier", "parameter cache lookup", "hash map get", "hash map put"),
    *("ring hand-off one way", "adapter switch, prefetched", "adapter prefetch"),
    *("distributed tensor gather of 64 rows", "pooled cache get, local"),
    *("pooled cache get, peer", "pooled cache get, host", "all_reduce"),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_row_is_measured_and_correct(tmp_path: Path, ranks: int) -> None:
    flags = ["--ranks", str(ranks), "--budget", "0.01", "--sizes", "4,10K"]
    done = run_tutti(*BENCH, *flags, "--json", tmp_path / "s.json")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["schema"] == "tutti.bench.symmetric/1" and content["complete"]
    rows = content["rows"]
    assert {row["name"] for row in rows} >= _NAMES and content["skipped"] == []
    assert all(row["wrong"] == 0 for row in rows)
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
    assert {row["bytes"] for row in rows if row["name"] == "put"} == {8, 1024, 65536, 1048576}
    compared = {row["backend"] for row in rows if row["name"] == "all_reduce"}
    assert compared == {"gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"}
