"""tutti bench: wrong flags of every kind; table, result files and mpirun of collectives."""

import csv
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from worlds import TUTTI, run_command, run_tutti

BENCH = ["bench", "collectives", "--device", "cpu"]
SHORT = ["--budget", "0.01", "--backends", "gloo"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no kind of bench. Add one of collectives, "),
        (["colectives"], "no kind 'colectives': did you mean collectives?"),
        (["collectives", "--ops", "al_reduce"], "'al_reduce': did you mean all_reduce?"),
        (["collectives", "--backends", "goo"], "--backends has no 'goo': choose from gloo, shm, "),
        (["collectives", "--backends", "gloo,gloo"], "--backends gloo,gloo has gloo twice"),
        (["collectives", "--sizes", "4:1K:x1"], "--sizes 4:1K:x1: 4:1K:x1: with the step x1"),
        (
            ["collectives", "--iterations", "few"],
            "--iterations must be auto or a positive number, got few",
        ),
        (["collectives", "--group", "0"], "--group must be 1 (no groups) or more"),
        (["collectives", "--budget", "0"], "--budget must be seconds above 0, such as 0.5"),
        (["collectives", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["collectives", "--json", "/proc/nowhere/x"], "--json /proc/nowhere/x"),
        (["collectives", "--csv", "/"], "--csv /: is a directory"),
        (["collectives", "--siezs", "4"], "no flag --siezs: did you mean --sizes?"),
        (["bandwidth", "--only", "pears"], "no part 'pears': did you mean pairs?"),
        (["bandwidth", "--sizes", "12Q"], "'12Q' is not a size"),
        (
            ["bandwidth", "--backend", "nccl", "--device", "cpu"],
            "--backend nccl communicates CUDA tensors only",
        ),
        (["bandwidth", "--ranks", "1", "--device", "cpu"], "--ranks 1: one rank on a CPU has no"),
        (["bandwidth", "--pin", "0/x"], "--pin must be own, none, or one CPU list per rank"),
        (["bandwidth", "--budget", "-1"], "--budget must be seconds above 0"),
        (["bandwidth", "--expect", "/nowhere.toml"], "--expect /nowhere.toml: No such file"),
        (["bandwidth", "--json", "/proc/nowhere/x"], "--json /proc/nowhere/x"),
        (["pairs", "--only", "overlapp"], "no pair 'overlapp': did you mean overlap?"),
        (["pairs", "--only", "shm,shm"], "--only shm,shm has shm twice"),
        (["pairs", "--file", "nowhere.py"], "--file nowhere.py does not exist"),
        (["pairs", "--rounds", "0"], "--rounds must be 1 or more"),
        (["pairs", "--budget", "-1"], "--budget must be seconds above 0"),
        (["symmetric", "--ranks", "1"], "--ranks must be at least 2"),
    ],
)
def test_wrong_flags_give_one_line_before_ranks_start(arguments: list[str], message: str) -> None:
    done = run_tutti("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_sizes_beyond_host_memory_are_refused_before_measuring() -> None:
    done = run_tutti(*BENCH, *SHORT, "--sizes", "1K,1024G")
    assert done.returncode == 2 and not done.stdout
    assert "--sizes 1024G: 2 ranks on a host need" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_sweep_prints_a_table_and_writes_json_and_csv(tmp_path: Path) -> None:
    files = ["--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv"]
    kinds = ["--ops", "all_reduce,all_to_all", "--sizes", "4,1K", "--placement", "both"]
    done = run_tutti(*BENCH, *SHORT, *kinds, "--spread", *files)
    assert done.returncode == 0, done.stderr
    assert "# rank 1: " in done.stdout and "pinned to CPU" in done.stdout
    assert "out-of-place" in done.stdout and "cv%" in done.stdout
    head = next(line for line in done.stdout.splitlines() if "busbw" in line)
    assert head.split()[1:6] == [
        "size",
        "count",
        "type",
        "redop",
        "root",
    ]  # the order of nccl-tests
    assert "# Out of bounds values : 0 OK" in done.stdout
    content = json.loads((tmp_path / "b.json").read_text())
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


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun.openmpi") is None,
    reason="needs mpi4py and Open MPI",
)
def test_open_mpi_runs_every_operation(tmp_path: Path) -> None:
    flags = ["--backends", "gloo,mpi", "--ops", "all", "--placement", "both", "--sizes", "4,100K"]
    done = run_tutti(*BENCH, *flags, "--budget", "0.01", "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    measured = [sum(row["backend"] == name for row in rows) for name in ("gloo", "mpi")]
    assert measured == [37, 37] and all(row["wrong"] == 0 for row in rows)


def test_a_case_that_crashes_on_one_rank_is_listed_and_the_others_are_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from tutti.bench.collectives.interleaved_sweep import Sweep\n"
        "    original = Sweep._interleave\n"
        "    def planted(self, case, *rest):\n"
        "        if case.bytes == 1024:\n"
        "            raise RuntimeError('a planted error')\n"
        "        return original(self, case, *rest)\n"
        "    Sweep._interleave = planted\n"
    )
    file = tmp_path / "bench.json"
    flags = ["--ranks", 2, "--device", "cpu", "--sizes", "1K,4K", "--budget", "0.01"]
    done = run_command(
        [*TUTTI, "bench", "collectives", *map(str, flags), "--json", file],
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads(file.read_text())
    error = "rank 1: RuntimeError: a planted error"
    assert content["failed"] == [{"case": "all_reduce of 1K", "error": error}]
    assert {row["bytes"] for row in content["rows"]} == {4096} and content["complete"]
    assert f"all_reduce of 1K failed: {error}" in done.stdout


def test_a_pair_or_probe_that_crashes_is_listed_and_the_others_are_measured(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from tutti.bench.bandwidth.point_to_point import TrafficMeter\n"
        "    from tutti.bench.symmetric_bench import SymmetricBench\n"
        "    original_measure, original_round = TrafficMeter._measure, SymmetricBench._round\n"
        "    def measure(self, traffic):\n"
        "        if traffic.flows == ((1, 0),):\n"
        "            raise RuntimeError('a planted error')\n"
        "        return original_measure(self, traffic)\n"
        "    def round_(self, probe):\n"
        "        if probe.case == 'hash map':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return original_round(self, probe)\n"
        "    TrafficMeter._measure, SymmetricBench._round = measure, round_\n"
    )
    for bench, flags, case, error in (
        ("bandwidth", ["--only", "pairs"], "one way 1→0 of 1K", "rank 1: RuntimeError: a planted"),
        ("symmetric", [], "hash map", "killed by SIGKILL"),
    ):
        file = tmp_path / f"{bench}.json"
        flags += ["--ranks", "2", "--device", "cpu", "--sizes", "1K", "--budget", "0.01"]
        done = run_command(
            [*TUTTI, "bench", bench, *flags, "--json", file], env={"PYTHONPATH": str(tmp_path)}
        )
        assert done.returncode == 1, done.stdout + done.stderr
        content = json.loads(file.read_text())
        (failed,) = content["failed"]
        assert failed["case"] == case and error in failed["error"], failed
        assert f"{case} failed: " in done.stdout and content["complete"]
        if bench == "bandwidth":
            speeds = {(row["src"], row["dst"]): row["gbs_uni"] for row in content["pairs"]}
            assert speeds[0, 1] > 0 and speeds.get((1, 0)) is None
        else:
            names = {row["name"] for row in content["rows"]}
            assert {"put", "all_reduce"} <= names and "hash map insert" not in names, names
