"""What is done to a model, and in which order."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tutti.parallel.blocks import compile_blocks
from tutti.parallel.grid import Grid
from tutti.parallel.options import ParallelOptions, Recompute
from tutti.parallel.plans import Role
from tutti.parallel.recompute import recompute_activations
from tutti.parallel.shard import shard
from tutti.parallel.tensor import overlap_matrix_products, tensor_parallel


@dataclass(frozen=True)
class Techniques:
    """All that turns the layers of a rank into parallel ones; each only where it is asked for."""

    grid: Grid
    options: ParallelOptions
    plan: Mapping[str, Role]
    """Resolved: names of modules of the whole model. Only tp reads it."""
    recompute: Recompute = "none"
    compile: bool = False
    split_sequence: bool = False
    """tp: between the split layers, each rank holds a part of the sequence."""
    mean: bool = False
    """Average gradients over the data ranks, as torch does, instead of summing them."""

    def apply(self, model: nn.Module, stages: Mapping[int, nn.Module] | None = None) -> None:
        """Change the model in place; `stages` are parts of it that run on their own, by index.

        The order matters. Matrices are split first, so that everything after sees a rank's own
        layers. Recomputing wraps what the layers do; the compiler sees what is to be kept. Sharding
        comes last: its hooks must gather a block's parameters before any of it runs, also when it
        runs a second time for backward.
        """
        layout = self.grid.layout
        if layout.tp > 1:
            tensor_parallel(
                model,
                self.grid,
                self.plan,
                sequence_parallel=self.split_sequence,
                loss_parallel=self.options.loss_parallel,
            )
            if self.options.async_tp:
                overlap_matrix_products(self.grid, self.options, self.compile)
        if self.compile and self.recompute == "full":
            # A compiled graph that runs twice: with split matrices torch 2.13 cannot keep the
            # inputs of a graph that has both runs in it.
            compile_blocks(model, forward_only=True)
            recompute_activations(model, self.recompute)
        else:
            recompute_activations(model, self.recompute)
            if self.compile:
                compile_blocks(model)
        if layout.data_ranks > 1 and not layout.only_replicas:
            for stage in stages.values() if stages else [model]:
                shard(stage, self.grid, self.options, mean=self.mean)
        # With replicas only, DDP comes around the whole of it: see ddp.py.
