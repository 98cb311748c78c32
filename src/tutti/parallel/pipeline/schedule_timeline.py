"""Timelines of pipeline schedules: which rank computes what and when, simulated and measured.

Simulated: every rank runs its actions in order, each as soon as its inputs have been computed. A
forward costs 1, a backward 2, its halves 1 each; communication costs nothing. The bubble is the
share of ranks × time in which nothing is computed. For gpipe and 1f1b with p ranks and m
microbatches

    bubble = (p - 1) / (m + p - 1)

since a rank waits for p - 1 forwards and as many backwards, and works on m of each. With v stages
per rank, a rank waits for stages of 1/v the length: (p - 1) / (v m + p - 1). With weight gradients
in the bubbles, only the first forward is waited for: (p - 1) / (3 v m + p - 1).

For schedules with several stages per rank the order of actions is torch's own list, which torch
runs. For gpipe and 1f1b torch runs a loop; the order of the loop is written down here (in 2.13 the
list that torch keeps beside it lacks microbatch 0 of 1f1b's last stage). A test compares all orders
with recorded ones.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from tutti.comm.collectives import barrier
from tutti.parallel.layout import ParallelOptions, ScheduleName
from tutti.parallel.pipeline.executor import Pipeline
from tutti.parallel.pipeline.schedules import MULTI, check_microbatches, stages_of
from tutti.parallel.pipeline.stages import now
from tutti.world.exchange import gather_json
from tutti.world.world import World

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}
_WIDTH = 80
_LABEL = len("rank 0  ")
# Wide enough that a stage takes milliseconds, so that communication is small against it.
_DIM, _LAYERS, _SAMPLES = 384, 4, 256
_STEPS = 5


@dataclass(frozen=True)
class Action:
    """The work of a rank for one microbatch on one stage.

    F is forward, B backward; I and W are its halves, gradients of the inputs and of the weights.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


def action_orders(
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
    ahead = min(microbatches, stages - stage)  # forwards before the first backward
    actions = [Action("F", stage, number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(Action("B", stage, number))
        if number + ahead < microbatches:
            actions.append(Action("F", stage, number + ahead))
    return actions


def _from_torch(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    # The schedule's constructor makes the list from a few numbers of its stages, without ranks.
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
        [_parse(str(action)) for action in listed[rank] if action is not None]
        for rank in range(ranks)
    ]


def _parse(text: str) -> Action:
    """torch writes the forward of microbatch 3 on stage 2 as 2F3."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    assert match is not None, f"torch's schedule has an unknown action {text!r}"
    return Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


Timeline = list[list[Span]]
"""The spans of every rank, in order; time starts at 0."""


def simulate(orders: Sequence[Sequence[Action]]) -> Timeline:
    """The timeline of actions with the costs of `COSTS`."""
    last = max(action.stage for actions in orders for action in actions)
    done: dict[Action, float] = {}
    timeline: Timeline = [[] for _ in orders]
    while any(len(spans) < len(actions) for spans, actions in zip(timeline, orders, strict=True)):
        progressed = False
        for spans, actions in zip(timeline, orders, strict=True):
            while len(spans) < len(actions):
                action = actions[len(spans)]
                needs = [_when(done, need) for need in _needs(action, last)]
                if None in needs:
                    break
                free = spans[-1].end if spans else 0.0
                start = max([free, *(need for need in needs if need is not None)])
                done[action] = start + COSTS[action.kind]
                spans.append(Span(action, start, done[action]))
                progressed = True
        assert progressed, "the schedule deadlocks"
    return timeline


def bubble(timeline: Timeline) -> float:
    """The share of all ranks' time in which they are idle, from the first action to the last."""
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return 1 - busy / (length(timeline) * len(timeline))


def length(timeline: Timeline) -> float:
    """The time from 0 to the end of the last action."""
    return max(span.end for spans in timeline for span in spans)


def bubble_formula(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> float | None:
    """The bubble in closed form, if there is one."""
    waits, works = ranks - 1, stages_per_rank * microbatches
    if name in ("gpipe", "1f1b") or (name == "interleaved" and microbatches % ranks == 0):
        return waits / (works + waits)
    # A rank waits for the first forward only; F, I and W cost 1 each.
    if name == "zero-bubble" and microbatches % ranks == 0:
        return waits / (3 * works + waits)
    if name == "zbv" and microbatches >= 2 * ranks - 1:
        return waits / (3 * works + waits)
    return None


def draw(timeline: Timeline, unit: float = 1.0, width: int = _WIDTH) -> list[str]:
    """A line of text for each rank; a timeline that is too wide continues in further bands.

    `unit` is the time that is drawn as wide as one label.
    """
    labels = [label(span.action, timeline) for spans in timeline for span in spans]
    scale = (max(map(len, labels)) + 1) / unit  # characters per unit of time
    total = max(1, round(length(timeline) * scale))
    lines = []
    for spans in timeline:
        line = ["."] * total
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            text = label(span.action, timeline).ljust(end - start, _FILL[span.action.kind])
            line[start:end] = text[: end - start]
        lines.append("".join(line))
    band = width - _LABEL
    drawn: list[str] = []
    for start in range(0, total, band):
        drawn += [""] if start else []
        drawn += [f"rank {rank:<3}{line[start : start + band]}" for rank, line in enumerate(lines)]
    return drawn


def label(action: Action, timeline: Timeline) -> str:
    """F3; or 5F3, the forward of microbatch 3 on stage 5, where a rank has several stages."""
    several = any(len({span.action.stage for span in spans}) > 1 for spans in timeline)
    return f"{action.stage if several else ''}{action.kind}{action.microbatch}"


def _needs(action: Action, last: int) -> list[Action]:
    """The actions whose results this one needs."""
    stage, number = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, number)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, number)]
    return [Action("F", stage, number)] + ([Action("B", stage + 1, number)] if stage < last else [])


def _when(done: dict[Action, float], need: Action) -> float | None:
    if need.kind == "B" and need not in done:  # the gradient of the inputs is enough
        need = Action("I", need.stage, need.microbatch)
    return done.get(need)


@contextmanager
def recorded(engine: Pipeline) -> Iterator[list[Span]]:
    """Record the engine's actions in the list, in seconds, until the context ends.

    torch's stages have a method for each kind of action; the calls are timed from outside. On a GPU
    each call waits for the device, so that it takes as long as its kernels.
    """
    assert engine.schedule is not None, "run a step first: it builds the stages"
    spans: list[Span] = []
    device = engine.world.device

    def timed(method: Callable[..., Any], kind: Callable[[dict[str, Any]], str], stage: int) -> Any:
        def call(number: int, *arguments: Any, **named: Any) -> Any:
            start = now(device)
            result = method(number, *arguments, **named)
            spans.append(Span(Action(kind(named), stage, number), start, now(device)))  # type: ignore[arg-type]
            return result

        return call

    def half(named: dict[str, Any]) -> str:
        return "B" if named.get("full_backward", True) else "I"

    kinds = {
        "forward_one_chunk": lambda named: "F",
        "backward_one_chunk": half,
        "backward_weight_one_chunk": lambda named: "W",
    }
    try:
        for stage in engine.torch_stages:
            for name, kind in kinds.items():
                setattr(stage, name, timed(getattr(stage, name), kind, stage.stage_index))
        yield spans
    finally:
        for stage in engine.torch_stages:
            for name in kinds:
                delattr(stage, name)  # the methods of the class remain


def measure(world: World, options: ParallelOptions, microbatches: int) -> Timeline:
    """Run the schedule on a small model of equal stages; the fastest of a few steps, in seconds."""
    from tutti.parallel.apply import build_engine

    torch.manual_seed(0)
    model = nn.Sequential(*[_Stage() for _ in range(world.size * options.virtual_stages)])
    inputs = torch.randn(_SAMPLES, _DIM).to(world.device)
    targets = torch.randint(_DIM, (_SAMPLES,)).to(world.device)
    engine = build_engine(
        model,
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
    """The spans of every rank, relative to the first start. All ranks must share a host clock."""
    own = [[s.action.kind, s.action.stage, s.action.microbatch, s.start, s.end] for s in spans]
    ranks = gather_json(own)
    began = min(row[3] for rows in ranks for row in rows)
    return [
        [Span(Action(*row[:3]), row[3] - began, row[4] - began) for row in rows] for rows in ranks
    ]


class _Stage(nn.Module):
    """Several layers that form one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(_DIM, _DIM) for _ in range(_LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output
