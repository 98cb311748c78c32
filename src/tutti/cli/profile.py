"""tutti profile: capture traces of a program, or read them, and explain the step."""

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
    from tutti.profile.task import Task


@dataclass(frozen=True)
class Profile:
    """Explain where a step's time goes, on every rank, and who makes whom wait.

    tutti profile -- torchrun --nproc-per-node 2 train.py

    tutti profile -- train --recipe lenet --ranks 2

    tutti profile --trace DIR

    The first two capture: the program runs unchanged, steps are its optimizer's. The last reads
    traces of torch.profiler from any program, one file for each rank.
    """

    trace: Path | None = None
    """Read traces from this folder (or run directory); nothing is started."""
    out: Path | None = None
    """The folder to capture into, as OUT/traces/rankN.json.gz (default: runs/profile-DATE-TIME)."""
    wait: int = 3
    """Steps to leave alone first."""
    warmup: int = 2
    """Steps in which the profiler warms up."""
    active: int = 5
    """Steps to record."""
    shapes: bool = False
    """Record shapes on GPUs, too; on CPUs sizes of messages are not known otherwise."""
    memory: bool = False
    """Record memory."""
    stacks: bool = False
    """Record Python stacks: slow, and large."""
    tensorboard: Path | None = None
    """Put the traces into this folder as well, where TensorBoard's profile plugin finds them."""
    nvtx: bool = False
    """Instead of traces, mark the steps for Nsight Systems: nsys profile -c cudaProfilerApi
    --capture-range-end=stop tutti profile --nvtx -- COMMAND. Needs CUDA."""
    merge: Path | None = None
    """Write all ranks into this one trace, aligned, with arrows; opens in ui.perfetto.dev."""
    json: Path | None = None
    """Write ranks, steps, communication and stragglers to this file, too."""


_STOPPED = (130, 143)  # by Ctrl-C or SIGTERM: the steps before were training


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code, or the program's if that failed."""
    flags, words = split_at_command(Profile, arguments)
    options = parse(Profile, "tutti profile", flags)
    for flag in ("merge", "json"):
        check_writable(f"--{flag}", getattr(options, flag))
    if (options.trace is None) == (not words):
        raise UsageError(
            "capture or read? tutti profile -- COMMAND runs a program, "
            "tutti profile --trace DIR reads traces"
        )
    if options.trace is not None:
        if not options.trace.exists():
            raise UsageError(f"--trace {options.trace}: there is no such folder")
        return _explain(options, options.trace)
    return _capture(options, words)


def _capture(options: Profile, words: list[str]) -> int:
    from tutti.cli import COMMANDS
    from tutti.profile.launch import program, run_captured
    from tutti.profile.task import task_of

    if options.active < 1 or options.wait < 0 or options.warmup < 0:
        raise UsageError(
            f"--wait {options.wait} --warmup {options.warmup} --active {options.active}: "
            "--active is at least 1, the others at least 0"
        )
    if options.nvtx:
        _check_nvtx(options)
    command = program(words, list(COMMANDS))
    task = task_of(os.environ)
    out = (options.out or task.folder(strftime("%Y%m%d-%H%M%S"))).absolute()
    traces = out / "traces"
    if traces.is_dir() and any(traces.iterdir()):
        if not task.is_first:
            return 2
        raise UsageError(f"--out {out}: it holds traces already: choose another folder")
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
        task.leave_word(out, code)
        if not task.is_first:
            return code
        code = _hear(task, out, code)
    if not traces.is_dir() or not any(traces.glob("rank*")):
        steps = options.wait + options.warmup + 2
        failed = f"the program ended with code {code}, and " if code else ""
        print(
            f"tutti profile: {failed}nothing was captured. Either no process took {steps} steps of "
            "a torch optimizer: train longer, or give --wait and --warmup less. Or none was "
            "reached: python -I, -E or -S, a PYTHONPATH that the command sets anew, and CUDA "
            f"graphs that are replayed hide steps.{task.no_rank_note if code else ''}",
            file=sys.stderr,
        )
        return code or 2
    print(f"traces are in {traces}", file=sys.stderr)
    _explain(options, out, code)
    print(f"a page of it: tutti report {out}", file=sys.stderr)
    return code


def _hear(task: "Task", out: Path, code: int) -> int:
    """Wait for the other tasks; returns the exit code of the first that failed."""
    codes, missing = task.wait_for_others(out, failed=code != 0)
    if missing:
        some = ", ".join(map(str, missing[:8])) + " …" * (len(missing) > 8)
        print(
            f"tutti profile: no word of task {some} of {task.count} in {out}: it runs on, was "
            "killed, or cannot write there; all hosts must share the folder (--out)",
            file=sys.stderr,
        )
    return code or next((each for _, each in sorted(codes.items()) if each), 0)


def _check_nvtx(options: Profile) -> None:
    for flag in ("tensorboard", "merge", "json", "memory", "stacks"):
        if getattr(options, flag):
            raise UsageError(f"--nvtx records no trace for --{flag}: leave one of the two out")
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "--nvtx marks steps for Nsight Systems and needs CUDA, which this machine has not: "
            "leave it out"
        )


def _explain(options: Profile, directory: Path, code: int = 0) -> int:
    from tutti.profile.explain import explain, trace_files
    from tutti.profile.table import lines

    explanation = explain(trace_files(directory))
    rows = explanation.rows()
    if code not in (0, *_STOPPED):  # what ranks do while one of them fails is not training
        rows["advice"] = []
        rows["notes"].append(f"the program failed, with code {code}: see its own words above")
    print("\n".join(lines(rows, text_width(sys.stdout))))
    if options.merge is not None:
        from tutti.profile.timeline import write_timeline

        arrows = write_timeline(options.merge, explanation)
        print(f"{options.merge}: {len(rows['ranks'])} ranks, {arrows} arrows", file=sys.stderr)
    if options.json is not None:
        write_json(options.json, "tutti.profile/1", rows)
    return 0
