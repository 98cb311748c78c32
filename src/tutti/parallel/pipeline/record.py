"""What a pipeline really did: the start and end of every forward and backward, on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tutti.parallel.engine import Objective
from tutti.parallel.layout import Layout
from tutti.parallel.options import ParallelOptions
from tutti.parallel.pipeline.build import build_pipeline
from tutti.parallel.pipeline.cost import now
from tutti.parallel.pipeline.engine import Pipeline
from tutti.parallel.pipeline.order import Action
from tutti.parallel.pipeline.timeline import Span, Timeline, length
from tutti.world.exchange import gather_json
from tutti.world.world import World

# Wide enough that a stage takes milliseconds, so that messages are small against it.
_DIM, _LAYERS, _SAMPLES = 384, 4, 256
_STEPS = 5


@contextmanager
def recorded(engine: Pipeline) -> Iterator[list[Span]]:
    """Until the end, the engine's actions are added to the list, in seconds.

    torch's stages have a method for each kind of action; the calls are timed from outside. On a GPU
    each waits for the device, so that a call takes as long as its kernels.
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
        for piece in engine.pieces:
            for name, kind in kinds.items():
                setattr(piece, name, timed(getattr(piece, name), kind, piece.stage_index))
        yield spans
    finally:
        for piece in engine.pieces:
            for name in kinds:
                delattr(piece, name)  # the class has the methods themselves


def measure(world: World, options: ParallelOptions, microbatches: int) -> Timeline:
    """Run the schedule on a small model of equal stages; the fastest of a few steps, in seconds."""
    grid = Layout(pp=world.size).grid(world)
    layers = world.size * options.virtual_stages
    torch.manual_seed(0)
    model = nn.Sequential(*[_Stage() for _ in range(layers)]).to(world.device)
    inputs = torch.randn(_SAMPLES, _DIM, device=world.device)
    targets = torch.randint(_DIM, (_SAMPLES,), device=world.device)
    engine = build_pipeline(model, grid, options, inputs, microbatches, _SAMPLES)

    def of_outputs(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, wanted, reduction="sum") / (_SAMPLES * microbatches)

    objective = Objective(lambda x, y: x.sum(), of_outputs)
    pairs = [(inputs, targets)] * microbatches
    engine.run(pairs, objective)  # builds and warms up
    steps = []
    for _ in range(_STEPS):
        with recorded(engine) as spans:
            dist.barrier()
            engine.run(pairs, objective)
        steps.append(together(spans))
    return min(steps, key=length)


def together(spans: list[Span]) -> Timeline:
    """Every rank's spans, from the first one's start on. All ranks must be on one host.

    Its processes read the same clock.
    """
    mine = [[s.action.kind, s.action.stage, s.action.microbatch, s.start, s.end] for s in spans]
    ranks = gather_json(mine)
    began = min(row[3] for rows in ranks for row in rows)
    return [
        [Span(Action(*row[:3]), row[3] - began, row[4] - began) for row in rows] for rows in ranks
    ]


class _Stage(nn.Module):
    """Some layers that count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(_DIM, _DIM) for _ in range(_LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output
