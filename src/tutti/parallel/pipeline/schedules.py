"""Pipeline schedules by name: which stages a rank holds, and torch's class for each schedule.

gpipe        all forwards, then all backwards: keeps the activations of all microbatches
1f1b         each backward as early as possible: stage s of S keeps at most S - s microbatches
interleaved  1f1b with v stages per rank; the bubble is v times shorter
zero-bubble  interleaved, with weight gradients computed later, in the bubbles
zbv          zero-bubble with two stages per rank, in V shape: rank 0 has the first and last stage
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from tutti.parallel.engine import LossFunction
from tutti.parallel.layout import Recompute, ScheduleName
from tutti.world.errors import UsageError

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
StageContext = Callable[[int], AbstractContextManager[None]]

SCHEDULES: dict[ScheduleName, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}

SPLIT_BACKWARD = ("zero-bubble", "zbv")
"""Schedules whose backward has two halves. The first half computes gradients of the inputs, for
which other ranks wait. The second half runs later and computes gradients of the weights."""


def check_techniques(schedule: ScheduleName, compile: bool, recompute: Recompute = "none") -> None:
    """Raise UsageError for techniques that a schedule with a split backward cannot run."""
    if schedule in SPLIT_BACKWARD and compile:
        raise UsageError(
            f"--compile cannot be combined with --pipeline-schedule {schedule}, because a compiled "
            "backward cannot be split into gradients of inputs and of weights: use "
            "--pipeline-schedule 1f1b or interleaved"
        )
    if schedule in SPLIT_BACKWARD and recompute == "selective":
        raise UsageError(
            "--checkpoint-activations selective cannot be combined with --pipeline-schedule "
            f"{schedule}, because each half of the split backward would need the activations: use "
            "--checkpoint-activations full, or --pipeline-schedule 1f1b or interleaved"
        )


class Stage(pipelining.PipelineStage):
    """torch's stage, but forward and backward of a microbatch run in `context(number)`."""

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
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def stages_of(name: ScheduleName, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages that a rank of the pipeline holds, in ascending order."""
    if name == "zbv":
        return [rank, 2 * ranks - 1 - rank]  # one stage on each arm of the V
    return [rank + loop * ranks for loop in range(per_rank)]


def rank_of(name: ScheduleName, stage: int, ranks: int) -> int:
    """Return the rank of the pipeline that holds a stage."""
    if name == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def check_microbatches(name: ScheduleName, ranks: int, microbatches: int) -> None:
    """Raise UsageError if the schedule cannot run this number. The message suggests another."""

    def divides(count: int) -> bool:
        rounds = max(1, count // ranks)
        return name not in ("interleaved", "zero-bubble") or count % rounds == 0

    lowest = max(ranks, microbatches)
    valid = next(n for n in range(lowest, lowest + ranks + 1) if divides(n))
    cure = f"use --accumulation {valid}"
    if microbatches < ranks:
        raise UsageError(
            f"--accumulation {microbatches} is too small for pp{ranks}, because with fewer "
            f"microbatches than pipeline ranks some ranks would always be idle: {cure}"
        )
    if not divides(microbatches):
        rounds = microbatches // ranks
        raise UsageError(
            f"--pipeline-schedule {name} divides the microbatches into {microbatches} // {ranks} = "
            f"{rounds} rounds of equal size, but --accumulation {microbatches} is not divisible by "
            f"{rounds}: {cure}"
        )


def build_schedule(
    name: ScheduleName, stages: Sequence[Stage], microbatches: int, loss_fn: LossFunction
) -> Schedule:
    """Return torch's schedule for this rank's stages.

    Gradients are not scaled, because the losses of microbatches add up to the loss of the step.
    """
    held = stages[0] if issubclass(SCHEDULES[name], PipelineScheduleSingle) else list(stages)
    schedule: Schedule = SCHEDULES[name](held, microbatches, loss_fn, scale_grads=False)
    return schedule
