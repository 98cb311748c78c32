"""tutti bench collectives: wrong flags, table, result files, Ctrl-C, mpirun."""

import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from worlds import TUTTI, clean_environment, run_command, run_tutti

BENCH = ["bench", "collectives", "--device", "cpu"]
SHORT = ["--budget", "0.01", "--backends", "gloo"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which kind? tutti bench collectives"),
        (["colectives"], "no kind 'colectives': did you mean collectives?"),
        (["collectives", "--ops", "al_reduce"], "'al_reduce': did you mean all_reduce?"),
        (["collectives", "--backends", "goo"], "no backend 'goo': there are gloo, shm, "),
        (["collectives", "--backends", "gloo,gloo"], "--backends gloo,gloo: gloo is named twice"),
        (["collectives", "--sizes", "4:1K:x1"], "--sizes 4:1K:x1: 4:1K:x1: with the step x1"),
        (["collectives", "--iterations", "few"], "--iterations few: use auto, or a number"),
        (["collectives", "--group", "0"], "--group 0: use 1 (no groups) or more calls"),
        (["collectives", "--budget", "0"], "--budget 0.0: give seconds above 0, such as 0.5"),
        (["collectives", "--ranks", "0"], "--ranks 0: a world has at least one rank"),
        (["collectives", "--json", "/proc/nowhere/x"], "--json /proc/nowhere/x"),
        (["collectives", "--csv", "/"], "--csv /: is a directory"),
        (["collectives", "--siezs", "4"], "no flag --siezs: did you mean --sizes?"),
    ],
)
def test_wrong_flags_give_one_line_before_ranks_start(arguments: list[str], message: str) -> None:
    done = run_command([*TUTTI, "bench", *arguments])
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_sizes_beyond_host_memory_are_refused_before_measuring() -> None:
    done = run_tutti(*BENCH, *SHORT, "--sizes", "1K,1024G")
    assert done.returncode == 2 and not done.stdout
    assert "--sizes 1024G: 2 ranks on a host need" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_sweep_prints_a_table_and_writes_json_and_csv(tmp_path: Path) -> None:
    files = ["--json", tmp_path / "new" / "b.json", "--csv", tmp_path / "b.csv"]
    kinds = ["--ops", "all_reduce,all_to_all", "--sizes", "4,1K", "--placement", "both"]
    done = run_tutti(*BENCH, *SHORT, *kinds, "--spread", *files)
    assert done.returncode == 0, done.stderr
    assert "# rank 1: " in done.stdout and "pinned to CPU" in done.stdout
    assert "out-of-place" in done.stdout and "cv%" in done.stdout
    head = next(line for line in done.stdout.splitlines() if "busbw" in line)
    assert head.split()[1:6] == ["size", "count", "type", "redop", "root"]  # as nccl-tests has them
    assert "# Out of bounds values : 0 OK" in done.stdout
    content = json.loads((tmp_path / "new" / "b.json").read_text())
    assert content["schema"] == "tutti.bench.collectives/1" and content["complete"]
    assert content["environment"]["versions"]["torch"] and "--ops" in content["command"]
    if len(os.sched_getaffinity(0)) > 1:  # every rank has a core of its own
        (trip,) = content["round_trips"]
        assert trip["ranks"] == [0, 1] and trip["before_ns"] > 0 and trip["after_ns"] > 0
        assert "# cores: cache-line round trip between ranks 0 and 1: " in done.stdout
    found = [(row["op"], row["bytes"], row["placement"]) for row in content["rows"]]
    assert found == [
        ("all_reduce", 4, "out"), ("all_reduce", 4, "in"),
        ("all_reduce", 1024, "out"), ("all_reduce", 1024, "in"),
        ("all_to_all", 8, "out"), ("all_to_all", 1024, "out"),
    ]  # fmt: skip
    with (tmp_path / "b.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["time_us_p50"] for line in lines] == [
        str(row["time_us"]["p50"]) for row in content["rows"]
    ]


def test_a_narrow_terminal_gets_short_lines(tmp_path: Path) -> None:
    flags = ["--sizes", "1K", "--group", "2"]
    done = run_tutti(*BENCH, *SHORT, *flags, env={"COLUMNS": "60"})
    rows = done.stdout.splitlines()
    assert done.returncode == 0 and max(map(len, rows)) <= 60, done.stdout
    assert sum(" gloo x2 " in line for line in rows) == 1


def test_an_unavailable_backend_exits_with_2() -> None:
    done = run_tutti(*BENCH, "--backends", "nccl", "--sizes", "4")
    assert done.returncode == 2 and "nccl: NCCL communicates CUDA tensors only" in done.stderr


@pytest.mark.parametrize("kind", ["collectives", "symmetric"])
def test_a_closed_output_pipe_does_not_stop_the_measurement(kind: str, tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--sizes", "4,1K", "--budget", "0.01"]
    process = subprocess.Popen(
        [*TUTTI, "bench", kind, *flags, "--json", str(tmp_path / "b.json")],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("# rank 0")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0 and err == "", err
    process.stderr.close()
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["complete"] and content["rows"]


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun.openmpi") is None,
    reason="needs mpi4py and Open MPI",
)
def test_open_mpi_runs_every_operation(tmp_path: Path) -> None:
    flags = ["--backends", "gloo,mpi", "--ops", "all", "--placement", "both", "--sizes", "4,100K"]
    done = run_command([*TUTTI, *BENCH, *flags, "--budget", "0.01", "--json", tmp_path / "b.json"])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    measured = [sum(row["backend"] == name for row in rows) for name in ("gloo", "mpi")]
    assert measured == [37, 37] and all(row["wrong"] == 0 for row in rows)


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun.openmpi") is None,
    reason="needs mpi4py and Open MPI",
)
def test_ctrl_c_under_mpirun_keeps_what_was_measured(tmp_path: Path) -> None:
    flags = ["--backends", "gloo,mpi", "--json", str(tmp_path / "b.json")]
    process = subprocess.Popen(
        [*TUTTI, *BENCH, *flags],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while process.stdout.readline().startswith("#"):
        pass
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 60
    content = json.loads((tmp_path / "b.json").read_text())
    assert not content["complete"] and content["rows"]
