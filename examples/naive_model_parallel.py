"""A model split over ranks in two naive ways: tutti run -n 2 examples/naive_model_parallel.py

First by layers: one rank computes while the others wait. Then by the channels of each layer. Both
ways give the same gradients as one device, and each rank holds only a part of the parameters.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

import tutti
from tutti.parallel.teaching import ColumnLinear, LayersOnRanks, RowLinear, own_slice


def main() -> None:
    with tutti.init() as world:
        torch.manual_seed(0)  # the same model and batch on every rank
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
        whole = nn.Sequential(*layers).double().to(world.device)
        x = torch.randn(16, 64, dtype=torch.float64, device=world.device)
        whole(x).square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
        total = sum(parameter.numel() for parameter in whole.parameters())

        placed = LayersOnRanks(copy.deepcopy(whole))
        placed.model.zero_grad()
        outputs = placed.forward(x, shape=(16, 64))
        placed.backward(outputs.square().sum() if placed.is_last else None)
        parameters = placed.model.named_parameters()
        pairs = [(parameter.grad, gradients[name]) for name, parameter in parameters]
        report(world, "layers on ranks", placed.model, pairs, total)

        # Split the layers by columns and by rows alternately.
        split = copy.deepcopy(whole)
        kinds = {"0": ColumnLinear, "2": RowLinear, "4": ColumnLinear, "6": RowLinear}
        for name, kind in kinds.items():
            split.set_submodule(name, kind(whole.get_submodule(name)))
        split(x).square().sum().backward()
        pairs = [
            (split.get_submodule(name).weight.grad, own_slice(gradients[f"{name}.weight"], dim))
            for name, dim in {"0": 0, "2": 1, "4": 0, "6": 1}.items()
        ]
        report(world, "channels split", split, pairs, total)


def report(world: tutti.World, how: str, model: nn.Module, pairs: list, total: int) -> None:
    """Print how many parameters rank 0 holds, and the largest gradient error over all ranks.

    `pairs` has the gradients of this rank, each with the gradient of one device.
    """
    worst = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if world.is_first:
        held = sum(parameter.numel() for parameter in model.parameters())
        print(f"{how}: rank 0 holds {held} of {total} parameters, largest error {worst:.1e}")


if __name__ == "__main__":
    main()
