"""The parity check: one reference, then every layout in turn, and the table of results."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from tutti import comm
from tutti.comm.collectives import broadcast_coalesced
from tutti.parallel.layout import Layout
from tutti.parity.compare import StepDifference, make_engine, train_under_layout, worst
from tutti.parity.diagnosis import Setting, diagnose
from tutti.parity.single_device import (
    OPTIMIZERS,
    OptimizerName,
    Scales,
    StepRecord,
    buffers_of,
    derive_scales,
    train_single_device,
)
from tutti.parity.tolerances import TOLERANCES
from tutti.parity.workload import Workload
from tutti.train.init import agree
from tutti.world.errors import UsageError
from tutti.world.world import World

Row = dict[str, Any]

_ERRORS = ("loss", "grad", "norm", "sgd", "adamw", "stats")
_COMPARED = (  # keys of a row that are null if the layout could not be compared
    *("loss_rel_err", "grad_rel_err", "norm_rel_err", "update_rel_err", "buffer_rel_err"),
    *("worst_parameter", "worst_role", "worst_buffer", "own_buffers", "diagnosis", "ok"),
)


def check_layouts(workload: Workload, layouts: Sequence[Layout], world: World) -> Iterator[Row]:
    """Yield a row for each layout, the same on every rank. Collective."""
    torch.backends.cudnn.allow_tf32 = False  # convolutions in float32 must not use TF32
    reference = Reference(workload, world)
    for layout in layouts:
        yield check_layout(workload, layout, world, reference)
        gc.collect()  # reference cycles of engines keep their process groups alive


class Reference:
    """The records of the single device: computed by rank 0 and broadcast, once for all layouts."""

    def __init__(self, workload: Workload, world: World) -> None:
        self.workload = workload
        self.world = world
        scales = asdict(derive_scales(workload, world.device)) if world.is_first else None
        self.scales = Scales(**comm.gather_json(scales)[0])
        self._records: dict[tuple[OptimizerName, int, int], list[StepRecord]] = {}

    def records(self, name: OptimizerName, layout: Layout) -> list[StepRecord]:
        """Return the single device's records of all steps with this optimizer. Collective."""
        key = name, 1, 1
        if self.workload.by_microbatch:
            key = name, layout.data_ranks, self.workload.microbatches(layout)
        if key not in self._records:
            self._records[key] = self._train(name, layout)
        return self._records[key]

    def _train(self, name: OptimizerName, layout: Layout) -> list[StepRecord]:
        workload, device = self.workload, self.world.device
        records: list[StepRecord] = []
        if self.world.is_first:
            records = list(train_single_device(workload, name, self.scales, layout, device))
        scalars = comm.gather_json([(each.loss, each.norm) for each in records])[0]
        if not self.world.is_first:
            model = workload.make_model().to(device, torch.float64)
            like = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
            records = [
                StepRecord(
                    loss,
                    {n: torch.empty_like(p) for n, p in like.items()},
                    norm,
                    {n: torch.empty_like(p) for n, p in like.items()},
                    buffers_of(model),
                )
                for loss, norm in scalars
            ]
        for each in records:
            tensors = (each.gradients, each.updates, each.buffers)
            broadcast_coalesced([tensor for kind in tensors for tensor in kind.values()])
        return records


def check_layout(workload: Workload, layout: Layout, world: World, reference: Reference) -> Row:
    row: Row = {
        "layout": str(layout),
        "ranks": layout.size,
        "microbatches": workload.microbatches(layout),
    }
    results: dict[OptimizerName, list[StepDifference]] = {}
    for name in OPTIMIZERS:
        try:
            engine = agree(lambda: make_engine(workload, layout, world))
        except UsageError as error:
            return row | dict.fromkeys(_COMPARED) | {"not_applicable": str(error)}
        records = reference.records(name, layout)
        steps = train_under_layout(engine, workload, name, reference.scales, records)
        results[name] = list(steps)
        row["engine"] = engine.description
    return row | _verdict(workload, layout, results)


def _verdict(
    workload: Workload, layout: Layout, results: dict[OptimizerName, list[StepDifference]]
) -> Row:
    tolerance = TOLERANCES[workload.options.precision]
    setting = Setting(layout, workload.microbatches(layout), workload.counts, workload.roles)
    steps = [step for each in results.values() for step in each]
    gradients = worst([each for step in steps for each in step.gradients])
    compared = [each for step in steps for each in step.buffers]
    buffer = worst(compared) if compared else None
    diagnosis = None
    for name, each in results.items():  # SGD first: its updates are proportional to the gradients
        found = diagnose(each, setting, tolerance)
        if found is not None:
            diagnosis = found if name == "sgd" else f"with AdamW only: {found}"
            break
    return {
        "loss_rel_err": max(step.loss.error for step in steps),
        "grad_rel_err": gradients.error,
        "norm_rel_err": max(step.norm.error for step in steps),
        "update_rel_err": {name: worst(each[-1].updates).error for name, each in results.items()},
        "buffer_rel_err": buffer.error if buffer else None,
        "worst_parameter": gradients.name,
        "worst_role": workload.roles.get(gradients.name),
        "worst_buffer": buffer.name if buffer else None,
        "own_buffers": sorted({name for step in steps for name in step.own_buffers}),
        "diagnosis": diagnosis,
        "ok": diagnosis is None,
        "not_applicable": None,
    }


class ParityTable:
    """Prints a row for each layout as soon as it is known, and the diagnosis of a failed layout."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._console = Console(highlight=False)
        self._width = max(6, *(len(str(layout)) for layout in layouts))

    def begin(self, title: str) -> None:
        self._console.print(Text(title))
        errors = " ".join(f"{name:>5}" for name in _ERRORS)
        self._print(f"{'layout':<{self._width}} {errors}         worst parameter")

    def add(self, row: Row) -> None:
        layout = f"{row['layout']:<{self._width}}"
        if row["not_applicable"]:
            self._print(f"{layout} not applicable: {row['not_applicable']}")
            return
        errors = [row[f"{name}_rel_err"] for name in _ERRORS[:3]]
        errors += [row["update_rel_err"][name] for name in _ERRORS[3:5]]
        errors += [row["buffer_rel_err"]]
        cells = " ".join("    -" if error is None else f"{error:5.0e}" for error in errors)
        verdict, color = ("ok", "green") if row["ok"] else ("FAILED", "red")
        name = row["worst_parameter"].removesuffix(".weight")
        self._print(f"{layout} {cells}  ", (f"{verdict:<6}", color), f" {name}")
        if row["diagnosis"]:
            text = row["diagnosis"]
            if row["worst_buffer"] is None or row["worst_buffer"] not in text:
                text += f" (worst: {row['worst_parameter']}, {row['worst_role']})"
            self._print((f"{row['layout']} FAILED: {text}", "red"))
        if row["own_buffers"]:
            first, *others = row["own_buffers"]
            more = f" and {len(others)} more" if others else ""
            self._print(
                f"{row['layout']} note: not compared: {first}{more}. These buffers depend on each "
                "data rank's own samples; evaluation and checkpoints use those of rank 0"
            )

    def _print(self, *parts: str | tuple[str, str]) -> None:
        # One line per row, for grep; a narrow terminal wraps the line itself.
        self._console.print(Text.assemble(*parts), soft_wrap=True)
