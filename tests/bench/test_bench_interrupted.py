"""Interrupted benches: ranks end at once, and result files keep the results so far."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from warm import WarmProcess
from worlds import TUTTI, clean_environment, start_warm

# Ctrl-C arrives while ranks import torch; the import of rank 0 ignores KeyboardInterrupt.
_SLOW_IMPORT = """
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
def started(*words: str | Path, **env: str) -> Iterator[WarmProcess]:
    """A bench in its own session; killed at the end of the block."""
    with start_warm(["-m", "tutti", "bench", *words], env) as process:
        try:
            yield process
        finally:
            process.kill()  # its ranks end with it


def wait_for(files: list[Path], process: WarmProcess | subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{files} were not written"
        time.sleep(0.02)


def test_ctrl_c_ends_starting_ranks_even_if_an_import_ignores_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW_IMPORT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [*TUTTI, "bench", "collectives", "-n", "2", "--device", "cpu"],
        env=clean_environment() | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for([tmp_path / "importing0", tmp_path / "importing1"], process)
        os.killpg(process.pid, signal.SIGINT)
        # If rank 0 continued, it would wait for rank 1 for the whole grace period of 30 s.
        _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "stopped by SIGINT: all 2 ranks have ended" in err


# Each bench runs long enough after its first row to be killed while it measures.
_LONG = {
    "collectives": ["--sizes", "4:64M:x2", "--backends", "gloo"],
    "bandwidth": ["--sizes", "64K", "--only", "pairs", "--budget", "2", "--backend", "gloo"],
    "pairs": ["--only", "grouped,overlap", "--quick", "--budget", "30"],
    "symmetric": ["--sizes", "1K", "--budget", "1"],
}


@pytest.mark.parametrize("bench", _LONG)
def test_ctrl_c_keeps_the_results_so_far(bench: str, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    flags = ["-n", "2", "--device", "cpu", *_LONG[bench], "--json", str(file)]
    with started(bench, *flags) as process:
        wait_for([file], process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    rows = check_partial_result(file, bench)
    assert f"# stopped: {len(rows)} " in out


@pytest.mark.parametrize("bench", _LONG)
def test_sigkill_keeps_the_results_so_far(bench: str, tmp_path: Path) -> None:
    file, table = tmp_path / "b.json", tmp_path / "b.csv"
    flags = ["-n", "2", "--device", "cpu", *_LONG[bench], "--json", str(file)]
    flags += ["--csv", str(table)] if bench == "collectives" else []
    # A killed process cannot remove its scratch directory.
    with started(bench, *flags, TMPDIR=str(tmp_path)) as process:
        wait_for([file], process)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        process.communicate(timeout=30)
        _, left = psutil.wait_procs(ranks, timeout=30)
    assert process.returncode not in (0, 2, 130) and not left
    rows = check_partial_result(file, bench)
    if bench == "collectives":
        # The CSV has a header, and is written before the JSON.
        assert len(table.read_text().splitlines()) >= 1 + len(rows)


def test_a_killed_rank_fails_its_case_and_new_ranks_measure_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    flags = ["-n", "2", "--device", "cpu", *_LONG["collectives"], "--json", str(file)]
    with started("collectives", *flags) as process:
        wait_for([file], process)
        psutil.Process(process.pid).children()[1].kill()
        deadline = time.monotonic() + 60
        while not json.loads(file.read_text()).get("failed"):
            assert process.poll() is None and time.monotonic() < deadline, file.read_text()
            time.sleep(0.05)
        rows_before = len(json.loads(file.read_text())["rows"])
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    content = json.loads(file.read_text())
    assert len(content["failed"]) == 1 and content["failed"][0]["error"], content["failed"]
    assert len(check_partial_result(file, "collectives")) >= rows_before


def check_partial_result(file: Path, bench: str) -> list[dict[str, Any]]:
    """Check that the file is a partial result, and return its rows."""
    content = json.loads(file.read_text())
    rows: list[dict[str, Any]] = content["pairs" if bench == "bandwidth" else "rows"]
    assert content["complete"] is False and rows
    assert content["schema"] == f"tutti.bench.{bench}/1" and content["environment"]
    assert all(row.get("wrong", 0) == 0 for row in rows)
    return rows


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun.openmpi") is None,
    reason="needs mpi4py and Open MPI",
)
def test_ctrl_c_under_mpirun_keeps_the_results_so_far(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--backends", "gloo,mpi", "--json", tmp_path / "b.json"]
    with started("collectives", *flags) as process:
        assert process.stdout is not None
        while process.stdout.readline().startswith("#"):
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    check_partial_result(tmp_path / "b.json", "collectives")


@pytest.mark.parametrize("kind", ["collectives", "symmetric"])
def test_a_closed_output_pipe_does_not_stop_the_measurement(kind: str, tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--sizes", "4,1K", "--budget", "0.01"]
    with started(kind, *flags, "--json", tmp_path / "b.json") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("# rank 0")
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0 and err == "", err
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["complete"] and content["rows"]
