"""tutti parity: one device against every layout: the same loss, gradients and updates, or not."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import parse
from tutti.cli.mistakes import told_once
from tutti.cli.results import check_writable, write_json
from tutti.parallel.layout import Layout
from tutti.parity.options import ParityOptions, options_of, small_options_of
from tutti.parity.tolerance import TOLERANCES
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.parity.case import Case
    from tutti.world.world import World


@dataclass(frozen=True)
class Parity:
    """Train on one device and under layouts, and compare: tutti parity --recipe gpt --ranks 4

    The same seed, weights and samples; SGD and AdamW; several microbatches, clipping, an uneven
    step and activation checkpointing. Exit code 1 if any layout differs by more than rounding
    explains; docs/parity.md says how much that is, and how to read what is printed.
    """

    settings: ParityOptions
    recipe: str = "gpt"
    """gpt, wideresnet, efficientnet or lenet: the model, shrunk so that the check is quick."""
    full_size: bool = False
    """Leave the recipe's model as large as it is."""
    layouts: str = "all"
    """Which to check: dp2.tp2,shard4; all: every layout of this number of ranks."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Start this many local ranks, unless a launcher already did; unset: what --layouts needs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    backend: str | None = None
    """nccl, shm or gloo; unset: the device's own."""
    json: Path | None = None
    """Write the rows to this file, too."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""
    timeout: float | None = None
    """Seconds that a collective may take (default 600)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if "--show-schedule" in arguments:  # a picture of a pipeline, with flags of its own
        from tutti.cli.schedule import main as show_schedule

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
    """The flags, over defaults that fit the recipe and the layouts, which flags name, too."""
    name = _recipe_named_in(arguments)
    full = Parity(settings=options_of(name), recipe=name)
    asked = parse(Parity, "tutti parity", arguments, default=full)
    asked.settings.check()
    layouts = _layouts(asked.layouts, launched or asked.ranks)
    if asked.full_size:
        return asked, layouts
    small = small_options_of(name, layouts, asked.settings.parallel)
    return parse(Parity, "tutti parity", arguments, Parity(small, recipe=name)), layouts


def _recipe_named_in(arguments: Sequence[str]) -> str:
    """It decides which flags of a model exist, so it is read before them."""
    name = "gpt"
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--recipe":
            name = following
        elif argument.startswith("--recipe="):
            name = argument.partition("=")[2]
    return name


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
    from tutti.parity.case import make_case
    from tutti.parity.check import check_layouts
    from tutti.parity.table import Table
    from tutti.train.together import together
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    with init(
        device=options.device,
        backend=options.backend,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
        timeout=options.timeout,
    ) as world:
        settings = options.settings
        with told_once(world):
            case = together(lambda: make_case(options.recipe, settings, layouts))
        table = Table(layouts)
        if world.is_first:
            table.begin(_title(options, case, world))
        rows: list[dict[str, Any]] = []
        for row in check_layouts(case, layouts, world):
            rows.append(row)
            if world.is_first:
                table.add(row)
                if options.json is not None:  # each time: it may be stopped, or fail in the next
                    _write(options, case, world, rows, complete=len(rows) == len(layouts))
        gather_json(None)  # no rank leaves, with an exit code, before rank 0 has written all
    if all(row["ok"] is None for row in rows):
        if world.is_first:
            print("tutti parity: no layout could be compared: see the reasons", file=sys.stderr)
        return 2
    if any(row["ok"] is False for row in rows):
        return 1
    # A layout that was asked for by name and not compared must not look like one that passed.
    return 2 if options.layouts != "all" and any(row["ok"] is None for row in rows) else 0


def _title(options: Parity, case: "Case", world: "World") -> str:
    settings = options.settings
    tolerance = TOLERANCES[settings.precision]
    what = settings.model or options.recipe
    note = f" Note: {world.sharing_note}." if world.sharing_note else ""
    whole, uneven = case.counts[:2]
    return (
        f"{what} in {settings.precision} on {world.device.type} against one device in float64: "
        f"{settings.steps} steps of {whole} and {uneven} samples. Relative errors; allowed are "
        f"{tolerance.loss:g} (loss, norm), {tolerance.gradient:g} (gradient), "
        f"{tolerance.update:g} (updates by SGD and AdamW) and {tolerance.buffer:g} (buffers, such "
        f"as running statistics).{note}"
    )


def _write(
    options: Parity, case: "Case", world: "World", rows: list[dict[str, Any]], *, complete: bool
) -> None:
    assert options.json is not None
    settings = options.settings
    results = {
        "recipe": options.recipe,
        "model": settings.model,
        "architecture": asdict(settings.architecture),
        "precision": settings.precision,
        "tolerance": asdict(TOLERANCES[settings.precision]),
        "samples": case.counts,
        "recompute": case.recompute,
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
