"""Pipeline schedules by name: which stages a rank holds, and torch's class for each schedule.

gpipe        all forwards, then all backwards: keeps the activations of all microbatches
1f1b         each backward as early as possible: stage s of S keeps the activations of at most S - s
             microbatches
interleaved  1f1b with v stages per rank: the bubble is v times shorter
zero-bubble  interleaved, but weight gradients are computed later, in the bubbles
zbv          zero-bubble with two stages per rank in a V shape: rank 0 has the first and last stage
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from tutti.parallel.engine import LossFunction
from tutti.parallel.layout import ScheduleName

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
StageContext = Callable[[int], AbstractContextManager[None]]

SCHEDULES: dict[ScheduleName, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Stage(pipelining.PipelineStage):
    """torch's PipelineStage, but forward and backward of microbatch n run in `context(n)`."""

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
        # In torch 2.11, a stage of a V-schedule may send to its own rank. Backends refuse this, so
        # these operations are removed.
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def stages_of(name: ScheduleName, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages that a pipeline rank holds, in ascending order."""
    if name == "zbv":
        return [rank, 2 * ranks - 1 - rank]  # one stage on each arm of the V
    return [rank + loop * ranks for loop in range(per_rank)]


def rank_of(name: ScheduleName, stage: int, ranks: int) -> int:
    """Return the pipeline rank that holds a stage."""
    if name == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def build_schedule(
    name: ScheduleName, stages: Sequence[Stage], microbatches: int, loss_fn: LossFunction
) -> Schedule:
    """Return torch's schedule for this rank's stages.

    Gradients are not scaled, because the losses of microbatches add up to the loss of the step.
    """
    held = stages[0] if issubclass(SCHEDULES[name], PipelineScheduleSingle) else list(stages)
    schedule: Schedule = SCHEDULES[name](held, microbatches, loss_fn, scale_grads=False)
    return schedule
