"""From a plain model to an engine: what is done to the model, and in which order."""

from torch import nn

from tutti.parallel.dataparallel import DataParallel
from tutti.parallel.ddp import Ddp
from tutti.parallel.engine import Engine
from tutti.parallel.options import EngineOptions
from tutti.parallel.scratch import Scratch
from tutti.parallel.single import Single
from tutti.parallel.sync_batchnorm import convert
from tutti.world.errors import UsageError
from tutti.world.world import World


def build_engine(model: nn.Module, world: World, options: EngineOptions) -> Engine:
    """Place the model on this rank's device and put the chosen engine around it.

    Call it on every rank. Make the optimizer afterwards, from `engine.model.parameters()`.
    """
    model = place(model, world, sync_batchnorm=options.sync_batchnorm)
    if options.engine == "single":
        return Single(model, world)
    if options.engine == "dataparallel":
        return DataParallel(model, world)
    if options.engine == "scratch":
        return Scratch(model, world, options.scratch_reduce, options.find_unused)
    return Ddp(model, world, options)


def place(model: nn.Module, world: World, *, sync_batchnorm: bool) -> nn.Module:
    """The model on this rank's device, with its batch norms synchronised if asked for."""
    model = model.to(world.device)
    if world.size == 1:
        return model  # a plain batch norm sees the whole batch
    if sync_batchnorm:
        return convert(model, world)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise UsageError(
                f"layer {name} is torch's SyncBatchNorm, which a rank without samples cannot "
                "join: use --sync-batchnorm, which replaces it"
            )
    return model
