"""The check itself: one reference, then every layout in turn, in one world."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tutti.parallel.flat import copy_from_first
from tutti.parallel.layout import Layout
from tutti.parity.candidate import make_engine, train_under
from tutti.parity.case import Case
from tutti.parity.diagnosis import Setting, diagnose
from tutti.parity.difference import StepDifference, worst
from tutti.parity.reference import (
    OPTIMIZERS,
    OptimizerName,
    Scales,
    StepRecord,
    buffers_of,
    scales_of,
    train_alone,
)
from tutti.parity.tolerance import TOLERANCES
from tutti.train.together import together
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json
from tutti.world.world import World

Row = dict[str, Any]


def check_layouts(case: Case, layouts: Sequence[Layout], world: World) -> Iterator[Row]:
    """A row for each layout, the same on every rank. Call it on every rank."""
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in convolutions, too
    alone = Alone(case, world)
    for layout in layouts:
        yield check_layout(case, layout, world, alone)
        gc.collect()  # engines hold themselves in cycles, and their groups with them


class Alone:
    """What one device came to: computed by rank 0, known to all, once for all layouts."""

    def __init__(self, case: Case, world: World) -> None:
        self.case = case
        self.world = world
        mine = asdict(scales_of(case, world.device)) if world.is_first else None
        self.scales = Scales(**gather_json(mine)[0])
        self._known: dict[tuple[OptimizerName, int, int], list[StepRecord]] = {}

    def records(self, name: OptimizerName, layout: Layout) -> list[StepRecord]:
        """The steps with an optimizer. Call it on every rank."""
        key = name, 1, 1
        if self.case.by_microbatch:
            key = name, layout.data_ranks, self.case.microbatches(layout)
        if key not in self._known:
            self._known[key] = self._train(name, layout)
        return self._known[key]

    def _train(self, name: OptimizerName, layout: Layout) -> list[StepRecord]:
        case, device = self.case, self.world.device
        records: list[StepRecord] = []
        if self.world.is_first:
            records = list(train_alone(case, name, self.scales, layout, device))
        scalars = gather_json([(each.loss, each.norm) for each in records])[0]
        if not self.world.is_first:
            model = case.make_model().to(device, torch.float64)
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
            copy_from_first([tensor for kind in tensors for tensor in kind.values()])
        return records


def check_layout(case: Case, layout: Layout, world: World, alone: Alone) -> Row:
    """One layout against one device, with both optimizers."""
    row: Row = {
        "layout": str(layout),
        "ranks": layout.size,
        "microbatches": case.microbatches(layout),
    }
    seen: dict[OptimizerName, list[StepDifference]] = {}
    for name in OPTIMIZERS:
        try:
            engine = together(lambda: make_engine(case, layout, world))
        except UsageError as error:
            return row | {
                **dict.fromkeys(("loss_rel_err", "grad_rel_err", "norm_rel_err", "update_rel_err")),
                **dict.fromkeys(("buffer_rel_err", "worst_parameter", "worst_role")),
                **dict.fromkeys(("worst_buffer", "own_buffers", "diagnosis", "ok")),
                "not_applicable": str(error),
            }
        records = alone.records(name, layout)
        seen[name] = list(train_under(engine, case, name, alone.scales, records))
        row["engine"] = engine.description
    return row | _verdict(case, layout, seen)


def _verdict(case: Case, layout: Layout, seen: dict[OptimizerName, list[StepDifference]]) -> Row:
    tolerance = TOLERANCES[case.options.precision]
    setting = Setting(layout, case.microbatches(layout), case.counts, case.roles)
    steps = [step for each in seen.values() for step in each]
    gradients = worst([each for step in steps for each in step.gradients])
    compared = [each for step in steps for each in step.buffers]
    buffer = worst(compared) if compared else None
    diagnosis = None
    for name, each in seen.items():  # SGD first: it hides nothing
        said = diagnose(each, setting, tolerance)
        if said is not None:
            diagnosis = said if name == "sgd" else f"with AdamW only: {said}"
            break
    return {
        "loss_rel_err": max(step.loss.error for step in steps),
        "grad_rel_err": gradients.error,
        "norm_rel_err": max(step.norm.error for step in steps),
        "update_rel_err": {name: worst(each[-1].updates).error for name, each in seen.items()},
        "buffer_rel_err": buffer.error if buffer else None,
        "worst_parameter": gradients.name,
        "worst_role": case.roles.get(gradients.name),
        "worst_buffer": buffer.name if buffer else None,
        "own_buffers": sorted({name for step in steps for name in step.own_buffers}),
        "diagnosis": diagnosis,
        "ok": diagnosis is None,
        "not_applicable": None,
    }
