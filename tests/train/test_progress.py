"""Progress on a terminal and in a pipe; norm, rates and memory in the metrics; W&B."""

import csv
import fcntl
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest

from worlds import run_tutti, start_warm

LENET = ["train", "--recipe", "lenet", "--pixels", "8", "--steps", "30", "--device", "cpu"]


def terminal_lines(program: Path, columns: int) -> list[str]:
    """Run a Python program whose standard error is a terminal. Return what the terminal shows."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    output = b""
    with start_warm([program, os.ttyname(terminal)]) as process:
        process.communicate(timeout=60)
    os.set_blocking(main, False)
    while True:
        try:
            output += os.read(main, 1 << 16)
        except BlockingIOError:
            break
    os.close(main)
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", output.decode())  # colours
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", text)  # movements of the cursor
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


PROGRAM = """
import os, sys
os.dup2(os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY), 2)
sys.stderr = os.fdopen(2, "w", closefd=False)
from tutti.train.telemetry import ProgressReport
parts = [("loss 2.3456", "loss 2.35"), ("1,234,567 tokens/s", "1.23M tok/s")]
parts += [("memory 12.3 GiB", "12.3 GiB"), ("1,234 samples/s", "1.23k/s")]
progress = ProgressReport(40_000, 0, shown=True)
progress.show(12_345, parts)
progress._bar.refresh()
progress.announce("step 12345: evaluating on the test set", "evaluating")
progress._bar.refresh()
progress.close()
"""


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_the_bar_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = terminal_lines(tmp_path / "program.py", columns)
    assert max(map(len, lines)) <= columns and "…" not in "".join(lines)
    shown = next(line for line in lines if "12345/40000 " in line and "loss" in line)
    for expected in {
        120: ["loss 2.3456", "1,234,567 tokens/s", "memory 12.3 GiB", "1,234 samples/s"],
        80: ["loss 2.3456", "1,234,567 tokens/s", "memory 12.3 GiB"],
        60: ["loss 2.35", "1.23M tok/s", "12.3 GiB"],
        40: ["loss 2.35"],
    }[columns]:
        assert expected in shown
    assert re.search(r"\d:\d\d:\d\d|-:--:--", shown)  # the remaining time
    assert any("evaluating" in line for line in lines)


def test_a_pipe_gets_lines_and_metrics_have_norm_rates_and_memory(tmp_path: Path) -> None:
    flags = ["train", "--recipe", "gpt", "--dataset", "synthetic", "--seq-len", "8", "--layers"]
    flags += ["1", "--dim", "16", "--heads", "2", "--steps", "12", "--no-evaluate"]
    done = run_tutti(*flags, "--ranks", "2", "--device", "cpu", "--out", tmp_path / "gpt")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr
    assert re.search(
        r"step 12/12: loss [\d.]+  [\d,]+ tokens/s  memory [\d.]+ MiB  [\d,]+ samp", done.stderr
    )
    for rank in (0, 1):
        text = (tmp_path / "gpt" / "metrics" / f"rank{rank}.jsonl").read_text()
        row = [json.loads(line) for line in text.splitlines() if "tokens_per_s" in line][-1]
        assert row["tokens_per_s"] == pytest.approx(8 * row["samples_per_s"])
        assert row["peak_memory_bytes"] > 1 << 20
    with (tmp_path / "gpt" / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["grad_norm"]) > 0 and float(last["tokens_per_s"]) > 0


# Stands for the package wandb: the same three calls, which are written to a file.
WANDB = """
import json, os

def init(**arguments):
    if "WANDB_FAILS" in os.environ:
        raise RuntimeError("No API key configured.")
    return Run(arguments)

class Run:
    def __init__(self, arguments):
        self.file = open("calls.jsonl", "a")
        self.write("init", arguments)

    def write(self, name, content):
        print(json.dumps([name, content]), file=self.file, flush=True)

    def log(self, values, step):
        if "LOG_FAILS" in os.environ and step == 3:
            raise ConnectionError("the server is gone.")
        self.write("log", {"step": step, **values})

    def finish(self, exit_code=None):
        self.write("finish", exit_code)
"""


def test_wandb_gets_every_metric_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = [*LENET, "--ranks", "2", "--wandb", "project", "--out", "run"]
    failing = run_tutti(*words, cwd=tmp_path, env={**env, "WANDB_FAILS": "1"})
    assert failing.returncode == 2 and "No API key configured. Run wandb login" in failing.stderr
    assert not (tmp_path / "run").exists()
    for more in ([], ["--resume", "--steps", "40"]):
        done = run_tutti(*words, *more, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "calls.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    starts = [content for name, content in calls if name == "init"]
    assert [name for name, _ in calls].count("finish") == 2 == len(starts)  # only rank 0
    assert starts[0]["project"] == "project" and starts[0]["config"]["optimization"]["lr"] == 0.05
    assert starts[0]["id"] == starts[1]["id"]
    assert (starts[0]["resume"], starts[1]["resume"]) == (None, "allow")
    logged = [content for name, content in calls if name == "log"]
    assert sorted({row["step"] for row in logged if "loss" in row}) == [*range(40)]
    keys = {key for row in logged for key in row}
    assert {"lr", "grad_norm", "samples_per_s", "test_loss", "test_accuracy"} <= keys


def test_wandb_errors_do_not_end_a_run_and_failed_runs_are_marked(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = [*LENET, "--wandb", "project"]
    done = run_tutti(*words, "--out", "cut", cwd=tmp_path, env={**env, "LOG_FAILS": "1"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "could not be written: metrics in W&B: the server is gone." in done.stderr
    assert "Free space" not in done.stderr
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["steps"] == 30
    # A complete run that is resumed is finished, too. A run whose loss is not finite has failed.
    for more in (["--out", "good"], ["--out", "good", "--resume"]):
        assert run_tutti(*words, *more, cwd=tmp_path, env=env).returncode == 0
    done = run_tutti(*words, "--lr", "1e30", "--out", "bad", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [content for name, content in calls if name == "finish"] == [0, 0, 1]
