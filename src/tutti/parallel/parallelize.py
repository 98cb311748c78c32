"""tutti.parallelize(): a parallel model for one's own training loop."""

from dataclasses import replace

from torch import nn

from tutti.parallel.build import place, prepare
from tutti.parallel.ddp import wrap_in_ddp
from tutti.parallel.layout import Layout
from tutti.parallel.options import ParallelOptions, Recompute
from tutti.parallel.plans import Plan
from tutti.world.errors import UsageError
from tutti.world.world import World


def parallelize(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    world: World,
    plan: Plan | None = None,
    options: ParallelOptions | None = None,
    checkpoint_activations: Recompute = "none",
    compile: bool = False,
    sync_batchnorm: bool = False,
    bucket_mb: float = 25.0,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    find_unused: bool = False,
) -> nn.Module:
    """The model on this rank's device, spread over all ranks as the layout says.

    layout: such as "dp2.tp2"; one replica per rank unless given. plan: how tp splits layers, a dict
    from names of modules to roles, `*` for one part of a name: {"layers.*.up": "column",
    "layers.*.down": "row"}; unset, the usual names of transformer layers decide. options: more
    about shard and tp.

    The result is called like the model; in backward it averages gradients over the ranks that have
    different samples (`layout.grid(world).data_rank` of `layout.data_ranks`), as torch does, so
    give each the same number of samples and take the mean loss of this rank's. Ranks that differ
    only in tp must get the same samples. In a world of one it is the model itself. Call it on
    every rank, with the same weights. Outputs that tp left split by words are put together,
    unless options say loss_parallel. Dropout under tp: noise.py has a function that seeds it. A
    pipeline cannot be called like a model: see build_engine.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    layout = layout or Layout(dp=world.size)
    if layout.pp > 1:
        raise UsageError(
            f"layout {layout}: a pipeline runs whole steps, not a forward: use "
            "tutti.parallel.build_engine and engine.run, or a layout without pp"
        )
    options = options or ParallelOptions(loss_parallel=False)
    grid = layout.grid(world)
    model = place(model, grid, sync_batchnorm=sync_batchnorm)
    techniques = prepare(model, grid, options, plan, None, checkpoint_activations, compile)
    replace(techniques, mean=True).apply(model)
    if world.size == 1 or not layout.only_replicas:
        return model
    return wrap_in_ddp(
        model,
        bucket_mb=bucket_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused=find_unused,
    )
