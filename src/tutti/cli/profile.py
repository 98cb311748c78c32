"""tutti profile: records traces of a program, or reads traces, and explains the step time."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import strftime
from typing import Any

from tutti.cli.flags import (
    InputPath,
    OutputFile,
    OutputFolder,
    check_at_least,
    parse,
    split_at_command,
)
from tutti.cli.results import write_json
from tutti.measure.terminal import text_width, wrap_line
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Profile:
    """Explain where the time of a step goes on every rank, and which rank makes the others wait.

        tutti profile -- torchrun --nproc-per-node 2 train.py
        tutti profile -- train --recipe lenet --ranks 2
        tutti profile --try-advice -- torchrun --nproc-per-node 2 train.py
        tutti profile --trace DIR

    The first two commands run an unchanged program and record traces. A step ends with a step of
    the program's optimizer. In a program without an optimizer (inference), a step is a call of the
    outermost module. The third command also applies the first advice and measures its gain. The
    last command reads existing torch.profiler traces, one file per rank.
    """

    USAGE_END = "[-- COMMAND]"
    trace: InputPath | None = None
    """Directory with traces, or run directory. Read these traces instead of starting a program."""
    out: OutputFolder | None = None
    """Directory for the traces, OUT/traces/rankN.json.gz (default: runs/profile-DATE-TIME)."""
    wait: int = 6
    """Number of steps before the profiler starts. The second half of these steps is timed. If at
    least 3 steps are timed, the recorded step times are corrected for the profiler's overhead."""
    warmup: int = 2
    """Number of profiler warm-up steps after --wait."""
    active: int = 5
    """Number of steps to record."""
    shapes: bool = False
    """Also record tensor shapes on GPUs. On CPUs, shapes are always recorded, because message sizes
    are computed from them."""
    memory: bool = False
    """Split each rank's peak memory into parameters, gradients, optimizer state, activations by
    module, communication buffers, fragmentation and other. The memory is measured in two steps
    before the recorded steps. Also record memory allocations in the traces."""
    stacks: bool = False
    """Record Python stacks. This is slow and makes traces large."""
    try_advice: bool = False
    """After the recording, apply the first advice that needs no edit of the program, and measure
    its gain with 10 runs: 5 without and 5 with the change, alternately. Each run is stopped when
    enough steps have been timed."""
    tensorboard: OutputFolder | None = None
    """Also copy the traces into this directory, for TensorBoard's profile plugin."""
    nvtx: bool = False
    """Mark the steps for Nsight Systems instead of recording traces: `nsys profile -c
    cudaProfilerApi --capture-range-end=stop tutti profile --nvtx -- COMMAND`. Needs CUDA."""
    merge: OutputFile | None = None
    """Write the traces of all ranks into one file for ui.perfetto.dev, with a common clock, and
    with arrows between the ranks of a collective."""
    json: OutputFile | None = None
    """Also write ranks, steps, communication and stragglers to this JSON file."""


def main(arguments: list[str]) -> int:
    """Run the command. If the profiled program failed, return the exit code of the program."""
    flags, command = split_at_command(Profile, arguments)
    options = parse(Profile, "tutti profile", flags)
    if options.try_advice and not command:
        raise UsageError(
            "--try-advice needs a program to run: tutti profile --try-advice -- COMMAND"
        )
    if (options.trace is None) == (not command):
        raise UsageError(
            "there must be either a program or --trace. Use tutti profile -- COMMAND to record a "
            "program, or tutti profile --trace DIR to read traces."
        )
    if options.trace is not None:
        rows = _explain(options, options.trace)
        if options.json is not None:
            write_json(options.json, "tutti.profile/1", rows)
        return 0
    return _capture(options, command)


def _capture(options: Profile, arguments: list[str]) -> int:
    from tutti.cli import COMMANDS
    from tutti.profile.captured_command import LauncherTask, resolve_command, run_captured

    check_at_least(1, options, "active")
    check_at_least(0, options, "wait", "warmup")
    if options.nvtx:
        for flag in ("tensorboard", "merge", "json", "memory", "stacks", "try_advice"):
            if getattr(options, flag):
                name = flag.replace("_", "-")
                raise UsageError(
                    f"--{name} needs traces, but --nvtx records none. Omit one of the flags."
                )
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--nvtx needs CUDA, but this machine has none. Omit --nvtx.")
    command = resolve_command(arguments, list(COMMANDS))
    task = LauncherTask.from_environment(os.environ)
    if options.try_advice and task.count > 1:
        raise UsageError(
            f"--try-advice starts the program several times, but {task.launcher} started "
            f"{task.count} tasks of tutti profile. Start one task: tutti profile --try-advice -- "
            f"{task.launcher} …"
        )
    out = (options.out or task.default_folder(strftime("%Y%m%d-%H%M%S"))).absolute()
    traces = out / "traces"
    if traces.is_dir() and any(traces.iterdir()):
        if task.number != 0:
            return 2
        raise UsageError(f"--out {out} already has traces. Choose another directory.")
    same_name = ("wait", "warmup", "active", "memory", "stacks", "nvtx")
    settings = {name: getattr(options, name) for name in same_name} | {
        "directory": str(traces),
        "shapes": options.shapes or None,
        "stop": options.try_advice,
        "tensorboard": options.tensorboard and str(options.tensorboard.absolute()),
    }
    code = run_captured(command, settings)
    if options.nvtx:
        return code
    if task.count > 1:
        task.write_exit_code(out, code)
        if task.number != 0:
            return code
        # Return the exit code of the first task that failed.
        codes, missing = task.wait_for_exit_codes(out, failed=code != 0)
        code = code or next((code for _, code in sorted(codes.items()) if code), 0)
        if missing:
            numbers = ", ".join(map(str, missing[:8])) + " …" * (len(missing) > 8)
            print(
                f"tutti profile: {out} has no exit code of task {numbers} of {task.count}. The "
                "task still runs, was killed, or cannot write to this directory. --out must be a "
                "directory that all hosts share.",
                file=sys.stderr,
            )
    if not traces.is_dir() or not any(traces.glob("rank*")):
        steps = options.wait + options.warmup + 2
        failed = f"the program ended with code {code}, and " if code else ""
        print(
            f"tutti profile: {failed}nothing was captured. If no process took {steps} steps (steps "
            "of a torch optimizer or, in a program without an optimizer, calls of its outermost "
            "module), run the program longer, or reduce --wait and --warmup. The program cannot be "
            "recorded if Python is started with -I, -E or -S, if PYTHONPATH is replaced, or if the "
            f"steps replay CUDA graphs.{task.missing_rank_hint if code else ''}",
            file=sys.stderr,
        )
        return code or 2
    print(f"The traces are in {traces}", file=sys.stderr)
    rows = _explain(options, out, code)
    try:
        if options.try_advice and not code:
            _try_advice(command, rows, out)
    finally:
        if options.json is not None:
            write_json(options.json, "tutti.profile/1", rows)
    print(f"For an HTML page: tutti report {out}", file=sys.stderr)
    return code


def _try_advice(command: list[str], rows: dict[str, Any], out: Path) -> None:
    """Measure the gain of the first applicable advice. Print the result and add it to `rows`."""
    from tutti.profile.try_advice import (
        choose_advice,
        compare_with_prediction,
        tried_lines,
        try_change,
    )

    advice, skipped = choose_advice(rows)
    for line in skipped:
        print(f"tutti profile: {line}", file=sys.stderr)
    if advice is None:
        reason = "no other advice can be applied"
        if not skipped:
            reason = "no predicted gain exceeds the variation between steps"
        print(
            f"tutti profile: --try-advice has nothing to try: {reason}. With more recorded steps, "
            "for example --active 40, smaller gains can be detected.",
            file=sys.stderr,
        )
        return
    step_s = fmean(row["step_s"]["p50"] for row in rows["ranks"])
    measured = try_change(command, advice["change"], step_s, out / "tried")
    rows["tried"] = compare_with_prediction(advice, measured)
    print()
    for line in tried_lines(advice, rows["tried"]):
        print("\n".join(wrap_line(line, text_width(sys.stdout), "    ")))


def _explain(options: Profile, directory: Path, code: int = 0) -> dict[str, Any]:
    from tutti.profile.explain import explain, trace_files
    from tutti.profile.profile_table import profile_lines

    explanation = explain(trace_files(directory))
    rows = explanation.rows()
    # After Ctrl-C (130) and SIGTERM (143), the recorded steps are as usual. If the program failed,
    # the recorded steps may be unusual, so no advice is derived from them.
    if code not in (0, 130, 143):
        rows["advice"] = []
        rows["notes"].append(f"the program failed with code {code}. See its messages above.")
    print("\n".join(profile_lines(rows, text_width(sys.stdout))))
    if options.merge is not None:
        from tutti.profile.merged_trace import write_merged_trace

        arrows = write_merged_trace(options.merge, explanation)
        print(f"{options.merge}: {len(rows['ranks'])} ranks, {arrows} arrows", file=sys.stderr)
    return rows
