"""The ranks of a process group, and what tutti.comm remembers about them."""

import socket
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tutti.comm import ledger
from tutti.comm.paths import Table
from tutti.world.errors import UsageError


class Members:
    """A process group as this rank sees it: its name, size and rank, and the count of calls.

    It must not keep the group alive: torch ends a group's threads with its last reference.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._backends: dict[str, str] = {}
        self.name = str(group.group_name)
        self.label = _label(group)
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.sequence = 0  # collectives begun: the same number on every rank
        self.messages = 0  # sends and receives begun: each rank counts its own
        self.agreements = 0  # comparisons made in debug mode
        self.tables: dict[str, Table | None] = {}  # of paths, as rank 0 has them (routes.py)
        self.has_symmetric: bool | None = None  # whether CUDA symmetric memory serves it
        self.symmetric_stream: int | None = None  # and on which stream
        self.book = ledger.add_group(self.label, self.name, self.rank, self.size)

    @property
    def group(self) -> dist.ProcessGroup:
        """torch's process group."""
        group = self._group()
        if group is None:
            raise UsageError(f"group {self.label} has been destroyed: make a new one")
        return group

    @property
    def store(self) -> dist.Store:
        """The group's part of the store."""
        store: dist.Store = c10d._world.pg_map[self.group][1]
        return store

    def backend(self, device_type: str) -> str:
        """The name of the backend that serves tensors on such a device, such as gloo."""
        name = self._backends.get(device_type)
        if name is None:
            group = self.group
            if type(group) is dist.ProcessGroup:
                name = str(group._get_backend(torch.device(device_type)).name())
            else:  # a process group written in Python is its own backend
                name = str(group.name())
            name = name.lower()
            # torch 2.15 has three that are NCCL: nccl (its nccl-legacy), nccl2 and nccl-lazy.
            self._backends[device_type] = name = "nccl" if name.startswith("nccl") else name
        return name

    @property
    def device_types(self) -> set[str]:
        """Where tensors may be that the group serves: cpu, cuda."""
        return {device.type for device in getattr(self.group, "_device_types", [])}

    def addresses(self) -> list[str]:
        """Where each rank's ledger is, as JSON; waits for ranks that have not said so yet."""
        keys = [f"tutti/ledger/{rank}" for rank in self.ranks]
        store = c10d._get_default_store()
        store.wait(keys)
        return [text.decode() for text in store.multi_get(keys)]

    @property
    def small_device(self) -> torch.device:
        """Where a few bytes travel best in this group: on the CPU if it has a CPU backend."""
        types = self.device_types
        if not types or "cpu" in types:
            return torch.device("cpu")
        return torch.device(types.pop(), torch.accelerator.current_device_index())

    def check_rank(self, argument: str, rank: int) -> int:
        """The rank, if the group has it."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"{argument}={rank}: group {self.label} has ranks 0 to {self.size - 1} "
                f"(ranks in the group, not in the world): choose one of them"
            )
        return rank


# Keyed by the address of the group, and emptied when the group goes.
_known: dict[int, Members] = {}
_announced: "weakref.ref[dist.ProcessGroup] | None" = None


def members_of(group: dist.ProcessGroup | None) -> Members:
    """What is known about a group; None is the default group, all ranks of the world."""
    process_group = c10d.GroupMember.WORLD if group is None else group
    known = _known.get(id(process_group))
    return known if known is not None else _meet(process_group)


def _meet(group: object) -> Members:
    if group is None:
        raise UsageError("no process group in this process: call tutti.init() first")
    if isinstance(group, int):
        raise UsageError("this rank is not in the group: call collectives on its ranks only")
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"group={group!r} is no process group: give one from dist.new_group() or "
            "mesh.get_group()"
        )
    _announce()
    key = id(group)
    members = _known[key] = Members(group)
    weakref.finalize(group, _known.pop, key, None).atexit = False
    return members


def _announce() -> None:
    """Tell the other ranks, by the store, which process this rank is: they may have to look."""
    global _announced
    world = c10d.GroupMember.WORLD
    if world is None or (_announced is not None and _announced() is world):
        return
    _announced = weakref.ref(world)
    rank = dist.get_rank()
    ledger.introduce(rank, dist.get_world_size(), socket.gethostname())
    c10d._get_default_store().set(f"tutti/ledger/{rank}", ledger.address())


def _label(group: dist.ProcessGroup) -> str:
    described = str(getattr(group, "group_desc", "") or "undefined")
    if described == "default_pg":
        return "default"
    label = f"group-{group.group_name}" if described == "undefined" else described
    return label.replace("|", "/")
