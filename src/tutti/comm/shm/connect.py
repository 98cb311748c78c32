"""Creates a group of the shm backend. The ranks find each other through the store and connect.

Each rank creates a probe, a memfd with a random token. Two ranks are on the same host if each rank
can open the probe of the other rank through /proc and read the token. Host names, boot ids and
variables such as LOCAL_WORLD_SIZE are not used, because they can be wrong. If a rank cannot use
shm, all ranks of the group use gloo.
"""

import functools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tutti.comm.ledger import record_location
from tutti.comm.shm import native, registration
from tutti.world.errors import UsageError, name_ranks
from tutti.world.exchange import RanksMissing, gather_json_from_store

# The host, pid, fd and token of a rank's probe: a memfd that peers try to open.
ProbeInfo = dict[str, Any]
Gather = Callable[[str, Any], list[Any]]  # gather(topic, value) returns the values of all ranks
_TOKEN_BYTES = 8
_PROBE = "tutti-probe"


def make(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    ranks: list[int] | None = None,
    options: registration.ShmOptions | None = None,
) -> Any:
    """Return a c10d backend for a group. `ranks[i]` is the global rank of the group's rank i."""
    ranks = ranks or list(range(size))
    can_open = (options and options.can_open) or shares_memory
    module, reason = registration._load()
    # A store may outlive a group, and a later group with the same name may use the same store.
    # Therefore each group adds its own prefix to its keys.
    generation = (store.add("arrivals", 1) - 1) // size
    store = dist.PrefixStore(f"{generation}/", store)
    deadline = time.monotonic() + timeout.total_seconds()

    def gather(topic: str, value: Any) -> list[Any]:
        remaining = max(0.001, deadline - time.monotonic())
        try:
            return gather_json_from_store(store, topic, value, rank, size, remaining)
        except RanksMissing as missing:
            raise native.ShmTimeout(
                f"{name_ranks(missing.ranks)} did not connect to group {name} of {size} ranks "
                f"within {timeout.total_seconds():g} s. All ranks must call init_process_group or "
                "new_group in the same order."
            ) from None

    def gloo(prefix: str, gloo_rank: int, gloo_size: int) -> Any:
        prefixed = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(prefixed, gloo_rank, gloo_size, timeout)

    token = secrets.randbits(8 * _TOKEN_BYTES - 1)
    fd = os.memfd_create(_PROBE)
    try:
        os.write(fd, token.to_bytes(_TOKEN_BYTES))
        info = {"host": socket.gethostname(), "pid": os.getpid(), "fd": fd, "token": token}
        infos = gather("probe", info | {"unavailable": "" if module else reason})
        names = [str(info["host"]) for info in infos]
        reasons = [info["unavailable"] for info in infos]
        if module is None or any(reasons):
            first = next(peer for peer in range(size) if reasons[peer])
            if ranks[rank] == 0:
                _print_gloo_note(f"rank {first} on {names[first]}: {reasons[first]}")
            return gloo("gloo/", rank, size)
        reachable = [p for p in range(size) if p == rank or can_open(infos[p])]
        hosts = _hosts(gather("reachable", reachable), names)
    finally:
        os.close(fd)
    host = next(index for index, members in enumerate(hosts) if rank in members)
    local_ranks = hosts[host]  # including this rank
    token = int(infos[local_ranks[0]]["token"])
    group = _make_group(name, rank, local_ranks, names, token, gather)
    record_location("shm", _write_location)
    try:
        if len(hosts) == 1:
            return module.ShmBackend(group, rank, size, timeout, name, ranks)
        is_leader = local_ranks[0] == rank
        return module.HierarchicalBackend(
            group=group,
            hosts=[list(members) for members in hosts],
            all=gloo("all/", rank, size),
            leaders=gloo("leaders/", host, len(hosts)) if is_leader else None,
            rank=rank,
            size=size,
            timeout=timeout,
            name=name,
            global_ranks=ranks,
        )
    except BaseException:
        native.core().tutti_group_close(group)
        raise


@functools.cache  # once per process and reason
def _print_gloo_note(reason: str) -> None:
    print(f"tutti: gloo is used instead of shm ({reason})", file=sys.stderr, flush=True)


def _write_location(text: str) -> None:
    native.core_holding_gil().tutti_note_location(text.encode())


def shares_memory(info: ProbeInfo) -> bool:
    """Return whether this process can open the probe of another rank."""
    path = f"/proc/{info['pid']}/fd/{info['fd']}"
    try:
        # If the other rank is in another PID namespace, its pid may belong to an unrelated process
        # here. Check the file name first, because opening an unknown file may block.
        if not os.readlink(path).startswith(f"/memfd:{_PROBE}"):
            return False
        with open(path, "rb", buffering=0) as probe:
            return probe.read(_TOKEN_BYTES) == int(info["token"]).to_bytes(_TOKEN_BYTES)
    except OSError:
        return False


def _hosts(reachable: list[list[int]], names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host. Ranks of one host can open each other's memory.

    All ranks compute the same result.
    """
    mutual = [
        tuple(p for p in peers if rank in reachable[p])
        for rank, peers in enumerate(map(sorted, reachable))
    ]
    for rank, ranks in enumerate(mutual):
        for peer in ranks:
            if mutual[peer] != ranks:
                third = next(iter(set(mutual[peer]) ^ set(ranks)))
                raise UsageError(
                    f"ranks {rank} on {names[rank]} and {peer} on {names[peer]} share memory, but "
                    f"only one of them shares memory with rank {third} on {names[third]}. Run all "
                    "ranks of a host as one user and in one PID namespace (container), or use "
                    "backend='gloo'."
                )
    return tuple(sorted(set(mutual)))


def _make_group(
    name: str, rank: int, ranks: Sequence[int], names: Sequence[str], token: int, gather: Gather
) -> int:
    """Create the C core's group of `ranks`, which are on this host. Return the group's address."""
    core = native.core()
    staging_bytes = 0  # the core's default
    group = core.tutti_group_create(
        name.encode(), ranks.index(rank), len(ranks), staging_bytes, token
    )
    segment = {"error": core.tutti_error().decode()}
    if group:
        segment = {"pid": os.getpid(), "fd": core.tutti_group_fd(group)}
        segment["bytes"] = core.tutti_group_bytes(group)
    try:
        segments = gather("group", segment)
        for peer, segment in enumerate(segments):
            if "error" in segment:
                reason = f"could not create group {name}: {segment['error']}"
                raise UsageError(f"rank {peer} on {names[peer]} {reason}")
        failure = None
        for local_peer, peer in enumerate(ranks):
            at = segments[peer]
            if peer == rank or failure is not None:
                continue
            if core.tutti_group_connect(group, local_peer, at["pid"], at["fd"], at["bytes"]) != 0:
                reason = core.tutti_error().decode()
                failure = f"rank {rank} could not connect to rank {peer} on {names[peer]}: {reason}"
        # A rank must not continue before all peers have opened its memory: the rank may end soon,
        # and the memory of a process that has ended cannot be opened.
        for text in gather("connected", failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        if group:
            core.tutti_group_close(group)
        raise
    return int(group)
