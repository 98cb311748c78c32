"""Random generators in a layout: which ranks draw the same random numbers, mainly for dropout.

    data ranks (dp, shard)    different samples           different numbers
    stages (pp)               different layers            different numbers
    tp, split activations     different heads, channels   different numbers. Otherwise the masks of
                              or sequence positions       the parts would not be independent
    tp, whole activations     the same samples            the same numbers. Otherwise the ranks'
                                                          copies would no longer be equal

Every rank draws from torch's default generator, so checkpoints and recomputation need to save only
the state of this generator. `seed_training_rng` seeds the generator for the activations between the
split layers: all tp ranks get the same seed if each rank holds whole activations, and different
seeds if each rank holds a part of the sequence. In two cases, dropout needs a temporary seed, which
is derived from a number that is drawn from the generator:

    the tp ranks have the same seed, but dropout gets heads or channels, which differ between ranks
        (from a column layer to the next row layer): each tp rank uses a different temporary seed
    the tp ranks have different seeds, but dropout gets an input that was gathered, which all ranks
        hold: all tp ranks use a temporary seed that tp rank 0 draws and broadcasts
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from tutti.comm.collectives import broadcast
from tutti.models.lora_layers import is_adapted
from tutti.parallel.layout import AXES
from tutti.parallel.mesh import Mesh
from tutti.parallel.sharding_rules import Role

_Context = Callable[[], AbstractContextManager[None]]


def rng_axes(splits_sequence: bool) -> tuple[str, ...]:
    """Return the axes along which ranks draw different numbers. With sequence splits also tp."""
    return tuple(axis for axis in AXES if axis != "tp" or splits_sequence)


def seed_training_rng(
    seed: int, mesh: Mesh, *, splits_sequence: bool = False, step: int = 0
) -> None:
    """Seed torch's generators for training in this layout, starting with step `step`."""
    coordinates = [mesh.rank(axis) for axis in rng_axes(splits_sequence)]
    torch.manual_seed(mixed_seed("noise", seed, step, *coordinates))


def set_up_dropout(
    model: nn.Module, mesh: Mesh, rules: Mapping[str, Role], *, splits_sequence: bool
) -> None:
    """Change dropout in layers that tp splits, in place, to draw the numbers described above.

    A model without dropout is not changed, because hooks cost time and break the compiler's graph.
    """
    if not has_dropout(model):
        return
    device = mesh.world.device
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    same_numbers: _Context = nullcontext  # tp ranks already have the same seed
    if splits_sequence:
        same_numbers = partial(_seed_of_first_rank, generator, mesh)
    for dropout in model.modules():
        if isinstance(dropout, _DropoutNd):
            dropout.forward = partial(_local_dropout, dropout, dropout.forward, same_numbers)
    if splits_sequence:
        return
    rank_seed = RankSeed(generator, mesh.rank("tp"))
    for name, layer in model.named_modules():
        role = rules.get(name)
        if role == "column":
            layer.register_forward_hook(rank_seed.begin)
        elif role == "row" and is_adapted(layer):
            # The dropout of this LoRA adapter gets only this rank's channels, so this rank's seed
            # is used until the adapter has run.
            layer.register_forward_hook(
                lambda module, inputs, output: rank_seed.end(module, inputs)
            )
        elif role == "row":
            layer.register_forward_pre_hook(rank_seed.end)
        if role is not None and role != "row" and is_adapted(layer):
            # The dropout of this adapter gets whole activations, so all tp ranks must draw the same
            # numbers. But another column layer may already have set this rank's seed.
            for dropout in layer.modules():
                if isinstance(dropout, _DropoutNd):
                    dropout.forward = partial(_with_context, rank_seed.shared, dropout.forward)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module has a dropout probability above 0."""
    return next(dropout_probabilities(model), None) is not None


def dropout_probabilities(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, attribute) of every dropout probability above 0.

    A probability is the `p` of a Dropout layer, or a number in any attribute with "drop" in its
    name, because attention modules often store the probability as a number.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name or (name == "p" and isinstance(module, _DropoutNd)):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and 0 < value <= 1:
                    yield module, name


class RankSeed:
    """Gives each tp rank its own seed between a column layer and the next row layer."""

    def __init__(self, generator: torch.Generator, tp_rank: int) -> None:
        self._generator = generator
        self._tp_rank = tp_rank
        self._rank_seed: int | None = None
        self._state = generator.get_state()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook of column layers. Only the first column layer changes the seed."""
        if not module.training or self._is_active():
            return
        number = _draw()  # the same on all tp ranks
        self._state = self._generator.get_state()
        self._rank_seed = mixed_seed("tp", number, self._tp_rank)
        self._generator.manual_seed(self._rank_seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, module: nn.Module, inputs: Any) -> None:
        """Forward pre-hook of the row layer."""
        if self._is_active():
            self._generator.set_state(self._state)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager: all tp ranks draw the same numbers, even between `begin` and `end`."""
        if not self._is_active():
            yield
            return
        own_state = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = self._generator.get_state()
            self._generator.set_state(own_state)

    def _is_active(self) -> bool:
        """Return whether the generator has the seed of this rank.

        The seed is compared, because a flag set by `begin` could be wrong: a recomputation may stop
        between the column layer and the row layer, and then it restores the generator.
        """
        return self._generator.initial_seed() == self._rank_seed


@contextmanager
def _seed_of_first_rank(generator: torch.Generator, mesh: Mesh) -> Iterator[None]:
    """Context manager: all tp ranks draw the same numbers."""
    seed = torch.tensor([_draw()], device=mesh.world.device)
    broadcast(seed, 0, group=mesh.group("tp"))
    state = generator.get_state()
    generator.manual_seed(int(seed))
    try:
        yield
    finally:
        generator.set_state(state)


def _local_dropout(dropout: nn.Module, forward: Any, same_numbers: _Context, input: Tensor) -> Any:
    """Run forward of a dropout layer. Its input may be a DTensor that is equal on all tp ranks.

    On the CPU, DTensor's own dropout would draw a different mask on each rank. On CUDA, it would
    set the generator of every rank to the state of rank 0.
    """
    if not (isinstance(input, DTensor) and dropout.training):
        return forward(input)
    with same_numbers():
        output = forward(input.to_local())
    return DTensor.from_local(output, input.device_mesh, input.placements, run_check=False)


def _with_context(context: _Context, forward: Any, input: Tensor) -> Any:
    with context():
        return forward(input)


def _draw() -> int:
    """Draw a number on the CPU. Reading a number from a GPU would wait for the GPU."""
    return int(torch.randint(2**62, (), device="cpu"))


def mixed_seed(*parts: object) -> int:
    """Return a 63-bit seed that is derived from any values, equal on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
