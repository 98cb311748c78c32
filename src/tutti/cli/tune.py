"""tutti tune: search for faster settings of a training job on this machine."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import strftime
from typing import Annotated, Literal

import tyro

from tutti.cli.flags import (
    OutputFile,
    OutputFolder,
    check_at_least,
    flag_value,
    parse,
    split_at_dashes,
    split_own_flags,
    without_flags,
)
from tutti.cli.results import write_json
from tutti.cli.train import PLANNED_FLAGS, check_before_start, check_timed_run, read_flags
from tutti.machine.cpu_numa import allowed_cpus
from tutti.measure.terminal import text_width, wrap_line
from tutti.parallel.layout import Layout
from tutti.plan.measured_search import (
    PROGRAM_SETTINGS,
    Change,
    Search,
    program_candidates,
    report,
    result_lines,
)
from tutti.profile.captured_command import resolve_command
from tutti.profile.try_advice import TimedRun, with_flags
from tutti.train.recipe import Recipe
from tutti.train.recipe_check import MANY_SAMPLES, check_recipe
from tutti.train.training_schedule import make_schedule
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

# Upper limit of steps per run. The search stops a run as soon as enough steps have been timed.
_STEPS = "200"
_RECIPE_SETTINGS = {  # name of a setting → the flags that it changes
    "layout": ("--layout",),
    "microbatch": ("--accumulation",),
    "compilation": ("--compile", "--no-compile"),
    "loader workers": ("--workers",),
    "bucket size": ("--bucket-mb",),
}
# A setting is not kept if it changes the losses by more than this fraction. The tolerance of the
# other precisions is 2 %.
_LOSS_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}


@dataclass(frozen=True)
class Tune:
    """Search for faster settings of a training job, by timing short runs on this machine.

        tutti tune --budget 10m --ranks 2 --recipe gpt --batch 8
        tutti tune --budget 5m -- torchrun --nproc-per-node 2 train.py

    The first command tunes a recipe and accepts the flags of tutti train. It tries layouts,
    microbatch sizes, compilation, numbers of DataLoader workers and bucket sizes. It does not
    change flags that are given or the global batch, and it keeps no setting that changes the
    losses. The second command tunes an unchanged program. It tries arguments of
    DistributedDataParallel, FSDP2 and DataLoader that do not change the program's results.
    """

    USAGE_END = "[-- COMMAND]"
    budget: str = "10m"
    """Maximum time of the search, such as `90s`, `10m` or `1h`."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of ranks to start (default: 1). Not allowed if COMMAND starts its ranks, as torchrun
    does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `auto` selects CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU."""
    out: OutputFolder | None = None
    """Directory for tune.json and all runs (default: runs/tune-DATE-TIME)."""
    json: OutputFile | None = None
    """Also write the results to this JSON file."""


def main(arguments: list[str]) -> int:
    flags, command = split_at_dashes(arguments)
    own_flags, train_flags = split_own_flags(Tune, flags)
    options = parse(Tune, "tutti tune", own_flags)
    if command[:1] == ["train"] or command[:2] == ["tutti", "train"]:
        # Flags after `-- train` have the same meaning as flags before the dashes.
        train_flags += command[command.index("train") + 1 :]
        command = []
    check_at_least(1, options, "ranks", "ranks_per_gpu")
    budget_s = _seconds(options.budget)
    launcher = identify(os.environ).launcher
    if launcher != "python":
        raise UsageError(
            f"tutti tune starts the ranks, but {launcher} has started this process as a rank. Run "
            "tutti tune without a launcher."
        )
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise UsageError(f"--out {options.out} is not empty. Choose another directory.")
    if command and train_flags:
        raise UsageError(f"there is no flag {train_flags[0]}. See tutti tune --help.")
    if not command and not any(f.partition("=")[0] in ("--recipe", "--model") for f in train_flags):
        raise UsageError("there is no job to tune. Add --recipe NAME, --model NAME or -- COMMAND.")
    folder = (options.out or Path("runs") / f"tune-{strftime('%Y%m%d-%H%M%S')}").absolute()
    if command:
        search = _program_search(options, command, folder, budget_s)
    else:
        search = _recipe_search(options, train_flags, folder, budget_s)
    result = search.execute()
    for line in result_lines(result, program=bool(command)):
        print("\n".join(wrap_line(line, text_width(sys.stdout), "  ")))
    for path in (folder / "tune.json", options.json):
        if path is not None:
            write_json(path, "tutti.tune/1", {"budget_s": budget_s, **result})
    print(f"The results are in {folder / 'tune.json'}", file=sys.stderr)
    return 130 if search.stopped else 0


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"--budget must be a time such as 90s, 10m or 1h, got {text!r}")
    return seconds


def _program_search(options: Tune, command: Sequence[str], folder: Path, budget_s: float) -> Search:
    from tutti.cli import COMMANDS
    from tutti.scale.scale_runs import Job, starts_ranks_itself

    ranks = options.ranks or 1
    starts_ranks = _has_launcher(command) or starts_ranks_itself(command, [ranks])
    if starts_ranks and options.ranks is not None:
        raise UsageError(
            f"--ranks {options.ranks} has no effect, because {Path(command[0]).name} starts the "
            "ranks. Omit --ranks."
        )
    command = ["python", *command] if command[0] == "-m" else list(command)
    resolved = tuple(resolve_command(command, list(COMMANDS)))
    job = Job(resolved, starts_ranks, device=options.device, ranks_per_gpu=options.ranks_per_gpu)
    job.check([ranks])
    cores = len(allowed_cpus()) // ranks

    def candidates(setting: str, best: Change, first: TimedRun) -> Iterator[Change]:
        return program_candidates(setting, best, first, cores)

    return Search(job.command_for(ranks, ()), candidates, PROGRAM_SETTINGS, folder, budget_s)


def _has_launcher(command: Sequence[str]) -> bool:
    """Return whether the command is a launcher, which starts a fixed number of ranks."""
    names = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "tutti")
    return Path(command[0]).name in names or "torch.distributed.run" in command[:3]


def _recipe_search(options: Tune, flags: list[str], folder: Path, budget_s: float) -> Search:
    ranks = options.ranks or 1
    world_flags = ["--ranks", str(ranks), "--device", options.device]
    world_flags += ["--ranks-per-gpu", str(options.ranks_per_gpu)]

    def settings_with(more: Sequence[str]) -> Recipe:
        train, base = read_flags([*more, *world_flags], "tutti tune")
        check_timed_run(train)
        check_before_start(train, base, ranks)
        return train.settings

    original = settings_with(flags)
    global_batch = make_schedule(original, ranks, MANY_SAMPLES).global_batch
    replaced = ("--batch", "--global-batch", "--steps", "--epochs", "--out", "--checkpoint-every")
    flags = without_flags(flags, (*replaced, "--evaluate-every", "--keep-best", "--patience"))
    flags += ["--global-batch", str(global_batch), "--steps", _STEPS]
    flags += ["--checkpoint-every", _STEPS]
    flags += [] if "--no-evaluate" in flags else ["--no-evaluate"]
    command = [sys.executable, "-m", "tutti", "train", *flags, *world_flags]
    device = read_flags([*flags, *world_flags], "tutti tune")[0].device_type()
    fixed = {
        name
        for name, names in _RECIPE_SETTINGS.items()
        for flag in names
        if flag in flags or flag_value(flag, flags) is not None
    }
    given = [flag for flag in PLANNED_FLAGS if flag_value(flag, flags) is not None]

    def candidates(setting: str, best: Change, first: TimedRun) -> Iterator[Change]:
        recipe = settings_with(with_flags(flags, best.get("flags", {})))
        if setting == "layout":
            found = _layout_candidates(recipe, ranks, device, options.ranks_per_gpu, given)
        else:
            found = _recipe_candidates(setting, recipe, ranks)
        for values in found:
            try:  # skip candidates that cannot run
                check_recipe(
                    settings_with(with_flags(flags, best.get("flags", {}) | values)), ranks, device
                )
            except UsageError:
                continue
            yield {"flags": values}

    tried = [setting for setting in _RECIPE_SETTINGS if setting not in fixed]
    tolerance = _LOSS_TOLERANCE.get(original.compute.precision, 0.02)
    return Search(command, candidates, tried, folder, budget_s, tolerance)


def _layout_candidates(
    recipe: Recipe, ranks: int, device: str, ranks_per_gpu: int, given: Sequence[str]
) -> Iterator[dict[str, str | None]]:
    """Yield the flags of the other layouts that fit on this host, predicted fastest first.

    A candidate has the accumulation, recomputation and pipeline schedule with which the plan
    predicts the shortest step. Flags in `given` are not changed.
    """
    from tutti.plan.planned_job import PlannedJob, local_cluster

    original = make_schedule(recipe, ranks, MANY_SAMPLES).layout
    free = replace(recipe, parallel=replace(recipe.parallel, layout=None))
    try:
        cluster = local_cluster(ranks, device, ranks_per_gpu)
        plan = PlannedJob.of(free, device, given=given).plan(cluster)
    except UsageError as error:
        report(f"layouts are not sorted by predicted step time, because planning failed: {error}")
        for layout in Layout.every(ranks):
            if layout != original:
                yield {"--layout": str(layout)}
        return
    changed = ("--layout", "--accumulation", "--checkpoint-activations", "--pipeline-schedule")
    current = {
        "--checkpoint-activations": recipe.compute.checkpoint_activations,
        "--pipeline-schedule": recipe.parallel.pipeline_schedule,
    }
    for planned in plan.layouts:
        layout = planned.candidate.layout
        if not planned.fits:
            report(f"--layout {layout} is not tried: {planned.reason}")
        elif layout != original:
            words = planned.candidate.flags()
            values = dict(zip(words[::2], words[1::2], strict=True))
            yield {
                name: values[name]
                for name in changed
                if name in values and name not in given and values[name] != current.get(name)
            }


def _recipe_candidates(setting: str, recipe: Recipe, ranks: int) -> Iterator[dict[str, str | None]]:
    """Yield the flags of each other value of a setting, such as {"--workers": "2"}."""
    schedule = make_schedule(recipe, ranks, MANY_SAMPLES)
    layout = schedule.layout
    if setting == "microbatch":
        for accumulation in (1, 2, 4, 8, 16, 32):
            divides = schedule.global_batch % (layout.data_ranks * accumulation) == 0
            if accumulation != schedule.accumulation and divides:
                yield {"--accumulation": str(accumulation)}
    elif setting == "compilation" and not recipe.compute.compile:
        yield {"--compile": None}
    elif setting == "loader workers":
        for workers in (0, 1, 2, 4, 8):
            if workers != recipe.data.workers and workers <= len(allowed_cpus()) // ranks:
                yield {"--workers": str(workers)}
    elif setting == "bucket size" and layout.only_replicas and ranks > 1:
        for size in (1.0, 5.0, 25.0, 100.0):
            if size != recipe.engine.bucket_mb:
                yield {"--bucket-mb": f"{size:g}"}
