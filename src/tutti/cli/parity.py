"""tutti parity: compares the loss, gradients and updates of each layout with one device.

tutti parity --show-schedule prints the timeline of a pipeline schedule, simulated and measured.
"""

import gc
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import OutputFile, check_at_least, flag_value, parse
from tutti.cli.results import (
    WorldFlags,
    usage_error_on_rank_0,
    write_json,
)
from tutti.parallel.layout import Layout, ParallelOptions, ScheduleName
from tutti.parity.parity_options import (
    ParityOptions,
    check_workload,
    full_size_options,
    small_options,
)
from tutti.parity.tolerances import TOLERANCES
from tutti.world.errors import UsageError
from tutti.world.launchers import identify
from tutti.world.rank_cases import Cases, start_cases

if TYPE_CHECKING:
    from tutti.parallel.pipeline.schedule_timeline import Timeline
    from tutti.parity.single_device import Workload
    from tutti.world.world import World


@dataclass(frozen=True, kw_only=True)
class Parity(WorldFlags):
    """Compare layouts with one device, step by step: tutti parity --recipe gpt --ranks 4

    Trains a small model on one device and with each layout, from the same seed, weights and
    samples. The training includes SGD and AdamW, several microbatches, gradient clipping, a step
    whose samples cannot be divided evenly among ranks, and activation checkpointing. The exit code
    is 1 if the error of a layout is larger than rounding can explain.

    tutti parity --show-schedule draws a pipeline schedule instead. For its flags, see tutti parity
    --show-schedule --help.
    """

    settings: ParityOptions
    recipe: str = "gpt"
    """Recipe whose model is checked: `gpt`, `wideresnet`, `efficientnet` or `lenet`. A smaller
    version of the model is used, so that the check is fast."""
    full_size: bool = False
    """Check the model of the recipe at its full size."""
    layouts: str = "all"
    """Comma-separated layouts to check, such as `dp2.tp2,shard4`. `all` checks every layout that is
    possible with --ranks."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start (default: the number that --layouts needs). Ignored under
    torchrun, srun or mpirun."""
    backend: Literal["nccl", "shm", "gloo"] | None = None
    """Communication backend (default: `nccl` on CUDA, `shm` on the CPU)."""
    json: OutputFile | None = None
    """Also write the results to this JSON file."""


def main(arguments: list[str]) -> int:
    if "--show-schedule" in arguments:  # this mode has its own flags
        return show_schedule([flag for flag in arguments if flag != "--show-schedule"])
    identity = identify(os.environ)
    launched_ranks = identity.size if identity.launcher != "python" else None
    options, layouts = _read_flags(arguments, launched_ranks)
    if launched_ranks is None:
        command, ranks = ["parity", *arguments], layouts[0].size
        return start_cases(
            lambda env: options.start_ranks(command, ranks, env=env, reported_codes=(1, 2))
        )
    return _check(options, layouts)


def _read_flags(arguments: list[str], launched_ranks: int | None) -> tuple[Parity, list[Layout]]:
    """Return the options and the layouts. Some defaults depend on --recipe and --layouts."""
    name = flag_value("--recipe", arguments)
    name = "gpt" if name is None else name
    full = Parity(settings=full_size_options(name), recipe=name)
    options = parse(Parity, "tutti parity", arguments, default=full)
    options.settings.check()
    if launched_ranks is None and options.ranks is not None:
        options.check_ranks(options.ranks)
    layouts = _layouts(options.layouts, launched_ranks or options.ranks)
    if launched_ranks is None:
        options.check_ranks(layouts[0].size)
    if not options.full_size:
        small = small_options(name, layouts, options.settings.parallel)
        default = Parity(settings=small, recipe=name)
        options = parse(Parity, "tutti parity", arguments, default)
    device = options.device_type()
    if options.backend is not None and (options.backend == "nccl") != (device == "cuda"):
        raise UsageError(
            f"--backend {options.backend} does not work on {device}. Omit --backend, or use "
            f"{'nccl' if device == 'cuda' else 'shm or gloo'}."
        )
    check_workload(name, options.settings, layouts, device)
    return options, layouts


def _layouts(text: str, ranks: int | None) -> list[Layout]:
    if text == "all":
        if ranks is None:
            raise UsageError(
                "--layouts all needs the number of ranks. Add --ranks, such as --ranks 4."
            )
        return Layout.every(ranks)
    layouts = [Layout.parse(layout.strip()) for layout in text.split(",")]
    for layout in layouts:
        layout.check(layouts[0].size if ranks is None else ranks)
    return layouts


def _check(options: Parity, layouts: list[Layout]) -> int:
    from tutti import comm
    from tutti.parity.compare import ParityTable, Reference, check_layout, crashed_row
    from tutti.parity.single_device import make_workload
    from tutti.train.init import agree

    cases = Cases.from_environment()
    with options.join_world(options.backend) as world:
        with usage_error_on_rank_0(world):
            workload = agree(lambda: make_workload(options.recipe, options.settings, layouts))
            if any(cases.is_new(str(layout)) for layout in layouts):
                reference = Reference(workload, world)
        table = ParityTable(layouts) if world.is_first else None
        if table is not None and not cases.crashed:
            table.print_head(_title(options, workload, world))
        rows: list[dict[str, Any]] = []
        for layout in layouts:
            name = str(layout)
            if name in cases.rows:
                # This row was printed before another layout crashed and new ranks were started.
                rows.append(cases.rows[name])
                continue
            if name in cases.crashed:
                rows.append(crashed_row(workload, layout, cases.crashed[name]))
            else:
                with cases.running(name, world.rank):
                    rows.append(check_layout(workload, layout, world, reference))
                gc.collect()  # frees engines in reference cycles, and their process groups
            if table is not None:
                table.add(rows[-1])
                # Write the file after each row, because the next layout may fail.
                _write(options, workload, world, rows, complete=len(rows) == len(layouts))
                cases.add_row(name, rows[-1])
        comm.gather_json(None)  # a barrier: no rank exits before rank 0 has written the file
    verdicts = {row["ok"] for row in rows}
    if verdicts == {None} and world.is_first:
        print("tutti parity: no layout could be compared, for the reasons above", file=sys.stderr)
    if False in verdicts:
        return 1
    # If a layout that the user named could not be compared, the check has not passed.
    return 2 if verdicts == {None} or (options.layouts != "all" and None in verdicts) else 0


def _title(options: Parity, workload: "Workload", world: "World") -> str:
    settings = options.settings
    tolerance = TOLERANCES[settings.precision]
    note = f" Note: {world.sharing_note}." if world.sharing_note else ""
    full, uneven = workload.counts[:2]
    return (
        f"{settings.model or options.recipe} in {settings.precision} on {world.device.type}, "
        f"compared with one device in float64: {settings.steps} steps, with {full} and {uneven} "
        f"samples alternately. Errors are relative. The tolerances are {tolerance.loss:g} (loss "
        f"and norm), {tolerance.gradient:g} (gradient), {tolerance.update:g} (updates by SGD and "
        f"AdamW) and {tolerance.buffer:g} (buffers, such as running statistics).{note}"
    )


def _write(
    options: Parity, workload: "Workload", world: "World", rows: list[Any], *, complete: bool
) -> None:
    if options.json is None:
        return
    settings = options.settings
    results = {
        "recipe": options.recipe,
        "model": settings.model,
        "architecture": asdict(settings.architecture),
        "precision": settings.precision,
        "tolerance": asdict(TOLERANCES[settings.precision]),
        "samples": workload.counts,
        "recompute": workload.recompute,
        "rows": rows,
        "complete": complete,
        "world": {
            "size": world.size,
            "device": world.device.type,
            "backend": world.backend,
            "sharing_note": world.sharing_note,
        },
    }
    write_json(options.json, "tutti.parity/1", results)


# -- --show-schedule -------------------------------------------------------------------------------

_LEGEND = """\
# F3 is the forward pass of microbatch 3, and 5F3 is the same on stage 5.
# B is a backward pass. I and W are its two parts: the gradients of the inputs
# (I) and of the weights (W). A dot is idle time.
# Simulated: F, I and W take 1 unit of time, B takes 2, communication takes 0.
# Measured: the label of a short action is cut off."""


@dataclass(frozen=True, kw_only=True)
class ShowSchedule(WorldFlags):
    """Show a pipeline schedule: tutti parity --show-schedule --schedule 1f1b --pp 4

    Prints a timeline of the forward and backward passes on every rank, and the bubble: the fraction
    of time in which ranks are idle. The first timeline is simulated, with a fixed time for each
    action. The second timeline is measured on local ranks, with a small model of equal stages.
    """

    pipeline_schedule: Annotated[ScheduleName, tyro.conf.arg(aliases=["--schedule"])] = "1f1b"
    """Name of the pipeline schedule."""
    pp: int = 4
    """Number of pipeline ranks."""
    accumulation: int = 8
    """Number of microbatches per step."""
    stages_per_rank: int | None = None
    """Number of stages per rank (default: 1 for `gpipe` and `1f1b`, 2 for other schedules)."""
    measure: bool = True
    """Also run the schedule on local ranks and print the measured timeline."""
    json: OutputFile | None = None
    """Also write the timelines, the bubbles, the environment and the command to this JSON file."""

    def parallel_options(self) -> ParallelOptions:
        name, stages = self.pipeline_schedule, self.stages_per_rank
        return ParallelOptions(pipeline_schedule=name, stages_per_rank=stages)


def show_schedule(arguments: list[str]) -> int:
    """Run tutti parity --show-schedule and return the exit code."""
    flags = parse(ShowSchedule, "tutti parity --show-schedule", arguments)
    check_at_least(2, flags, "pp")
    if not flags.measure:
        return _print_schedule(flags)
    if identify(os.environ).launcher != "python":
        return _measure_schedule(flags)
    _simulate_schedule(flags)  # raises UsageError before ranks are started
    return flags.start_ranks(["parity", "--show-schedule", *arguments], flags.pp)


def _simulate_schedule(flags: ShowSchedule) -> "Timeline":
    """Return the simulated timeline. The unit of time is the duration of one forward."""
    from tutti.parallel.pipeline.schedule_timeline import action_orders, simulate

    per_rank = flags.parallel_options().virtual_stages
    return simulate(action_orders(flags.pipeline_schedule, flags.pp, flags.accumulation, per_rank))


def _print_schedule(
    flags: ShowSchedule, measured: "Timeline | None" = None, note: str | None = None
) -> int:
    """Print the simulated and the measured timeline, write the JSON, and return 0."""
    from tutti.parallel.pipeline.schedule_timeline import bubble, bubble_formula, draw, length

    simulated = _simulate_schedule(flags)
    per_rank = flags.parallel_options().virtual_stages
    formula = bubble_formula(flags.pipeline_schedule, flags.pp, flags.accumulation, per_rank)
    print(
        f"schedule {flags.pipeline_schedule}: {flags.pp} ranks × {per_rank} "
        f"stage{'s' * (per_rank > 1)}, {flags.accumulation} microbatches\n{_LEGEND}\n\nsimulated"
    )
    print("\n".join(draw(simulated)))
    if measured is not None:
        # Scale the measured timeline to the width of the simulated one, to compare idle times.
        unit = length(measured) / length(simulated)
        print(f"\nmeasured, {length(measured) * 1e3:.1f} ms, the fastest of several steps")
        print("\n".join(draw(measured, unit)))
    bubbles = {"counted": bubble(simulated), "formula": formula}
    bubbles |= {} if measured is None else {"measured": bubble(measured)}
    labels = {"counted": "simulated", "formula": "by the formula", "measured": "measured"}
    shares = [f"{labels[key]} {share:.1%}" for key, share in bubbles.items() if share is not None]
    print(f"\nbubble: {', '.join(shares)}")
    if note:
        print(f"note: {note}")
    if flags.json is not None:
        results: dict[str, Any] = {
            "schedule": flags.pipeline_schedule,
            "pp": flags.pp,
            "accumulation": flags.accumulation,
            "stages_per_rank": per_rank,
            "bubble": bubbles,
            "counted": _timeline_rows(simulated),
            "measured": _timeline_rows(measured) if measured else None,
            "note": note,
        }
        write_json(flags.json, "tutti.schedule/1", results)
    return 0


def _measure_schedule(flags: ShowSchedule) -> int:
    from tutti.machine.cpu_numa import allowed_cpus
    from tutti.parallel.pipeline.schedule_timeline import measure
    from tutti.world.exchange import gather_json

    with flags.join_world() as world:
        measured = measure(world, flags.parallel_options(), flags.accumulation)
        note = world.sharing_note
        # Count the CPUs of all ranks, because ranks may be bound to different CPUs.
        cpus = len({cpu for rank_cpus in gather_json(allowed_cpus()) for cpu in rank_cpus})
        if note is None and world.device.type == "cpu" and cpus < world.size:
            shared = f"{world.size} ranks share {cpus} CPU{'s' * (cpus > 1)}"
            note = f"{shared}, so the measured times include time in which ranks wait for a CPU"
        return _print_schedule(flags, measured, note) if world.is_first else 0


def _timeline_rows(timeline: "Timeline") -> list[dict[str, Any]]:
    return [
        {"rank": rank, **asdict(span.action), "start": span.start, "end": span.end}
        for rank, spans in enumerate(timeline)
        for span in spans
    ]
