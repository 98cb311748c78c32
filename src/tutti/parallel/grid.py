"""Grid: the ranks of a world as a layout arranges them, and the groups along its axes.

The ranks, those of a node side by side, fill a block of pp × dp × shard × tp in this order. Ranks
that differ in one coordinate only are a group: `dp2.tp2` in a world of 4

               tp 0   tp 1
        dp 0     0      1          tp groups {0, 1} {2, 3}
        dp 1     2      3          dp groups {0, 2} {1, 3}
"""

from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tutti.parallel.layout import AXES, Layout
from tutti.world.exchange import gather_json
from tutti.world.world import World


class Grid:
    """Where this rank stands in a layout. The groups are made when the mesh is first asked for."""

    def __init__(self, layout: Layout, world: World) -> None:
        self.layout = layout
        self.world = world
        nodes = gather_json(world.node) if world.nodes > 1 else [0] * world.size
        # By where ranks really are: a launcher may deal them out to the nodes in turn.
        by_node = sorted(range(world.size), key=lambda rank: (nodes[rank], rank))
        shape = [getattr(layout, axis) for axis in AXES]
        self.ranks = torch.tensor(by_node, device="cpu").view(shape)
        place = (self.ranks == world.rank).nonzero()[0].tolist()
        self._place: dict[str, int] = dict(zip(AXES, place, strict=True))
        teams = self.ranks.view(-1, layout.tp).tolist()
        self.tp_crosses_nodes = any(len({nodes[rank] for rank in team}) > 1 for team in teams)

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self._place[axis]

    @property
    def data_rank(self) -> int:
        """Which part of the batch is this rank's, of `layout.data_ranks`."""
        return self.rank("dp") * self.layout.shard + self.rank("shard")

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The axes as torch's engines want them: pp, dp, shard, tp. All ranks must ask for it."""
        return DeviceMesh(self.world.device.type, self.ranks, mesh_dim_names=AXES)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on this axis only."""
        return self.mesh.get_group(axis)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters or parts of them, and other samples."""
        if self.layout.only_replicas:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self.mesh["dp", "shard"]._flatten("data").get_group()
