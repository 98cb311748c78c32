"""Capture inside this process: its schedule, other profilers, existing traces."""

import os
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tutti.cli.train import main as train
from tutti.profile.capture import Capture
from tutti.profile.captured_command import resolve_command
from tutti.profile.trace_file import TraceFile
from tutti.profile.trace_reader import read_rank
from tutti.world.errors import UsageError
from worlds import run_warm


def _step() -> None:
    torch.ones(4, requires_grad=True).sum().backward()


def _metadata(directory: Path, rank: int = 0) -> dict[str, Any]:
    file = TraceFile(directory / f"rank{rank}.json.gz")
    numbers = []
    for event in file.events():
        number = re.fullmatch(r"ProfilerStep#(\d+)", str(event.get("name")))
        if number and event.get("cat") == "user_annotation":
            numbers.append(int(number[1]))
    metadata: dict[str, Any] = file.metadata["tutti"]
    return {**metadata, "numbers": sorted(numbers)}


def test_a_loop_that_ends_early_records_the_number_of_complete_steps(tmp_path: Path) -> None:
    with Capture(tmp_path, wait=1, warmup=1, active=9) as capture:
        for _ in range(5):
            _step()
            capture.step()

    metadata = _metadata(tmp_path)
    assert metadata["numbers"] == [2, 3, 4, 5]  # torch closes the step that had begun
    assert metadata["steps"] == 5


def test_recorded_steps_have_no_page_faults_of_a_growing_heap(tmp_path: Path) -> None:
    """Each step has 2,000 operators, whose events need more than 1 MB."""
    program = tmp_path / "program.py"  # a new process: other tests changed the heap of this one
    program.write_text(
        "import sys, torch\n"
        "from tutti.profile.capture import Capture\n"
        "values = torch.ones(4)\n"
        "with Capture(sys.argv[1], wait=3, warmup=1, active=5) as capture:\n"
        "    for _ in range(9):\n"
        "        for _ in range(2000):\n"
        "            values.add_(1)\n"
        "        capture.step()\n"
    )
    done = run_warm([program, tmp_path])

    assert done.returncode == 0, done.stderr
    unrecorded, recorded = _metadata(tmp_path)["page_faults"]
    assert len(unrecorded) == 3 and len(recorded) == 5
    assert median(recorded) < 50  # without a prepared heap: more than 200


def test_unrecorded_steps_alternate_with_recorded_steps(tmp_path: Path) -> None:
    """4 of 6 unrecorded steps are moved between the 4 recorded steps. They record no operator."""
    with Capture(tmp_path, wait=6, warmup=1, active=4, interleave=8) as capture:
        for _ in range(11):
            _step()
            capture.step()

    metadata = _metadata(tmp_path)
    trace = read_rank(tmp_path / "rank0.json.gz")
    assert metadata["timed_steps"] == [0, 1, 4, 5, 7, 10] and metadata["interleaved"] == 4
    assert [step.number for step in trace.steps] == [3, 6, 8, 9]
    assert [len(values) for values in metadata["cpu_s"]] == [6, 4]
    computed = {
        number: trace.compute.between(step.start, step.end).seconds
        for number, step in zip([3, 6, 8, 9], trace.steps, strict=True)
    }
    assert all(seconds > 0 for seconds in computed.values())
    ends = [step.end for step in trace.steps]
    starts = [step.start for step in trace.steps]
    assert trace.compute.between(ends[0], starts[1]).seconds == 0  # steps 4 and 5
    with torch.profiler.profile() as profiler:  # operators are recorded again after the capture
        torch.ones(1).add(1)
    assert any(event.name == "aten::add" for event in profiler.events())


def test_a_program_without_an_optimizer_is_split_at_calls_of_its_module(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()
    head = torch.nn.Linear(4, 2).eval()  # called once
    capture = Capture(tmp_path, wait=1, warmup=1, active=3).follow_program()
    with torch.no_grad():
        head(torch.ones(1, 4))
        for _ in range(7):
            model(torch.ones(1, 4))

    metadata = _metadata(tmp_path)
    assert capture.path is not None
    assert (metadata["steps"], metadata["steps_of_module"]) == (5, "Sequential")
    trace = read_rank(capture.path)
    assert [each.number for each in trace.steps] == [2, 3, 4]


def test_a_capture_ends_beside_other_hooks_of_the_optimizer(tmp_path: Path) -> None:
    """The capture ends in its own hook, while torch calls the hooks one after another."""
    calls = []
    Capture(tmp_path, wait=1, warmup=1, active=3).follow_program()
    hook = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    finally:
        hook.remove()
    assert _metadata(tmp_path)["steps"] == 5 and len(calls) == 8


def test_an_evaluation_before_training_is_not_recorded(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    initialize = torch.optim.Optimizer.__init__
    Capture(tmp_path, wait=1, warmup=1, active=3).follow_program()
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(1, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    metadata = _metadata(tmp_path)
    assert (metadata["steps"], metadata["steps_of_module"]) == (5, None)
    assert torch.optim.Optimizer.__init__ is initialize


def test_a_finished_schedule_has_only_complete_steps(tmp_path: Path) -> None:
    with Capture(tmp_path, wait=1, warmup=1, active=2) as capture:
        for _ in range(9):
            _step()
            capture.step()

    metadata = _metadata(tmp_path)
    assert metadata["numbers"] == [2, 3]
    assert metadata["steps"] == 4


def test_nothing_is_written_before_a_recorded_step_has_ended(tmp_path: Path) -> None:
    with Capture(tmp_path, wait=1, warmup=1, active=2) as capture:
        for _ in range(2):
            _step()
            capture.step()

    assert capture.path is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wait", "warmup", "kept"),
    [(4, 2, 0), (8, 1, 3), (2, 5, 0)],  # while the capture warms up, while it records, before both
)
def test_a_profiler_that_the_program_starts_later_has_priority(
    wait: int, warmup: int, kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = torch.autograd.profiler.profile._prepare_trace
    optimizer = torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=0.1)
    Capture(tmp_path, wait=2, warmup=2, active=9).follow_program()
    schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule) as program_profiler:
        for _ in range(14):
            _step()
            optimizer.step()
            program_profiler.step()

    assert any(event.name == "aten::sum" for event in program_profiler.events())
    errors = capsys.readouterr().err
    assert errors.count("its own torch.profiler") == len(errors.splitlines()) == 1
    assert torch.autograd.profiler.profile._prepare_trace is original
    assert bool(kept) == (tmp_path / "rank0.json.gz").exists()
    if kept:
        assert _metadata(tmp_path)["steps"] == 2 + 2 + kept
    program_profiler.export_chrome_trace(str(tmp_path / "program.json"))
    first = wait + warmup
    assert [each.number for each in read_rank(tmp_path / "program.json").steps] == [
        first,
        first + 1,
    ]


def test_an_idle_profiler_of_the_program_marks_no_steps_in_the_captured_trace(
    tmp_path: Path,
) -> None:
    original = torch.profiler.profile.step
    optimizer = torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=0.1)
    Capture(tmp_path, wait=1, warmup=1, active=4).follow_program()
    schedule = torch.profiler.schedule(wait=50, warmup=1, active=2)
    with torch.profiler.profile(schedule=schedule) as program_profiler:
        for _ in range(8):
            _step()
            optimizer.step()
            program_profiler.step()

    assert [each.number for each in read_rank(tmp_path / "rank0.json.gz").steps] == [2, 3, 4, 5]
    assert torch.profiler.profile.step is original


def test_shapes_are_recorded_on_cpus_even_if_the_host_has_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler_options: dict[str, Any] = {}

    def profiler(**options: Any) -> Mock:
        profiler_options.update(options)
        return Mock()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    with Capture(tmp_path):
        pass

    assert profiler_options["record_shapes"] is True


def test_train_profile_enlarges_the_flight_recorder_before_the_first_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "")  # restored at the end
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    buffer_sizes = []

    def init(**_: Any) -> None:
        buffer_sizes.append(os.environ.get("TORCH_FR_BUFFER_SIZE"))
        raise UsageError("init is not needed here")

    monkeypatch.setattr("tutti.world.world.init", init)
    for flags in ([], ["--profile"]):
        with pytest.raises(UsageError):
            train(["--device", "cpu", *flags, "--out", str(tmp_path)])

    assert buffer_sizes == [None, "20000"]


def test_a_second_training_in_a_command_keeps_the_traces_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for active in (1, 2):
        with Capture(tmp_path, wait=0, warmup=0, active=active, replace=False) as capture:
            for _ in range(active):
                _step()
                capture.step()
        paths.append(capture.path)

    assert paths == [tmp_path / "rank0.json.gz", None]
    assert _metadata(tmp_path)["steps"] == 1
    errors = capsys.readouterr().err
    assert "rank0.json.gz already exists" in errors and len(errors.splitlines()) == 1


def test_a_loop_that_records_again_replaces_its_trace(tmp_path: Path) -> None:
    for active in (1, 2):
        with Capture(tmp_path, wait=0, warmup=0, active=active) as capture:
            for _ in range(active):
                _step()
                capture.step()

    assert _metadata(tmp_path)["steps"] == 2


def test_a_folder_does_not_hide_a_tutti_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()

    words = resolve_command(["train", "--ranks", "2"], ["train", "report"])

    assert words == [sys.executable, "-m", "tutti", "train", "--ranks", "2"]


def test_a_launcher_with_a_missing_script_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").touch()
    launched = ["python3", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with pytest.raises(UsageError, match=r"'missing\.py' does not exist"):
        resolve_command([*launched, "missing.py", "there.py"], [])
    for words in (["there.py", "new.py"], ["--rdzv-conf", "new.py", "there.py"]):
        assert resolve_command([*launched, *words], [])[1:] == [*launched[1:], *words]
