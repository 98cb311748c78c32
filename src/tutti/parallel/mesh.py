"""Mesh: the ranks of a world, arranged by a layout, and the process groups along the mesh axes.

The ranks, sorted by node, are arranged in an array of shape pp × dp × shard × tp. Ranks that differ
in only one coordinate form a group. The layout `dp2.tp2` in a world of 4 ranks:

               tp 0   tp 1
        dp 0     0      1          tp groups {0, 1} {2, 3}
        dp 1     2      3          dp groups {0, 2} {1, 3}
"""

from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tutti.parallel.layout import AXES, Layout
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json
from tutti.world.world import World


class Mesh:
    """The coordinates of this rank in a layout. Process groups are created on first use."""

    def __init__(self, layout: Layout, world: World) -> None:
        layout.check(world.size)
        self.layout = layout
        self.world = world
        nodes = gather_json(world.node) if world.nodes > 1 else [0] * world.size
        # Ranks are sorted by node, because some launchers assign consecutive ranks to different
        # nodes.
        by_node = sorted(range(world.size), key=lambda rank: (nodes[rank], rank))
        shape = [getattr(layout, axis) for axis in AXES]
        self.ranks = torch.tensor(by_node, device="cpu").view(shape)
        coordinates = (self.ranks == world.rank).nonzero()[0].tolist()
        self._coordinates: dict[str, int] = dict(zip(AXES, coordinates, strict=True))
        tp_groups = self.ranks.view(-1, layout.tp).tolist()
        self.tp_crosses_nodes = any(len({nodes[rank] for rank in group}) > 1 for group in tp_groups)

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self._coordinates[axis]

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the batch. The batch has `layout.data_ranks` parts."""
        return self.rank("dp") * self.layout.shard + self.rank("shard")

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The axes pp, dp, shard, tp as torch's DeviceMesh. All ranks must read this property."""
        return DeviceMesh(self.world.device.type, self.ranks, mesh_dim_names=AXES)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this rank only on this axis."""
        return self.device_mesh.get_group(axis)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this rank only on dp and shard."""
        if self.layout.only_replicas:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self.device_mesh["dp", "shard"]._flatten("data").get_group()

    @cached_property
    def batchnorm_group(self) -> dist.ProcessGroup:
        """The process group for the collectives of batch norms, with the ranks of the data group.

        All ranks must read this property. The collectives of one group must have the same order on
        all ranks. DDP all-reduces gradients in a different order on a rank that did not use some
        parameters. So if the layout has only replicas, batch norms get their own group.
        """
        return dist.new_group() if self.layout.only_replicas else self.data_group

    def describe(self) -> str:
        """Return a description of the layout."""
        layout = self.layout
        network = " across nodes, over the network" if self.tp_crosses_nodes else ""
        texts = {
            "dp": f"{layout.dp} replicas",
            "shard": f"parameters in {layout.shard} shards (FSDP2)",
            "tp": f"layers split over {layout.tp} ranks{network}",
            "pp": f"a pipeline of {layout.pp} ranks",
        }
        return ", ".join(text for axis, text in texts.items() if layout.axes[axis] > 1)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, detached. A plain tensor is its own shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Box(NamedTuple):
    """A rectangular part of a tensor, given by its offset and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def shard_and_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """Return this rank's part of a tensor, and the box of this part in the full tensor."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "__create_chunk_list__"):  # torch's protocol for sharded tensors
        return tensor.detach(), Box((0,) * len(shape), shape)
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise UsageError(
            f"a tensor of shape {shape} has {len(chunks)} shards on one rank, but checkpoints "
            "support only one shard per rank. Use the placements Shard and Replicate."
        )
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach(), Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def replicated_axes(tensor: torch.Tensor, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes (of dp, shard and tp) along which ranks hold equal values of `tensor`."""
    split: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        placements = zip(names, tensor.placements, strict=True)
        split = {axis for axis, placement in placements if not placement.is_replicate()}
    return tuple(axis for axis in ("dp", "shard", "tp") if axis not in split)
