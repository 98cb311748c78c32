"""`shm` as a torch.distributed backend: `init_process_group("shm")`, `"cpu:shm,cuda:nccl"`.

Where the package is installed, torch finds this through the entry point group "torch.backends";
otherwise `tutti.comm.shm.register()` does the same by hand. Nothing is loaded before the first
group is made.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ShmOptions:
    """What `pg_options=` may say to a group of the shm backend."""

    front: Literal["auto", "compiled", "plain"] = "auto"
    staging_bytes: int = 0  # shared memory for bytes on their way, per rank; 0: the core's choice
    # For tests of several hosts on one machine: whether a peer's memory is in reach.
    can_open: Callable[[dict[str, Any]], bool] | None = None


def register() -> None:
    """Make the backend `shm` known to torch. Safe to call again."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "SHM"):
        return
    dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
    # The flight recorder of torch 2.15 records every call of a backend that is not named here: half
    # as much again as a small all_reduce takes. Our errors say themselves who is late, and where.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add("shm")


def autoload() -> None:
    """What torch calls at the end of `import torch`; an error there would break every program."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"the shm backend is not registered: {error!r}", stacklevel=2)


def available() -> tuple[bool, str]:
    """Whether the backend can be used here, and how or why not."""
    if sys.platform != "linux":
        return False, f"shm needs Linux's memfd and /proc, this is {sys.platform}"
    from tutti.comm.shm import native

    try:
        core = native.core()
    except native.CoreMissing as error:
        return False, str(error)
    if not os.path.isdir("/proc/self/fd"):
        return False, "shm needs /proc to open the memory of other ranks, it is not mounted"
    from tutti.comm.shm.compiled import compiled_front

    return True, f"{core.tutti_vector_code().decode()} kernels, {compiled_front()[1]}"


def native_group(group: "dist.ProcessGroup | None" = None) -> int | None:
    """Address of the core's group behind a process group; None where shm does not serve it alone.

    A group over several hosts has one per host, whose ranks are not the group's: also None.
    """
    backend = _cpu_backend(group)
    return None if _hosts(backend) > 1 else getattr(backend, "native_group", None) or None


def hosts(group: "dist.ProcessGroup | None" = None) -> int:
    """Over how many hosts shm serves a group; 1 where something else serves it."""
    return _hosts(_cpu_backend(group))


def _hosts(backend: Any) -> int:
    return int(getattr(backend, "hosts", 1))  # only what joins several hosts counts them


def _cpu_backend(group: "dist.ProcessGroup | None") -> Any:
    """What serves a group on the CPU: a compiled backend, a group written in Python, or None."""
    import torch
    import torch.distributed as dist

    given: Any = dist.group.WORLD if group is None else group
    if not hasattr(given, "native_group"):
        try:
            given = given._get_backend(torch.device("cpu"))
        except RuntimeError:
            return None
    return getattr(given, "wrapped_pg", given)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends


def set_where(where: Callable[[], str] | None) -> None:
    """Let errors say where in its code each rank made the call; None: no longer (it costs time)."""
    from tutti.comm.shm import call
    from tutti.comm.shm.compiled import compiled_front

    call.where = where
    module = compiled_front()[0]
    if module is not None:
        module.set_where(where)


def _create(options: Any, given: Any) -> Any:
    """What torch calls for every new group that has an shm part."""
    # In "cpu:shm,cuda:nccl" the options given are NCCL's.
    mine = given if isinstance(given, ShmOptions) else ShmOptions()
    ranks = list(options.global_ranks_in_group)
    seconds = options.timeout.total_seconds()
    return make(
        options.store,
        options.group_rank,
        options.group_size,
        timedelta(seconds=seconds),
        options.group_id,
        ranks,
        mine,
    )


def make(
    store: "dist.Store",
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    ranks: list[int] | None = None,
    options: ShmOptions | None = None,
) -> Any:
    """A c10d backend, or a process group written in Python where there is no compiled front."""
    from tutti.comm.ledger import record_location
    from tutti.comm.shm import native
    from tutti.comm.shm.hierarchy import HierarchicalGroup
    from tutti.comm.shm.meeting import meet, shares_memory
    from tutti.comm.shm.plain import PlainGroup

    options = options or ShmOptions()
    # What is missing here is said before anyone waits for this rank.
    core, module = native.core(), _front_module(options)
    if module is None and options.front == "auto" and (ranks[rank] if ranks else rank) == 0:
        _say_that_it_is_plain()
    record_location(_note_place)
    meeting = meet(
        store,
        rank,
        size,
        name,
        timeout.total_seconds(),
        staging_bytes=options.staging_bytes,
        can_open=options.can_open or shares_memory,
    )
    local: Any = None
    try:
        own, count = meeting.neighbours.index(rank), len(meeting.neighbours)
        world = [ranks[each] for each in meeting.neighbours] if ranks else list(meeting.neighbours)
        if module is None:
            local = PlainGroup(meeting.group, meeting.store, own, count, name, timeout)
        else:
            local = module.ShmBackend(meeting.group, own, count, timeout, name, world)
        if len(meeting.hosts) == 1:
            return local
        whole = HierarchicalGroup(meeting, local, name, timeout)
        return whole if module is None else module.PythonBackend(whole, rank, size)
    except BaseException:
        if local is None:
            core.tutti_group_close(meeting.group)
        else:  # which owns it
            local.shutdown()
        raise


@functools.cache  # once in a process
def _say_that_it_is_plain() -> None:
    from tutti.comm.shm.compiled import compiled_front

    print(f"note: shm with its {compiled_front()[1]}", file=sys.stderr)


def _note_place(text: str) -> None:
    from tutti.comm.shm import native

    native.core_holding_gil().tutti_note_place(text.encode())


def _front_module(options: ShmOptions) -> Any:
    """The compiled front, or None for the plain one."""
    from tutti.comm.shm.compiled import compiled_front
    from tutti.world.errors import UsageError

    module, reason = compiled_front()
    if options.front == "compiled" and module is None:
        raise UsageError(f"front='compiled': {reason}")
    return None if options.front == "plain" else module
