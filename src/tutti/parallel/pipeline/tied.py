"""One parameter that two stages use, such as an embedding that is also the head.

    stage 0   embed.weight ──┐
                             ├──  the same values, each with its stage's part of the gradient
    stage 3   head.weight  ──┘

Each stage has a copy of its own. After backward the parts of the gradient are added up, so that
every copy has the whole of it and the optimizer makes the same update to all. Also where both
stages are on one rank (a V) there are copies: each stage may be sharded by itself.

The first name is the parameter's, the others are aliases: a checkpoint holds the first only, and a
norm over all gradients counts it once.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tutti.parallel.grid import Grid
from tutti.parallel.pieces import local


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages use."""

    names: dict[int, list[str]]
    """What each of them calls it, in the order of the stages."""

    @property
    def name(self) -> str:
        """The name that counts, the first stage's."""
        return next(iter(self.names.values()))[0]


def find_ties(model: nn.Module, stages: list[list[str]]) -> list[Tie]:
    """The parameters that stages share; sharing within a stage needs no help."""
    found: dict[int, dict[int, list[str]]] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for stage, layers in enumerate(stages):
        for name, parameter in parameters:
            if any(name.startswith(f"{layer}.") for layer in layers):
                found.setdefault(id(parameter), {}).setdefault(stage, []).append(name)
    return [Tie(names) for names in found.values() if len(names) > 1]


def untie(model: nn.Module, ties: list[Tie], held: Collection[int]) -> None:
    """Where this rank holds several stages of a tie, give each a parameter of its own."""
    for tie in ties:
        mine = [names for stage, names in tie.names.items() if stage in held]
        for names in mine[1:]:
            original = model.get_parameter(names[0])
            twin = nn.Parameter(original.detach().clone(), original.requires_grad)
            for name in names:
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, twin)


class Ties:
    """The ties of a pipeline: which copies this rank has, and which ranks have the others."""

    def __init__(
        self, ties: list[Tie], holders: list[int], held: Collection[int], grid: Grid
    ) -> None:
        self.aliases: dict[str, str] = {}
        """This rank's copies: a parameter's name here → the name of the one that counts."""
        self._copies: list[tuple[list[str], list[int]]] = []
        self._grid = grid
        for tie in ties:
            mine = [names for stage, names in tie.names.items() if stage in held]
            self.aliases |= {name: tie.name for names in mine for name in names if name != tie.name}
            ranks = list(dict.fromkeys(holders[stage] for stage in tie.names))
            if mine:
                self._copies.append(([names[0] for names in mine], ranks))

    @torch.no_grad()
    def share_values(self, model: nn.Module) -> None:
        """Make all copies equal to the first stage's."""
        for names, ranks in self._copies:
            copies = [local(model.get_parameter(name)) for name in names]
            first = self._exchange(copies[0], ranks)[0]
            for each in copies:
                each.copy_(first)

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """Give every copy the sum of all copies' gradients."""
        for names, ranks in self._copies:
            copies = [model.get_parameter(name) for name in names]
            if not copies[0].requires_grad:
                continue  # frozen, on all ranks
            for copy in copies:
                if copy.grad is None:  # unused here, but others wait
                    copy.grad = torch.zeros_like(copy)
            parts = [local(copy.grad) for copy in copies if copy.grad is not None]
            # In the order of the stages on all ranks: the copies must not drift apart by a bit.
            total = torch.stack(self._exchange(torch.stack(parts).sum(0), ranks)).sum(0)
            for part in parts:
                part.copy_(total)

    def _exchange(self, mine: torch.Tensor, ranks: list[int]) -> list[torch.Tensor]:
        """What each of these ranks of the pipeline has, in their order."""
        group, here = self._grid.group("pp"), self._grid.rank("pp")
        mine = mine.contiguous()
        all_of_them = [mine if rank == here else torch.empty_like(mine) for rank in ranks]
        messages = []
        for rank, tensor in zip(ranks, all_of_them, strict=True):
            if rank != here:
                messages.append(dist.P2POp(dist.isend, mine, group=group, group_peer=rank))
                messages.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return all_of_them
