"""tutti parity --show-schedule: the timeline of a pipeline schedule, simulated and measured."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable, write_json
from tutti.parallel.layout import ParallelOptions, ScheduleName
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.parallel.pipeline.schedule_timeline import Timeline

_LEGEND = """\
# F3: forward of microbatch 3 (5F3: on stage 5); B: backward; I, W: the halves
# of a backward, the gradients of inputs and of weights; dots: idle.
# Counted: F, I and W cost 1, B costs 2, communication costs nothing.
# Measured: an action that is too short for its label shows the start of it."""


@dataclass(frozen=True)
class ShowSchedule:
    """Show a pipeline schedule: tutti parity --show-schedule --schedule 1f1b --pp 4

    Prints which rank computes what and when, and the bubble: the share of time in which ranks are
    idle. The first timeline is simulated, with a fixed cost for each action. The second is measured
    on local ranks, with a small model of equal stages.
    """

    pipeline_schedule: Annotated[ScheduleName, tyro.conf.arg(aliases=["--schedule"])] = "1f1b"
    """gpipe, 1f1b, interleaved, zero-bubble or zbv."""
    pp: int = 4
    """Number of ranks of the pipeline."""
    accumulation: int = 8
    """Microbatches per step."""
    stages_per_rank: int | None = None
    """Stages per rank. Unset: 1 for gpipe and 1f1b, 2 for the others."""
    measure: bool = True
    """Also run the schedule on local ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to measure on."""
    ranks_per_gpu: int = 1
    """Ranks that may share one GPU."""
    json: Path | None = None
    """Also write timelines, bubbles, environment and command to this file."""

    @property
    def options(self) -> ParallelOptions:
        """The options of the pipeline engine."""
        return ParallelOptions(
            pipeline_schedule=self.pipeline_schedule, stages_per_rank=self.stages_per_rank
        )


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    flags = parse(ShowSchedule, "tutti parity --show-schedule", arguments)
    if flags.pp < 2:
        raise UsageError(f"--pp {flags.pp}: a pipeline has 2 ranks or more")
    check_writable("--json", flags.json)
    if not flags.measure:
        return show(flags)
    if identify(os.environ).launcher != "python":
        return _measure(flags)
    counted(flags)  # raises UsageError before ranks are started
    return LocalWorld(
        command=[sys.executable, "-m", "tutti.cli.show_schedule", *arguments],
        ranks=flags.pp,
        device=flags.device,
        ranks_per_gpu=flags.ranks_per_gpu,
        show="first",
    ).run()


def counted(flags: ShowSchedule) -> "Timeline":
    """Return the simulated timeline. The unit of time is the duration of one forward."""
    from tutti.parallel.pipeline.schedule_timeline import action_orders, simulate

    per_rank = flags.options.virtual_stages
    return simulate(action_orders(flags.pipeline_schedule, flags.pp, flags.accumulation, per_rank))


def show(flags: ShowSchedule, measured: "Timeline | None" = None, note: str | None = None) -> int:
    """Print the simulated timeline, then the measured timeline, and write the JSON."""
    from tutti.parallel.pipeline.schedule_timeline import bubble, bubble_formula, draw, length

    timeline = counted(flags)
    per_rank = flags.options.virtual_stages
    closed = bubble_formula(flags.pipeline_schedule, flags.pp, flags.accumulation, per_rank)
    print(
        f"schedule {flags.pipeline_schedule}: {flags.pp} ranks × {per_rank} "
        f"stage{'s' * (per_rank > 1)}, {flags.accumulation} microbatches"
    )
    print(_LEGEND)
    print("\ncounted")
    print("\n".join(draw(timeline)))
    if measured is not None:
        # Draw it as wide as the simulated timeline, so that idle times can be compared.
        unit = length(measured) / length(timeline)
        print(f"\nmeasured, {length(measured) * 1e3:.1f} ms, the fastest of several steps")
        print("\n".join(draw(measured, unit)))
    text = f"\nbubble: counted {bubble(timeline):.1%}"
    if closed is not None:
        text += f", by the formula {closed:.1%}"
    if measured is not None:
        text += f", measured {bubble(measured):.1%}"
    print(text)
    if note:
        print(f"note: {note}")
    if flags.json is not None:
        results: dict[str, Any] = {
            "schedule": flags.pipeline_schedule,
            "pp": flags.pp,
            "accumulation": flags.accumulation,
            "stages_per_rank": per_rank,
            "bubble": {"counted": bubble(timeline), "formula": closed}
            | ({"measured": bubble(measured)} if measured else {}),
            "counted": _rows(timeline),
            "measured": _rows(measured) if measured else None,
            "note": note,
        }
        write_json(flags.json, "tutti.schedule/1", results)
    return 0


def _measure(flags: ShowSchedule) -> int:
    from tutti.machine.cpu_numa import allowed_cpus
    from tutti.parallel.pipeline.schedule_timeline import measure
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    shared = flags.ranks_per_gpu if flags.ranks_per_gpu > 1 else None
    with init(device=flags.device, ranks_per_gpu=shared) as world:
        measured = measure(world, flags.options, flags.accumulation)
        note = world.sharing_note
        # Count the CPUs of all ranks, because ranks may be bound to different CPUs.
        cpus = len({cpu for rank in gather_json(allowed_cpus()) for cpu in rank})
        if note is None and world.device.type == "cpu" and cpus < world.size:
            note = f"{world.size} ranks share {cpus} CPU{'s' * (cpus > 1)}: they also wait for CPUs"
        return show(flags, measured, note) if world.is_first else 0


def _rows(timeline: "Timeline") -> list[dict[str, Any]]:
    return [
        {"rank": rank, **asdict(span.action), "start": span.start, "end": span.end}
        for rank, spans in enumerate(timeline)
        for span in spans
    ]


if __name__ == "__main__":
    # main() starts ranks that run this module.
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"tutti parity: {error}", file=sys.stderr)
        sys.exit(2)
