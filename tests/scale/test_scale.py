"""Jobs with one and two ranks as real processes: a planted cause is found, and only then."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from worlds import run_tutti, start_warm

SCRIPT = Path(__file__).parent / "plain_training.py"
SLEEP_S = 0.1  # in that script
SHORT = ["--steps", "8", "--settle", "2", "--active", "4"]
LENET = ["--recipe", "lenet", "--dataset", "synthetic", "--pixels", "8", "--device", "cpu"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Scale a script under torchrun with two equally slow ranks. It would train 100,000 steps."""
    out = tmp_path_factory.mktemp("even") / "out"
    words = ["scale", "--ranks", "1,2", "--repeats", "1", *SHORT, "--out", out]
    program = [*TORCHRUN, "--nproc-per-node", "{ranks}", SCRIPT, "100000"]
    words += ["--json", out.parent / "copy.json"]
    done = run_tutti(*words, "--", *program, env={"SLEEPS": "all"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out.parent / "copy.json").read_text())["rows"]
    return _results(out, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Scale the script with rank 1 late, and press Ctrl-C at the beginning of the third run."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    words = ["scale", "--ranks", "1,2", "--repeats", "2", *SHORT, "--out", out]
    command = ["-m", "tutti", *words, "--", "python", SCRIPT, "100000"]
    with start_warm(command) as process:
        assert process.stderr is not None
        progress = ""
        while "[3/4]" not in progress and (character := process.stderr.read(1)):
            progress += character
        process.send_signal(signal.SIGINT)
        out_text, err_text = process.communicate(timeout=60)
    results = _results(out, out_text, progress + err_text)
    return results | {"code": process.returncode}


def _results(out: Path, printed: str, errors: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "scale.json").read_text())
    return content | {"out": out, "printed": printed, "errors": errors}


def _seconds(row: dict[str, Any], cause: str) -> float:
    return float(row["loss"][cause] * row["step_s"])


@pytest.mark.measured
def test_a_rank_that_sleeps_is_the_largest_cause(stopped: dict[str, Any]) -> None:
    row = stopped["rows"][1]

    assert max(row["loss"], key=lambda name: row["loss"][name]) == "wait"
    assert _seconds(row, "wait") > SLEEP_S / 2
    assert row["named"][0] == "wait"
    assert row["late"]["rank"] == 1
    assert "rank 1 spends" in " ".join(stopped["printed"].split())
    assert f"tutti profile --trace {stopped['out']}/ranks2-repeat0" in stopped["printed"]


@pytest.mark.measured
def test_equally_slow_ranks_do_not_wait(even: dict[str, Any]) -> None:
    """Both sleep, so no rank waits: the time is a gap on each rank."""
    row = even["rows"][1]

    assert row["named"][0] == "gaps"
    assert row["verdict"] in " ".join(even["printed"].split())
    assert _seconds(row, "wait") < SLEEP_S / 2


def test_causes_of_real_runs_add_up_to_the_lost_efficiency(
    even: dict[str, Any], stopped: dict[str, Any]
) -> None:
    for results in (even, stopped):
        base, row = results["rows"]
        assert (base["ranks"], base["efficiency"], base["speedup"]) == (1, 1.0, 1.0)
        assert sum(base["loss"].values()) == pytest.approx(0, abs=1e-9)
        assert row["ranks"] == 2
        assert row["speedup"] == pytest.approx(2 * row["efficiency"])
        assert sum(row["loss"].values()) == pytest.approx(1 - row["efficiency"], abs=1e-9)
        assert sum(row["other"].values()) == pytest.approx(row["loss"]["other"], abs=1e-9)


def test_an_unchanged_accelerate_script_is_explained(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "profile" / "plain_accelerate.py"
    words = ["scale", "--ranks", "1,2", "--repeats", "1", *SHORT, "--out", tmp_path / "out"]

    done = run_tutti(*words, "--", "python", script, "3000")

    assert done.returncode == 0, done.stdout + done.stderr
    row = _results(tmp_path / "out", done.stdout, done.stderr)["rows"][1]
    assert row["ranks"] == 2
    assert row["samples_per_s"] == pytest.approx(2 * 16 / row["step_s"])
    assert sum(row["loss"].values()) == pytest.approx(1 - row["efficiency"], abs=1e-9)


def test_the_json_has_the_documented_keys(even: dict[str, Any]) -> None:
    assert even["schema"] == "tutti.scale/1"
    assert {"environment", "command", "fit", "forecast", "sweep", "runs"} <= set(even)
    assert (even["mode"], even["unit"]) == ("weak", "samples/s")
    for row in even["rows"]:
        # 16 samples on each rank, according to its DataLoader.
        assert row["samples_per_s"] == pytest.approx(16 * row["ranks"] / row["step_s"])
        assert len(row["samples_per_s_spread"]) == len(row["efficiency_spread"]) == 2
        assert set(row["loss"]) == {"exposed_comm", "wait", "bubble", "input", "compute", "other"}
        assert set(row["loss_quartiles"]) == {*row["loss"], *row["other"]}
        assert row["repeats"] == 1
    fit = even["fit"]
    assert fit["alpha_s"] > 0 or fit["beta_s_per_byte"] > 0
    assert {point["op"] for point in fit["points"]} == {"all_reduce"}
    assert all(point["ranks"] == 2 for point in fit["points"])
    assert [row["ranks"] for row in even["forecast"]["rows"]] == [4, 8, 16, 32]
    assert set(even["forecast"]["below"]) == {"0.9", "0.8", "0.5"}


def test_every_run_keeps_its_traces_and_its_log(even: dict[str, Any]) -> None:
    out = even["out"]

    assert (out / "ranks1-repeat0" / "traces" / "rank0.json.gz").is_file()
    assert len(list((out / "ranks2-repeat0" / "traces").iterdir())) == 2
    assert (out / "logs" / "ranks2-repeat0.log").is_file()
    assert even["complete"] is True


def test_the_table_fits_80_columns(even: dict[str, Any], stopped: dict[str, Any]) -> None:
    for results in (even, stopped):
        lines = results["printed"].splitlines()
        assert max(len(line) for line in lines if "profile --trace" not in line) <= 80
        assert "efficiency" in results["printed"] and "forecast" in results["printed"]


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(stopped: dict[str, Any]) -> None:
    assert stopped["code"] == 130
    assert stopped["complete"] is False
    assert [(run["ranks"], run["repeat"]) for run in stopped["runs"]] == [(1, 0), (2, 0)]
    assert "stopped" in stopped["errors"]
    mark = str(stopped["out"]).encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert mark not in environment.read_bytes(), environment
        except (PermissionError, ProcessLookupError, FileNotFoundError):
            continue


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """LeNet with a batch of 32, shared by two ranks."""
    out = tmp_path_factory.mktemp("recipe") / "out"
    words = ["scale", "--ranks", "1,2", "--repeats", "1", *SHORT, "--out", out]
    done = run_tutti(*words, *LENET, "--lr", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    return _results(out, done.stdout, done.stderr)


def test_a_recipe_shares_its_batch_in_strong_scaling(recipe: dict[str, Any]) -> None:
    assert recipe["mode"] == "strong"
    assert [run["samples_per_step"] for run in recipe["runs"]] == [32, 32]
    row = recipe["rows"][1]
    assert sum(row["loss"].values()) == pytest.approx(1 - row["efficiency"], abs=1e-9)
    run = recipe["out"] / "ranks2-repeat0"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["plan"]["rank_batch"] == 16 and summary["plan"]["peak_lr"] == 0.01
    assert summary["steps"] == 1 + 2 + 8 + 2 + 4
    assert not (run / "checkpoints").exists()


def test_a_sweep_runs_every_value(tmp_path: Path) -> None:
    words = ["scale", "--ranks", "1", "--repeats", "1", *SHORT, "--out", tmp_path / "out"]
    words += ["--mode", "weak", *LENET, "--sweep", "batch=4,64"]
    done = run_tutti(*words)
    rows = json.loads((tmp_path / "out" / "scale.json").read_text())["sweep"]

    assert done.returncode == 0, done.stderr
    assert [row["flags"] for row in rows] == [{"batch": "4"}, {"batch": "64"}]
    assert [row["samples_per_s"] * row["step_s"] for row in rows] == [
        pytest.approx(4),
        pytest.approx(64),
    ]
    assert [row["best"] for row in rows] == [False, False]
    assert "--repeats 3" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--recipe", "gpt"], "--ranks is required"),
        (["--ranks", "1,two", "--recipe", "gpt"], "whole numbers"),
        (["--ranks", "1,2"], "there is no job to run"),
        (["--ranks", "1,2", "train.py"], "-- train.py"),
        (["--ranks", "1,2", "--recipe", "gpt", "--bach", "3"], "did you mean --batch?"),
        (["--ranks", "1,2", "--mode", "wek", "--recipe", "gpt"], "--mode"),
        (["--ranks", "1,3", "--recipe", "gpt"], "--mode weak"),
        (["--ranks", "1,2", "--mode", "weak", "--recipe", "gpt", "--global-batch", "8"], "--batch"),
        (["--ranks", "1,2", "--recipe", "gpt", "--sweep", "bucket-mb"], "at least two values"),
        (
            ["--ranks", "1,2", "--recipe", "gpt", "--sweep", "bucket=1,2"],
            "did you mean --bucket-mb",
        ),
        (["--ranks", "1,2", "--sweep", "lr=1,2", "--", str(SCRIPT)], "needs --recipe"),
        (
            ["--ranks", "1,2", "--until-clear", "--recipe", "gpt", "--sweep", "bucket-mb=1,2"],
            "--until-clear does not work with --sweep",
        ),
        (["--ranks", "1,2", "--lr", "1", "--", str(SCRIPT)], "no flag --lr"),
        (["--ranks", "1,2", "--", "nothing.py"], "does not exist"),
        (["--ranks", "1,2", "--", "torchrun", "--nproc-per-node", "2", "t.py"], "{ranks}"),
        (["--ranks", "1,2", "--", "mpirun.mpich", "t.py"], "mpirun -n {ranks}"),
        (
            ["--ranks", "1,2", "--repeats", "0", "--recipe", "gpt"],
            "--repeats must be at least 1, got 0",
        ),
    ],
)
def test_wrong_usage_names_the_flag_and_the_cure(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tutti.cli import run_cli

    for name in {"RANK", "WORLD_SIZE"} & set(os.environ):
        monkeypatch.delenv(name)

    assert run_cli(["scale", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tutti scale: ") and error.count("\n") == 1
    assert expected in error


def test_too_few_steps_report_the_number_that_is_needed(tmp_path: Path) -> None:
    words = ["scale", "--ranks", "1", *SHORT, "--out", tmp_path / "out"]
    done = run_tutti(*words, "--", SCRIPT, "3")

    assert done.returncode == 2
    assert "must take 17 steps" in done.stderr and "--steps" in done.stderr


def test_a_failing_program_is_explained_by_its_first_error(tmp_path: Path) -> None:
    """Rank 2 fails. The other ranks lose their connection to it and print longer tracebacks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 2:\n"
        "    raise ValueError('a planted error')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    out = tmp_path / "out"
    done = run_tutti("scale", "--ranks", "3", *SHORT, "--out", out, "--", script)

    assert done.returncode == 1
    assert "ValueError: a planted error" in done.stderr and "closed by peer" not in done.stderr
    assert "rank 2 on" in done.stderr
