"""Sharded and tensor-parallel models in an ordinary loop: FSDP2 and DTensor under our contract."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tutti.parallel.engine import Engine
from tutti.parallel.gradients import check_all_used, trained_parameters
from tutti.parallel.grid import Grid
from tutti.parallel.pieces import whole
from tutti.parallel.tensor import place_gradients


class Hybrid(Engine):
    """A model to which `Techniques` were applied, without a pipeline."""

    def __init__(self, model: nn.Module, grid: Grid) -> None:
        super().__init__(model, grid.world, grid)
        self.trained = trained_parameters(model)

    @property
    def description(self) -> str:
        return f"{self.grid.layout}: {describe(self.grid)}"

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):
            # Until the last one, gradients are added up where they are, whole.
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
        yield

    def reduce(self) -> None:
        place_gradients(self.model)
        replicas = f"use --layout dp{self.world.size} with --find-unused"
        check_all_used(self.trained, cure=replicas)

    @torch.no_grad()
    def infer(self, inputs: torch.Tensor, example: torch.Tensor | None = None) -> Any:
        if len(inputs) == 0:  # others gather their parameters with this rank's help
            assert example is not None
            self.model(example)
            return None
        return whole(self.model(inputs))


def describe(grid: Grid) -> str:
    """What a layout does here, in words."""
    layout = grid.layout
    words = []
    if layout.dp > 1:
        words.append(f"{layout.dp} replicas")
    if layout.shard > 1:
        words.append(f"parameters in {layout.shard} shards (FSDP2)")
    if layout.tp > 1:
        where = " across nodes, over their network" if grid.tp_crosses_nodes else ""
        words.append(f"layers split over {layout.tp} ranks{where}")
    if layout.pp > 1:
        words.append(f"a pipeline of {layout.pp} ranks")
    return ", ".join(words)
