"""tutti profile: capture traces of a program, or read traces, and explain the steps."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING

from tutti.cli.flags import parse, split_at_command
from tutti.cli.results import check_writable, write_json
from tutti.measure.terminal import text_width
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.profile.captured_command import LauncherTask


@dataclass(frozen=True)
class Profile:
    """Explain where the time of a step goes on every rank, and which rank makes the others wait.

    tutti profile -- torchrun --nproc-per-node 2 train.py

    tutti profile -- train --recipe lenet --ranks 2

    tutti profile --trace DIR

    The first two capture: the program runs unchanged, and its optimizer marks the steps. The last
    reads torch.profiler traces of any program, one file for each rank.
    """

    trace: Path | None = None
    """Read the traces in this folder or run directory; nothing is started."""
    out: Path | None = None
    """The folder to capture into, as OUT/traces/rankN.json.gz (default: runs/profile-DATE-TIME)."""
    wait: int = 3
    """Steps to skip first."""
    warmup: int = 2
    """Steps in which the profiler warms up."""
    active: int = 5
    """Steps to record."""
    shapes: bool = False
    """Record shapes on GPUs, too; on CPUs shapes are always recorded, for message sizes."""
    memory: bool = False
    """Record memory allocations."""
    stacks: bool = False
    """Record Python stacks: slow, and large traces."""
    tensorboard: Path | None = None
    """Also copy the traces into this folder, for TensorBoard's profile plugin."""
    nvtx: bool = False
    """Mark the steps for Nsight Systems instead of recording traces: nsys profile -c
    cudaProfilerApi --capture-range-end=stop tutti profile --nvtx -- COMMAND. Needs CUDA."""
    merge: Path | None = None
    """Write all ranks into this one trace, on one clock, with arrows; opens in ui.perfetto.dev."""
    json: Path | None = None
    """Write ranks, steps, communication and stragglers to this file."""


# Exit codes after Ctrl-C and SIGTERM. The steps before such a signal were normal training.
_STOPPED = (130, 143)


def main(arguments: list[str]) -> int:
    """Run the command. Returns its exit code, or that of the profiled program if it failed."""
    flags, words = split_at_command(Profile, arguments)
    options = parse(Profile, "tutti profile", flags)
    for flag in ("merge", "json"):
        check_writable(f"--{flag}", getattr(options, flag))
    if (options.trace is None) == (not words):
        raise UsageError(
            "give either a program or --trace: tutti profile -- COMMAND captures a program, "
            "tutti profile --trace DIR reads traces"
        )
    if options.trace is not None:
        if not options.trace.exists():
            raise UsageError(f"--trace {options.trace} does not exist: name a folder of traces")
        return _explain(options, options.trace)
    return _capture(options, words)


def _capture(options: Profile, words: list[str]) -> int:
    from tutti.cli import COMMANDS
    from tutti.profile.captured_command import LauncherTask, resolve_command, run_captured

    if options.active < 1 or options.wait < 0 or options.warmup < 0:
        raise UsageError(
            f"--wait {options.wait} --warmup {options.warmup} --active {options.active}: "
            "--active must be at least 1, the others at least 0"
        )
    if options.nvtx:
        _check_nvtx(options)
    command = resolve_command(words, list(COMMANDS))
    task = LauncherTask.from_environment(os.environ)
    out = (options.out or task.default_folder(strftime("%Y%m%d-%H%M%S"))).absolute()
    traces = out / "traces"
    if traces.is_dir() and any(traces.iterdir()):
        if task.number != 0:
            return 2
        raise UsageError(f"--out {out} already holds traces: choose another folder")
    settings = {
        "directory": str(traces),
        "wait": options.wait,
        "warmup": options.warmup,
        "active": options.active,
        "shapes": options.shapes or None,
        "memory": options.memory,
        "stacks": options.stacks,
        "tensorboard": options.tensorboard and str(options.tensorboard.absolute()),
        "nvtx": options.nvtx,
    }
    code = run_captured(command, settings)
    if options.nvtx:
        return code
    if task.count > 1:
        task.write_exit_code(out, code)
        if task.number != 0:
            return code
        code = _wait_for_tasks(task, out, code)
    if not traces.is_dir() or not any(traces.glob("rank*")):
        steps = options.wait + options.warmup + 2
        failed = f"the program ended with code {code}, and " if code else ""
        print(
            f"tutti profile: {failed}nothing was captured. Either no process took {steps} steps of "
            "a torch optimizer: train longer, or reduce --wait and --warmup. Or the capture did "
            "not reach the program: python -I, -E or -S, a command that replaces PYTHONPATH, and "
            f"replayed CUDA graphs prevent it.{task.missing_rank_hint if code else ''}",
            file=sys.stderr,
        )
        return code or 2
    print(f"the traces are in {traces}", file=sys.stderr)
    _explain(options, out, code)
    print(f"for an HTML page: tutti report {out}", file=sys.stderr)
    return code


def _wait_for_tasks(task: "LauncherTask", out: Path, code: int) -> int:
    """Wait for the other tasks of the launcher. Returns the exit code of the first failed task."""
    codes, missing = task.wait_for_exit_codes(out, failed=code != 0)
    if missing:
        numbers = ", ".join(map(str, missing[:8])) + " …" * (len(missing) > 8)
        print(
            f"tutti profile: no exit code of task {numbers} of {task.count} in {out}: it still "
            "runs, was killed, or cannot write there; all hosts must share the folder (--out)",
            file=sys.stderr,
        )
    return code or next((each for _, each in sorted(codes.items()) if each), 0)


def _check_nvtx(options: Profile) -> None:
    for flag in ("tensorboard", "merge", "json", "memory", "stacks"):
        if getattr(options, flag):
            raise UsageError(f"--nvtx records no trace for --{flag}: leave out one of the two")
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "--nvtx marks steps for Nsight Systems and needs CUDA, which this machine does not "
            "have: leave it out"
        )


def _explain(options: Profile, directory: Path, code: int = 0) -> int:
    from tutti.profile.explain import explain, trace_files
    from tutti.profile.profile_table import profile_lines

    explanation = explain(trace_files(directory))
    rows = explanation.rows()
    if code not in (0, *_STOPPED):  # steps during a failure are not normal training
        rows["advice"] = []
        rows["notes"].append(f"the program failed with code {code}: see its messages above")
    print("\n".join(profile_lines(rows, text_width(sys.stdout))))
    if options.merge is not None:
        from tutti.profile.merged_trace import write_merged_trace

        arrows = write_merged_trace(options.merge, explanation)
        print(f"{options.merge}: {len(rows['ranks'])} ranks, {arrows} arrows", file=sys.stderr)
    if options.json is not None:
        write_json(options.json, "tutti.profile/1", rows)
    return 0
