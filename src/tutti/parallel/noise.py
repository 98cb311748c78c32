"""Random numbers in a layout, for dropout above all: which ranks draw the same, and which do not.

    data ranks (dp, shard)   other samples               other numbers
    stages (pp)              other layers                other numbers
    tp: parts of a tensor    other heads, channels, or   other numbers: one mask on every part
                             a part of the sequence      would be less noise than was asked for
    tp: the same tensor      the same samples            the same numbers, or it would no longer be
                                                         the same

Every rank draws from torch's own generator, whose state is all that checkpoints and recomputation
need to keep. `seed_noise` starts it as the stream between the split layers needs it: alike on tp
ranks if each has the whole stream, of their own if each has a part of the sequence. Where a layer
needs the other kind, the generator is lent another seed for a while, which is made of numbers that
it drew itself: so the same state always leads to the same masks.

    whole stream             column ─ a seed of this tp rank's own, from one that all drew ─ row
    part of the sequence     dropout of a gathered input: a seed that tp rank 0 drew and sent
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from tutti.parallel.grid import Grid
from tutti.parallel.layout import AXES
from tutti.parallel.plans import Role


def noise_axes(split_stream: bool) -> tuple[str, ...]:
    """The axes on which ranks draw different numbers; `split_stream`: tp splits the sequence."""
    return tuple(axis for axis in AXES if axis != "tp" or split_stream)


def seed_noise(seed: int, grid: Grid, *, split_stream: bool = False, step: int = 0) -> None:
    """Seed torch's generators for training in this layout, from this step on."""
    place = [grid.rank(axis) for axis in noise_axes(split_stream)]
    torch.manual_seed(_mixed("noise", seed, step, *place))


def place_noise(
    model: nn.Module, grid: Grid, plan: Mapping[str, Role], *, split_stream: bool
) -> None:
    """Let the layers that the plan splits over tp draw what they must, in place.

    A model without dropout is left alone: hooks cost time, and break a compiler's graph.
    """
    if not draws(model):
        return
    generator = _generator(grid.world.device)
    shared: Any = partial(_sent_by_the_first, generator, grid) if split_stream else nullcontext
    for dropout in model.modules():
        if isinstance(dropout, _DropoutNd):
            dropout.forward = partial(_of_local, dropout, dropout.forward, shared)
    if split_stream:
        return
    own = OwnNoise(generator, grid.rank("tp"))
    layers = dict(model.named_modules())
    for name, role in plan.items():
        if name in layers and role == "column":
            layers[name].register_forward_hook(own.begin)
        elif name in layers and role == "row":
            layers[name].register_forward_pre_hook(own.end)


def draws(model: nn.Module) -> bool:
    """Whether it has dropout: a layer, or a number by that name, for attention takes a number."""
    return any(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
    )


class OwnNoise:
    """From a column to its row, this tp rank draws from a seed of its own."""

    def __init__(self, generator: torch.Generator, tp_rank: int) -> None:
        self._generator = generator
        self._tp_rank = tp_rank
        self._lent: int | None = None
        self._kept = generator.get_state()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """After a column; those after the first change nothing."""
        if not module.training or self._lasts():
            return
        drawn = _draw()  # the same on all tp ranks
        self._kept = self._generator.get_state()
        self._lent = _mixed("tp", drawn, self._tp_rank)
        self._generator.manual_seed(self._lent)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, module: nn.Module, inputs: Any) -> None:
        """Before the row."""
        if self._lasts():
            self._generator.set_state(self._kept)

    def _lasts(self) -> bool:
        """The generator itself says: recomputation stops in the midst of layers, and resets it."""
        return self._generator.initial_seed() == self._lent


@contextmanager
def _sent_by_the_first(generator: torch.Generator, grid: Grid) -> Iterator[None]:
    """Inside, all tp ranks draw the same."""
    drawn = torch.tensor([_draw()], device=grid.world.device)
    dist.broadcast(drawn, group=grid.group("tp"), group_src=0)
    kept = generator.get_state()
    generator.manual_seed(int(drawn))
    try:
        yield
    finally:
        generator.set_state(kept)


def _of_local(dropout: nn.Module, forward: Any, shared: Any, input: torch.Tensor) -> torch.Tensor:
    """A dropout's forward, where all tp ranks may hold the same input.

    Left to DTensor, the mask would be this rank's own on the CPU, and on CUDA every rank of the
    world would be given the generator of rank 0.
    """
    if not (isinstance(input, DTensor) and dropout.training):
        return forward(input)  # type: ignore[no-any-return]
    alike: AbstractContextManager[None] = shared()
    with alike:
        output = forward(input.to_local())
    return DTensor.from_local(output, input.device_mesh, input.placements, run_check=False)


def _draw() -> int:
    """From the CPU's generator also where a GPU computes, which would have to be waited for."""
    return int(torch.randint(2**62, (), device="cpu"))


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


def _mixed(*parts: object) -> int:
    """A seed that depends on all of them, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
