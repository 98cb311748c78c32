"""In which order every rank of a pipeline runs its forwards and backwards.

For schedules with several stages on a rank this is torch's own list, the one that it runs. For
gpipe and 1f1b torch runs a loop instead; the loop's order is written down here (in 2.13 the list
that torch keeps beside it leaves out microbatch 0 of 1f1b's last stage). A test compares all of
them with what really ran.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from tutti.parallel.options import ScheduleName
from tutti.parallel.pipeline.schedule import MULTI, check_microbatches, stages_of


@dataclass(frozen=True)
class Action:
    """What a rank does with a microbatch on a stage.

    F is forward, B backward; I and W are its halves, the gradient of the inputs and of the weights.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


def orders(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    """Every rank's actions, in the order in which it runs them."""
    check_microbatches(name, ranks, microbatches)
    if name == "gpipe":
        return [_gpipe(rank, microbatches) for rank in range(ranks)]
    if name == "1f1b":
        return [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    return _from_torch(name, ranks, microbatches, stages_per_rank)


def _gpipe(stage: int, microbatches: int) -> list[Action]:
    forwards = [Action("F", stage, number) for number in range(microbatches)]
    return forwards + [Action("B", stage, number) for number in range(microbatches)]


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    ahead = min(microbatches, stages - stage)  # forwards until the first backward comes back
    actions = [Action("F", stage, number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(Action("B", stage, number))
        if number + ahead < microbatches:
            actions.append(Action("F", stage, number + ahead))
    return actions


def _from_torch(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    # The list is made when the schedule is, from a few numbers of its stages: no ranks are needed.
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            submod=nn.Identity(),
        )
        for stage in stages_of(name, 0, ranks, stages_per_rank)
    ]
    listed = MULTI[name](stages, microbatches).pipeline_order
    return [
        [_read(str(action)) for action in listed[rank] if action is not None]
        for rank in range(ranks)
    ]


def _read(text: str) -> Action:
    """torch writes stage 2's forward of microbatch 3 as 2F3."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    assert match is not None, f"torch's schedule has an action {text!r} that is new to us"
    return Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]
