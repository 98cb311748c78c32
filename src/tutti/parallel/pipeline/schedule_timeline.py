"""Simulated and measured timelines of pipeline schedules: the actions of every rank over time.

In the simulation, every rank runs its actions in order. Each action starts as soon as its inputs
have been computed. A forward takes 1 unit of time, a backward 2 units, and each half of a split
backward 1 unit. Communication takes no time. The bubble is the idle time of all ranks divided by
the total time of all ranks. With p ranks, m microbatches and v stages per rank, the bubble is

    (p - 1) / (v m + p - 1)       gpipe, 1f1b (v = 1), interleaved: a rank waits for p - 1 forwards
                                  and p - 1 backwards of single stages
    (p - 1) / (3 v m + p - 1)     zero-bubble, zbv: a rank waits only for p - 1 forwards

The order of actions is read from torch's schedule. torch's gpipe and 1f1b run a loop and have no
list of actions, so their order is computed here. A test compares all orders with recorded runs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from tutti.comm.collectives import barrier
from tutti.parallel.apply import build_engine
from tutti.parallel.layout import ParallelOptions, ScheduleName, check_microbatches
from tutti.parallel.pipeline.executor import Pipeline
from tutti.parallel.pipeline.schedules import SCHEDULES, stages_of
from tutti.parallel.pipeline.stages import now
from tutti.world.exchange import gather_json
from tutti.world.world import World

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}  # fills the rest of an action after its label
# The measured model is so wide that a stage takes milliseconds, much longer than its communication.
_DIM, _LAYERS, _SAMPLES = 384, 4, 256
_STEPS = 5


@dataclass(frozen=True)
class Action:
    """The forward (F), backward (B) or half backward of one microbatch on one stage.

    The halves of a split backward compute the gradients of the inputs (I) and of the weights (W).
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


def action_orders(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    """Return the actions of every rank, in the order in which the rank runs them."""
    check_microbatches(name, ranks, microbatches)
    if name == "gpipe":  # all forwards come before the first backward
        return [_loop_order(rank, microbatches, microbatches) for rank in range(ranks)]
    if name == "1f1b":
        return [_loop_order(rank, ranks - rank, microbatches) for rank in range(ranks)]
    return _from_torch(name, ranks, microbatches, stages_per_rank)


def _loop_order(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """Return the actions of a stage that runs `ahead` forwards before its first backward."""
    actions = [Action("F", stage, number) for number in range(min(ahead, microbatches))]
    for number in range(microbatches):
        actions.append(Action("B", stage, number))
        if number + ahead < microbatches:
            actions.append(Action("F", stage, number + ahead))
    return actions


def _from_torch(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    # The constructor of torch's schedule does not communicate, and reads only these stage
    # attributes.
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
    orders: list[list[Action]] = []
    for _, entries in sorted(SCHEDULES[name](stages, microbatches).pipeline_order.items()):
        # torch writes the forward of microbatch 3 on stage 2 as 2F3.
        texts = [str(entry) for entry in entries if entry is not None]
        matches = [re.fullmatch(r"(\d+)([FBIW])(\d+)", text) for text in texts]
        assert all(matches), f"torch's schedule {name} has an unknown action"
        orders.append([Action(m[2], int(m[1]), int(m[3])) for m in matches if m])  # type: ignore[arg-type]
    return orders


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


Timeline = list[list[Span]]
"""The spans of every rank, in order. Time starts at 0."""


def simulate(orders: Sequence[Sequence[Action]]) -> Timeline:
    """Return the timeline of all ranks if each action takes the time in `COSTS`."""
    last = max(action.stage for actions in orders for action in actions)
    done: dict[Action, float] = {}
    timeline: Timeline = [[] for _ in orders]
    while any(len(spans) < len(actions) for spans, actions in zip(timeline, orders, strict=True)):
        progressed = False
        for spans, actions in zip(timeline, orders, strict=True):
            while len(spans) < len(actions):
                action = actions[len(spans)]
                needs = _needs(action, last, done)
                if any(need not in done for need in needs):
                    break
                start = max([spans[-1].end if spans else 0.0, *(done[need] for need in needs)])
                done[action] = start + COSTS[action.kind]
                spans.append(Span(action, start, done[action]))
                progressed = True
        assert progressed, "the schedule deadlocks"
    return timeline


def _needs(action: Action, last: int, done: dict[Action, float]) -> list[Action]:
    """Return the actions whose results an action needs."""
    stage, number = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, number)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, number)]
    if stage == last:
        return [Action("F", stage, number)]
    later = Action("B", stage + 1, number)
    if later not in done:  # a split backward: only the gradient of the inputs is needed
        later = Action("I", stage + 1, number)
    return [Action("F", stage, number), later]


def bubble(timeline: Timeline) -> float:
    """Return the fraction of time in which ranks are idle, until the end of the last action."""
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return 1 - busy / (length(timeline) * len(timeline))


def length(timeline: Timeline) -> float:
    """Return the time from 0 to the end of the last action."""
    return max(span.end for spans in timeline for span in spans)


def bubble_formula(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> float | None:
    """Return the bubble by the formulas of the module docstring, or None if none applies."""
    idle, busy = ranks - 1, stages_per_rank * microbatches
    applies = {"interleaved": microbatches % ranks == 0, "zero-bubble": microbatches % ranks == 0}
    applies["zbv"] = microbatches >= 2 * ranks - 1
    if not applies.get(name, True):
        return None
    return idle / ((3 if name in ("zero-bubble", "zbv") else 1) * busy + idle)


def draw(timeline: Timeline, unit: float = 1.0, width: int = 80) -> list[str]:
    """Return the timeline as text, with one line for each rank.

    The label of an action is, for example, F3 for the forward of microbatch 3. If ranks have
    several stages, the label begins with the stage: 5F3. A timeline wider than `width` continues
    below. `unit` is the time that is drawn with the width of one label.
    """
    several_stages = any(len({span.action.stage for span in spans}) > 1 for spans in timeline)

    def label(action: Action) -> str:
        return f"{action.stage if several_stages else ''}{action.kind}{action.microbatch}"

    longest = max(len(label(span.action)) for spans in timeline for span in spans)
    scale = (longest + 1) / unit  # characters per unit of time
    total = max(1, round(length(timeline) * scale))
    lines = []
    for spans in timeline:
        line = ["."] * total
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            text = label(span.action).ljust(end - start, _FILL[span.action.kind])
            line[start:end] = text[: end - start]
        lines.append("".join(line))
    band = width - len("rank 0  ")
    drawn: list[str] = []
    for start in range(0, total, band):
        drawn += [""] if start else []
        drawn += [f"rank {rank:<3}{line[start : start + band]}" for rank, line in enumerate(lines)]
    return drawn


@contextmanager
def recorded(engine: Pipeline) -> Iterator[list[Span]]:
    """Context manager: yields a list to which the engine's actions are added, in seconds.

    torch's stages have one method per kind of action. Inside the context, these methods also
    measure the time. On a GPU, each call waits for the device, so that the time includes all
    kernels.
    """
    assert engine.schedule is not None, "run a step first, because it builds the stages"
    spans: list[Span] = []
    device = engine.world.device
    kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}

    def timed(method: Callable[..., Any], kind: str, stage: int) -> Any:
        def call(number: int, *arguments: Any, **named: Any) -> Any:
            start = now(device)
            result = method(number, *arguments, **named)
            half = kind == "B" and not named.get("full_backward", True)
            action = Action("I" if half else kind, stage, number)  # type: ignore[arg-type]
            spans.append(Span(action, start, now(device)))
            return result

        return call

    try:
        for stage in engine.torch_stages:
            for name, kind in kinds.items():
                setattr(stage, name, timed(getattr(stage, name), kind, stage.stage_index))
        yield spans
    finally:
        for stage in engine.torch_stages:
            for name in kinds:
                delattr(stage, name)  # restores the methods of the class


def measure(world: World, options: ParallelOptions, microbatches: int) -> Timeline:
    """Return the timeline of the fastest of several steps, for a model with equal stages."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(*[nn.Linear(_DIM, _DIM) for _ in range(_LAYERS)])
        for _ in range(world.size * options.virtual_stages)
    ]
    inputs = torch.randn(_SAMPLES, _DIM).to(world.device)
    targets = torch.randint(_DIM, (_SAMPLES,)).to(world.device)
    engine = build_engine(
        nn.Sequential(*stages),
        world,
        parallel=replace(options, layout=f"pp{world.size}"),
        example=inputs,
        microbatches=microbatches,
        microbatch_size=_SAMPLES,
    )
    assert isinstance(engine, Pipeline)

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") / (_SAMPLES * microbatches)

    pairs = [(inputs, targets)] * microbatches
    engine.run(pairs, loss_fn)  # builds the schedule and warms up
    steps = []
    for _ in range(_STEPS):
        with recorded(engine) as spans:
            barrier()
            engine.run(pairs, loss_fn)
        steps.append(gather_timeline(spans))
    return min(steps, key=length)


def gather_timeline(spans: list[Span]) -> Timeline:
    """Return the spans of every rank, with times relative to the start of the first action.

    All ranks must be on one host, so that their clocks are the same.
    """
    rows_of_ranks = gather_json([[*astuple(span.action), span.start, span.end] for span in spans])
    first = min(start for rows in rows_of_ranks for *_, start, _ in rows)
    return [
        [Span(Action(*action), start - first, end - first) for *action, start, end in rows]
        for rows in rows_of_ranks
    ]
