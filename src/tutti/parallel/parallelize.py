"""tutti.parallelize(): a parallel model for one's own training loop."""

from torch import nn

from tutti.parallel.build import place
from tutti.parallel.ddp import wrap_in_ddp
from tutti.parallel.layout import Layout
from tutti.world.world import World


def parallelize(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    world: World,
    sync_batchnorm: bool = False,
    bucket_mb: float = 25.0,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    find_unused: bool = False,
) -> nn.Module:
    """The model on this rank's device, as a replica among those of all ranks.

    layout: such as "dp4"; one replica per rank unless given. The result is called like the model;
    in backward it averages gradients over the ranks, as torch DDP does (it is one), so give every
    rank the same number of samples and take the mean loss of this rank's. In a world of one it is
    the model itself. Call it on every rank; parameters and buffers become those of rank 0.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    (layout or Layout(dp=world.size)).check(world.size)
    model = place(model, world, sync_batchnorm=sync_batchnorm)
    if world.size == 1:
        return model
    return wrap_in_ddp(
        model,
        bucket_mb=bucket_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused=find_unused,
    )
