"""Tied parameters: parameters that several stages use, such as an embedding that is also the head.

        stage 0   embed.weight ──┐
                                 ├──  equal values; each copy has the gradient of its own stage
        stage 3   head.weight  ──┘

Each stage has its own copy, because FSDP shards each stage separately. Both stages have a copy even
if one rank holds both, as in a V-schedule. After backward, the gradients of all copies are summed,
so that the optimizer makes the same update to every copy. Checkpoints and the global gradient norm
include only the first copy. The other copies are called aliases.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from tutti.comm.collectives import recv, send
from tutti.comm.grouping import group as collective_group
from tutti.parallel.mesh import Mesh, local_shard

Tie = dict[int, list[str]]
"""{stage: names of one tied parameter in this stage}, in ascending order of stages."""


def find_ties(model: nn.Module, stages: list[list[str]]) -> list[Tie]:
    """Return the parameters that several stages use. `stages` has each stage's layer names."""
    users: dict[int, Tie] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for stage, layers in enumerate(stages):
        prefixes = tuple(f"{layer}." for layer in layers)
        for name, parameter in parameters:
            if name.startswith(prefixes) or name in layers:
                users.setdefault(id(parameter), {}).setdefault(stage, []).append(name)
    return [tie for tie in users.values() if len(tie) > 1]


def untie(model: nn.Module, ties: list[Tie], held: Collection[int]) -> None:
    """If several stages of a tie are on this rank, give each of them its own parameter."""
    for tie in ties:
        local = [names for stage, names in tie.items() if stage in held]
        for names in local[1:]:
            original = model.get_parameter(names[0])
            copy = nn.Parameter(original.detach().clone(), original.requires_grad)
            for name in names:
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, copy)


class TiedWeights:
    """Keeps the copies of tied parameters equal."""

    def __init__(
        self, ties: Sequence[Tie], rank_of_stage: list[int], held: Collection[int], mesh: Mesh
    ) -> None:
        """`held` contains this rank's stages."""
        self.aliases: dict[str, str] = {}
        """Maps the name of each alias on this rank to the name of the first copy."""
        self._copies: list[tuple[list[str], list[int]]] = []
        self._mesh = mesh
        for tie in ties:
            first = next(iter(tie.values()))[0]
            local = [names for stage, names in tie.items() if stage in held]
            self.aliases |= {name: first for names in local for name in names if name != first}
            ranks = list(dict.fromkeys(rank_of_stage[stage] for stage in tie))
            if local:
                self._copies.append(([names[0] for names in local], ranks))

    @torch.no_grad()
    def share_values(self, model: nn.Module) -> None:
        """Give every copy the values of the first copy."""
        for names, ranks in self._copies:
            copies = [local_shard(model.get_parameter(name)) for name in names]
            first = self._exchange(copies[0], ranks)[0]
            for copy in copies:
                copy.copy_(first)

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """Give every copy the sum of the gradients of all copies."""
        for names, ranks in self._copies:
            copies = [model.get_parameter(name) for name in names]
            if not copies[0].requires_grad:
                continue  # the parameter is frozen on all ranks
            for copy in copies:
                if copy.grad is None:  # not used in this step, but other ranks expect a gradient
                    copy.grad = torch.zeros_like(copy)
            parts = [local_shard(copy.grad) for copy in copies if copy.grad is not None]
            # Every rank adds in the same order, so that all copies stay equal bit for bit.
            total = torch.stack(self._exchange(torch.stack(parts).sum(0), ranks)).sum(0)
            for part in parts:
                part.copy_(total)

    def _exchange(self, local: Tensor, ranks: list[int]) -> list[Tensor]:
        """Exchange tensors between pipeline ranks. Return the tensors in the order of `ranks`."""
        group, own_rank = self._mesh.group("pp"), self._mesh.rank("pp")
        local = local.contiguous()
        tensors = [local if rank == own_rank else torch.empty_like(local) for rank in ranks]
        with collective_group():
            for rank, tensor in zip(ranks, tensors, strict=True):
                if rank != own_rank:
                    send(local, rank, group=group)
                    recv(tensor, rank, group=group)
        return tensors
