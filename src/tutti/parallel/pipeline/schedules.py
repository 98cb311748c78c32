"""Pipeline schedules by name: which stages a rank holds, and torch's class for each schedule.

gpipe        all forwards, then all backwards: keeps the activations of all microbatches
1f1b         each backward as early as possible: stage s of S keeps at most S - s microbatches
interleaved  1f1b with several stages per rank, which divides the bubble by their number
zero-bubble  interleaved, with weight gradients computed later, in the bubbles
zbv          zero-bubble with two stages per rank, in V shape: rank 0 has the first and last stage
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from tutti.parallel.layout import Recompute, ScheduleName
from tutti.world.errors import UsageError

SINGLE: dict[ScheduleName, type[PipelineScheduleSingle]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}
MULTI: dict[ScheduleName, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}

SPLIT_BACKWARD = ("zero-bubble", "zbv")
"""Schedules whose backward has two halves. The first half computes gradients of the inputs, for
which other ranks wait. The second half runs later and computes gradients of the weights."""

StageContext = Callable[[int], AbstractContextManager[None]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Schedule = PipelineScheduleSingle | PipelineScheduleMulti


def refuse_compiled(schedule: ScheduleName) -> None:
    """Raise UsageError if the schedule splits backward, which a compiled model does not allow."""
    if schedule in SPLIT_BACKWARD:
        raise UsageError(
            f"--compile contradicts --pipeline-schedule {schedule}: a compiled backward cannot be "
            "split into gradients of inputs and of weights: use --pipeline-schedule 1f1b or "
            "interleaved"
        )


def check_techniques(schedule: ScheduleName, compile: bool, recompute: Recompute) -> None:
    """Raise UsageError for techniques that a schedule with a split backward cannot run."""
    if compile:
        refuse_compiled(schedule)
    if recompute == "selective" and schedule in SPLIT_BACKWARD:
        raise UsageError(
            f"--checkpoint-activations selective contradicts --pipeline-schedule {schedule}: the "
            "activations that it keeps serve one backward, and this schedule splits backward into "
            "two halves: use --checkpoint-activations full, or --pipeline-schedule 1f1b or "
            "interleaved"
        )


class Stage(PipelineStage):
    """torch's stage; each forward and backward of microbatch `number` runs in `context(number)`."""

    def __init__(self, *arguments: Any, context: StageContext, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._context = context

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._context(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._context(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._context(bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # In torch 2.11, a stage of a V-schedule may send to its own rank, which backends refuse.
        operations = super()._get_init_p2p_neighbors_ops()
        return [each for each in operations if each.group_peer != self.group_rank]


def stages_of(name: ScheduleName, rank: int, ranks: int, per_rank: int) -> list[int]:
    """The stages that a rank of the pipeline holds, in ascending order."""
    if name == "zbv":
        return [rank, 2 * ranks - 1 - rank]  # one stage on each arm of the V
    return [rank + loop * ranks for loop in range(per_rank)]


def rank_of(name: ScheduleName, stage: int, ranks: int) -> int:
    """The rank of the pipeline that holds a stage."""
    if name == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def check_microbatches(name: ScheduleName, ranks: int, microbatches: int) -> None:
    """Raise UsageError if the schedule cannot run this number of microbatches.

    The message suggests a valid number.
    """
    if microbatches < ranks:
        raise UsageError(
            f"--accumulation {microbatches} gives pp{ranks} {microbatches} "
            f"microbatch{'es' * (microbatches != 1)}, fewer than its {ranks} ranks, some of which "
            f"would always be idle: use --accumulation {_valid(name, ranks, ranks)}"
        )
    if not _divides(name, ranks, microbatches):
        rounds = microbatches // ranks
        raise UsageError(
            f"--pipeline-schedule {name} runs {microbatches} // {ranks} = {rounds} rounds of "
            f"equally many microbatches, and --accumulation {microbatches} is not divisible by "
            f"{rounds}: use --accumulation {_valid(name, ranks, microbatches)}"
        )


def build_schedule(
    name: ScheduleName, stages: Sequence[PipelineStage], microbatches: int, loss: Loss
) -> Schedule:
    """torch's schedule for this rank's stages.

    Gradients are not scaled, because the losses of microbatches add up to the loss of the step.
    """
    if name in SINGLE:
        return SINGLE[name](stages[0], microbatches, loss, scale_grads=False)
    return MULTI[name](list(stages), microbatches, loss, scale_grads=False)


def _divides(name: ScheduleName, ranks: int, microbatches: int) -> bool:
    if name not in ("interleaved", "zero-bubble"):
        return True
    return microbatches % max(1, microbatches // ranks) == 0


def _valid(name: ScheduleName, ranks: int, lowest: int) -> int:
    return next(m for m in range(lowest, lowest + ranks + 1) if _divides(name, ranks, m))
