"""tutti bench that is ended before its time: what it leaves, and that it leaves at once."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from worlds import TUTTI, clean_environment

# A rank that is importing torch when Ctrl-C comes; rank 0's import swallows it, as torch's may.
_SWALLOWS = """
import os, sys, time
from pathlib import Path

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "RANK" in os.environ:
            sys.meta_path.remove(self)
            Path(__file__).with_name(f"importing{os.environ['RANK']}").touch()
            try:
                time.sleep(20)
            except KeyboardInterrupt:
                if os.environ["RANK"] != "0":
                    raise

sys.meta_path.insert(0, Slow())
"""


@contextmanager
def started(*words: str | Path, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """A bench in a session of its own; nothing of it is left when the block is."""
    process = subprocess.Popen(
        [str(word) for word in [*TUTTI, "bench", *words]],
        env=clean_environment() | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # its ranks go with it
        process.communicate()


def wait_for(files: list[Path], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{files} did not come"
        time.sleep(0.02)


def test_ctrl_c_ends_ranks_that_are_still_starting_though_an_import_swallows_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SWALLOWS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with started("collectives", "-n", "2", "--device", "cpu", PYTHONPATH=path) as process:
        wait_for([tmp_path / "importing0", tmp_path / "importing1"], process)
        os.killpg(process.pid, signal.SIGINT)
        # Rank 0 would wait for rank 1 at the roll call, until the 30 s of grace are over.
        _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "stopped by SIGINT: all 2 ranks have ended" in err


# Each takes long enough after its first row to be killed in the midst of it.
_LONG = {
    "collectives": ["--sizes", "4:64M:x2", "--backends", "gloo"],
    "bandwidth": ["--sizes", "64K", "--only", "pairs", "--budget", "2", "--backend", "gloo"],
    "pairs": ["--only", "grouped,overlap", "--quick", "--budget", "30"],
    "symmetric": ["--sizes", "1K", "--budget", "1"],
}


@pytest.mark.parametrize(
    ("bench", "victim"), [(bench, "parent") for bench in _LONG] + [("collectives", "rank 1")]
)
def test_kill_9_leaves_what_was_measured(bench: str, victim: str, tmp_path: Path) -> None:
    file, table = tmp_path / "b.json", tmp_path / "b.csv"
    flags = ["-n", "2", "--device", "cpu", *_LONG[bench], "--json", str(file)]
    flags += ["--csv", str(table)] if bench == "collectives" else []
    # Who is killed cannot take its scratch directory away.
    with started(bench, *flags, TMPDIR=str(tmp_path)) as process:
        wait_for([file], process)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        (process if victim == "parent" else ranks[1]).kill()
        process.communicate(timeout=30)
        _, left = psutil.wait_procs(ranks, timeout=30)
    assert process.returncode not in (0, 2, 130) and not left
    content = json.loads(file.read_text())
    rows = content["pairs" if bench == "bandwidth" else "rows"]
    assert content["complete"] is False and rows
    assert content["schema"] == f"tutti.bench.{bench}/1" and content["environment"]
    assert all(row.get("wrong", 0) == 0 for row in rows)
    if bench == "collectives":
        assert len(table.read_text().splitlines()) >= 1 + len(rows)  # a head; it is written first
