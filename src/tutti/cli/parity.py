"""tutti parity: compare loss, gradients and updates of layouts with those of one device."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import flag_value, parse
from tutti.cli.results import check_writable, join_world, usage_error_on_rank_0, write_json
from tutti.parallel.layout import Layout
from tutti.parity.parity_options import (
    ParityOptions,
    full_size_options,
    small_options,
)
from tutti.parity.tolerances import TOLERANCES
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.parity.workload import Workload
    from tutti.world.world import World


@dataclass(frozen=True)
class Parity:
    """Train on one device and under layouts, and compare: tutti parity --recipe gpt --ranks 4

    All use the same seed, weights and samples, SGD and AdamW, several microbatches, clipping, an
    uneven step and activation checkpointing. Exit code 1 if the error of any layout is larger than
    rounding explains.
    """

    settings: ParityOptions
    recipe: str = "gpt"
    """gpt, wideresnet, efficientnet or lenet: the model, shrunk to make the check fast."""
    full_size: bool = False
    """Use the recipe's model at its full size."""
    layouts: str = "all"
    """Layouts to check, such as dp2.tp2,shard4; all: every layout of this number of ranks."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Local ranks to start, unless a launcher already did; unset: as many as --layouts needs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the ranks; auto: CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Ranks that may share one GPU."""
    backend: str | None = None
    """nccl, shm or gloo; unset: the default of the device."""
    json: Path | None = None
    """Also write the rows to this file."""
    start_timeout: float | None = None
    """Seconds for all ranks to start (default 300)."""
    timeout: float | None = None
    """Seconds for a collective (default 600)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if "--show-schedule" in arguments:  # draws a pipeline schedule; has its own flags
        from tutti.cli.show_schedule import main as show_schedule

        return show_schedule([each for each in arguments if each != "--show-schedule"])
    identity = identify(os.environ)
    launched = identity.size if identity.launcher != "python" else None
    options, layouts = _options(arguments, launched)
    check_writable("--json", options.json)
    if launched is None:
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "parity", *arguments],
            ranks=layouts[0].size,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu,
            show="first",
            reported_codes=(1, 2),
        ).run()
    return _check(options, layouts)


def _options(arguments: list[str], launched: int | None) -> tuple[Parity, list[Layout]]:
    """Parse the flags twice: the defaults depend on --recipe and --layouts."""
    name = flag_value("--recipe", arguments) or "gpt"
    full = Parity(settings=full_size_options(name), recipe=name)
    requested = parse(Parity, "tutti parity", arguments, default=full)
    requested.settings.check()
    layouts = _layouts(requested.layouts, launched or requested.ranks)
    if requested.full_size:
        return requested, layouts
    small = small_options(name, layouts, requested.settings.parallel)
    return parse(Parity, "tutti parity", arguments, Parity(small, recipe=name)), layouts


def _layouts(text: str, ranks: int | None) -> list[Layout]:
    if text == "all":
        if ranks is None:
            raise UsageError("--layouts all: of how many ranks? add --ranks 4")
        if ranks < 1:
            raise UsageError(f"--ranks {ranks}: a world has at least one rank, use -n 1")
        return Layout.every(ranks)
    layouts = [Layout.parse(each.strip()) for each in text.split(",")]
    for layout in layouts:
        layout.check(layouts[0].size if ranks is None else ranks)
    return layouts


def _check(options: Parity, layouts: list[Layout]) -> int:
    from tutti import comm
    from tutti.parity.check_layouts import ParityTable, check_layouts
    from tutti.parity.workload import make_workload
    from tutti.train.init import agree

    with join_world(options, backend=options.backend) as world:
        settings = options.settings
        with usage_error_on_rank_0(world):
            workload = agree(lambda: make_workload(options.recipe, settings, layouts))
        table = ParityTable(layouts)
        if world.is_first:
            table.begin(_title(options, workload, world))
        rows: list[dict[str, Any]] = []
        for row in check_layouts(workload, layouts, world):
            rows.append(row)
            if world.is_first:
                table.add(row)
                # Write after each row, because the next layout may fail or be interrupted.
                _write(options, workload, world, rows, complete=len(rows) == len(layouts))
        comm.gather_json(None)  # a barrier: no rank may exit before rank 0 has written the file
    passed = {row["ok"] for row in rows}
    if passed == {None} and world.is_first:
        print("tutti parity: no layout could be compared, for the reasons above", file=sys.stderr)
    if False in passed:
        return 1
    # A layout that was requested by name and could not be compared has not passed.
    return 2 if passed == {None} or (options.layouts != "all" and None in passed) else 0


def _title(options: Parity, workload: "Workload", world: "World") -> str:
    settings = options.settings
    tolerance = TOLERANCES[settings.precision]
    model = settings.model or options.recipe
    note = f" Note: {world.sharing_note}." if world.sharing_note else ""
    full, uneven = workload.counts[:2]
    return (
        f"{model} in {settings.precision} on {world.device.type} against one device in float64: "
        f"{settings.steps} steps of {full} and {uneven} samples. Relative errors; tolerances are "
        f"{tolerance.loss:g} (loss, norm), {tolerance.gradient:g} (gradient), "
        f"{tolerance.update:g} (updates by SGD and AdamW) and {tolerance.buffer:g} (buffers, such "
        f"as running statistics).{note}"
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
