"""Rendezvous: rank 0 serves a key-value store, and every rank reads the RankInfo of all ranks.

So all ranks have these facts before the first collective: which ranks share a machine, which rank
is missing, which versions differ. After a restart by torchrun the same store still has the entries
of the dead processes. So rank 0 publishes a list of all entries under a new start id. The list is
valid only after every rank has confirmed that its current entry is in the list.
"""

import contextlib
import importlib
import ipaddress
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tutti.machine.cpu_numa import allowed_cpus, format_cpu_list
from tutti.machine.environment import boot_id, versions
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.launchers import Identity, free_port, port_candidates
from tutti.world.liveness import local_address_towards, open_listener

_PROBE_SECONDS = 1.0  # time for a port to accept a connection
_HANDSHAKE_SECONDS = 5.0  # time for a store to answer


@dataclass(frozen=True)
class Rendezvous:
    """An open store, its address, and the reason for that address."""

    store: dist.Store
    host: str
    port: int
    reason: str


def open_rendezvous(identity: Identity, timeout: float) -> Rendezvous:
    """Open and return the store that all ranks of this world share, within `timeout` seconds."""
    if identity.size == 1 and not identity.agent_store:
        return Rendezvous(dist.HashStore(), "", 0, "a world of one rank needs no port")
    if identity.master_host is None:
        raise UsageError(
            f"{identity.launcher} started {identity.size} ranks on several hosts but does not "
            "report the host of rank 0. Set MASTER_ADDR, the name of rank 0's host, and "
            "MASTER_PORT for all ranks (-x MASTER_ADDR=HOST -x MASTER_PORT=29500 with Open MPI, "
            "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500 with MPICH)."
        )
    if not identity.job and identity.local_size != identity.size and identity.master_port is None:
        raise UsageError(
            "MPICH ranks on several hosts have no common job id from which to derive a port. Set "
            "MASTER_PORT for all ranks (-genv MASTER_PORT 29500)."
        )
    deadline = time.monotonic() + timeout
    reason = identity.reasons.get("master", "")
    try:
        found = socket.getaddrinfo(identity.master_host, None, type=socket.SOCK_STREAM)
    except OSError:
        raise UsageError(
            f"the master {identity.master_host!r} (from {reason}) cannot be resolved on "
            f"{socket.gethostname()}. Set MASTER_ADDR to an address or a name that every host can "
            "resolve."
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # prefer IPv4
    address = str(found[0][4][0])
    ports = [identity.master_port] if identity.master_port else port_candidates(identity.job)
    if identity.rank == 0 and not identity.agent_store:
        return _serve(identity, identity.master_host, address, ports, reason, timeout)
    return _connect(identity, address, ports, reason, deadline)


def _serve(
    identity: Identity, name: str, address: str, ports: list[int], reason: str, timeout: float
) -> Rendezvous:
    is_loopback = ipaddress.ip_address(address).is_loopback
    named_loopback = name in ("localhost", address)
    if is_loopback and named_loopback and identity.local_size not in (None, identity.size):
        raise UsageError(
            f"MASTER_ADDR={name} is a loopback address, but {identity.size - identity.local_size} "
            f"of {identity.size} ranks are on other hosts. Set it to the name of rank 0's host."
        )
    here = socket.gethostname()
    if not is_loopback and local_address_towards(address) != address:
        raise UsageError(
            f"rank 0 runs on {here}, but the master address {name} ({address}, from {reason}) "
            "belongs to another host. Set MASTER_ADDR to rank 0's host."
        )
    bind_to = address
    if is_loopback and not named_loopback and identity.local_size != identity.size:
        # Debian maps a host's own name to 127.0.1.1, but other hosts resolve the name differently.
        bind_to = ""
        reason += f"; {name} is {address} here, so the store listens on every interface"
    for port in ports:
        with contextlib.suppress(OSError):
            listener = open_listener(bind_to, port)
            break
    else:
        raise UsageError(
            f"port {', '.join(map(str, ports))} is in use on {here}. Set MASTER_PORT to a free "
            f"port ({free_port()} is free now), or stop the process that listens there."
        )
    store = dist.TCPStore(  # without master_listen_fd, TCPStore would listen on every interface
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    store.set(f"tutti/job/{identity.job}", "here")
    return Rendezvous(store, address, port, reason)


def _connect(
    identity: Identity, address: str, ports: list[int], reason: str, deadline: float
) -> Rendezvous:
    while (remaining := deadline - time.monotonic()) > 0:
        for port in ports:
            # Probe with an ordinary socket first, because torch's client prints a page of C++
            # frames to standard error for every refused connection.
            try:
                socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
            except OSError:
                continue
            store = _open_client(address, port, max(1.0, min(_HANDSHAKE_SECONDS, remaining)))
            # A port derived from the job id may belong to the store of another job. Only the store
            # of this job has the key of this job.
            is_set = identity.master_port is not None
            if store is not None and (is_set or store.check([f"tutti/job/{identity.job}"])):
                store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
                return Rendezvous(store, address, port, reason)
        time.sleep(0.05)
    raise UsageError(
        f"rank {identity.rank} on {socket.gethostname()} could not reach rank 0 at {address} port "
        f"{', '.join(map(str, ports))} (from {reason}). Did rank 0 start? Does a firewall block "
        "the port? If rank 0 needs more time, increase --start-timeout or start_timeout=."
    )


def _open_client(address: str, port: int, timeout: float) -> dist.Store | None:
    """Return the store at this port, or None if the process that listens there is not a store.

    torch's client runs in a thread, because it waits without limit for the reply of a process that
    is not a store.
    """
    result: queue.Queue[dist.Store | None] = queue.Queue()
    limit = timedelta(seconds=timeout)

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            result.put(dist.TCPStore(address, port, wait_for_workers=False, timeout=limit))
        result.put(None)

    threading.Thread(target=connect, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return result.get(timeout=timeout)
    return None


# -- exchange of information between ranks ---------------------------------------------------------


@dataclass(frozen=True)
class RankInfo:
    """The information that a rank sends to all other ranks, as JSON and never as a pickle."""

    rank: int
    host: str
    # Ranks with the same value share memory and loopback. A container or network namespace counts
    # as another machine, because its loopback is separate.
    machine: str
    address: str
    # The port at which rank 0 accepts the liveness connections of other ranks, or 0 on other ranks.
    liveness_port: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    gpus: tuple[str, ...]
    cpus: str
    versions: dict[str, str]
    # Whether the shared-memory backend works on this rank. All ranks must use the same backend.
    shm: bool
    token: str  # a random id of this process, new after a restart


@dataclass(frozen=True)
class Roster:
    """The information of all ranks, in rank order, and a unique id of this start of the world."""

    ranks: tuple[RankInfo, ...]
    start_id: str


def describe_rank(
    identity: Identity, address: str, gpus: Sequence[str], liveness_port: int = 0
) -> RankInfo:
    return RankInfo(
        rank=identity.rank,
        host=socket.gethostname(),
        machine=f"{socket.gethostname()}/{boot_id()}/{os.readlink('/proc/self/ns/net')}",
        address=address,
        liveness_port=liveness_port,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        node=identity.node,
        gpus=tuple(gpus),
        cpus=format_cpu_list(allowed_cpus()),
        versions=versions() | {"torch": torch.__version__},  # includes the CUDA version
        shm=not gpus and not shm_unavailable(),  # shm is used only on the CPU
        token=uuid.uuid4().hex,
    )


def shm_unavailable() -> str:
    """Return the reason why this rank cannot use shm, or "". The first call compiles shm."""
    if "shm" not in dist.Backend.backend_list:
        return "the backend is not registered with torch, because tutti-torch is not installed"
    # Call the module that registered the backend, because tutti.world must not import tutti.comm.
    creator = dist.Backend._plugins["SHM"].creator_fn
    usable, reason = importlib.import_module(creator.__module__).available()
    return "" if usable else str(reason)


def exchange_rank_info(store: dist.Store, info: RankInfo, size: int, timeout: float) -> Roster:
    """Exchange RankInfo with all ranks and return the same Roster on every rank."""
    poll = _Poll(store, size, timeout)
    try:
        store.set(poll.keys[info.rank], json.dumps(asdict(info)))
        start_id, entries = _publish(poll) if info.rank == 0 else _confirm(info, poll)
    except RuntimeError:
        raise UsageError("the store ended with rank 0 or its host. See rank 0's output.") from None
    ranks = (
        RankInfo(**fields | {"gpus": tuple(fields["gpus"])}) for fields in map(json.loads, entries)
    )
    return Roster(tuple(ranks), start_id)


class _Poll:
    """Sleeps between reads of the store. At the timeout, raises UsageError with missing ranks."""

    def __init__(self, store: dist.Store, size: int, timeout: float) -> None:
        self.store, self.timeout = store, timeout
        self.keys = [f"tutti/rank/{rank}" for rank in range(size)]
        self.deadline = time.monotonic() + timeout
        # One store serves all ranks, so in a larger world each rank polls less often.
        self.interval = 0.02 * (1 + size / 64)

    def sleep(self, waiting_for: Sequence[str] = ()) -> None:
        if time.monotonic() < self.deadline:
            time.sleep(self.interval)
            return
        keys = waiting_for or self.keys
        missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
        raise UsageError(
            f"rank {', '.join(missing) or '0'} of {len(self.keys)} did not reach the rendezvous "
            f"within {self.timeout:g} s. See the output of the missing ranks, or increase "
            "--start-timeout."
        )


def _publish(poll: _Poll) -> tuple[str, list[str]]:
    """On rank 0, publish the list of entries until all ranks have confirmed it.

    If an entry changes before that, publish a new list. Return (start id, entries).
    """
    store = poll.store
    while not store.check(poll.keys):
        poll.sleep()
    while True:
        entries = [text.decode() for text in store.multi_get(poll.keys)]
        start_id = uuid.uuid4().hex
        store.set(f"tutti/{start_id}/roster", json.dumps(entries))
        store.set("tutti/start_id", start_id)
        confirmations = [f"tutti/{start_id}/confirmed/{rank}" for rank in range(1, len(poll.keys))]
        next_read = time.monotonic() + 0.5
        while confirmations and not store.check(confirmations):
            poll.sleep(confirmations)
            if time.monotonic() > next_read:
                if [text.decode() for text in store.multi_get(poll.keys)] != entries:
                    break
                next_read = time.monotonic() + 0.5
        else:
            store.set(f"tutti/{start_id}/complete", "yes")
            return start_id, entries


def _confirm(info: RankInfo, poll: _Poll) -> tuple[str, list[str]]:
    """On other ranks, wait for a list with this process's entry, and confirm the list.

    Return (start id, entries).
    """
    store = poll.store
    while not store.check(["tutti/start_id"]):
        poll.sleep()
    while True:
        start_id = store.get("tutti/start_id").decode()
        entries = json.loads(store.get(f"tutti/{start_id}/roster"))
        current = info.rank < len(entries) and json.loads(entries[info.rank])["token"] == info.token
        if current:
            store.set(f"tutti/{start_id}/confirmed/{info.rank}", "yes")
        # A list from before a restart has an old token of this rank. Rank 0 publishes a new list.
        while store.get("tutti/start_id").decode() == start_id:
            if current and store.check([f"tutti/{start_id}/complete"]):
                return start_id, entries
            poll.sleep()


def refuse_different_versions(ranks: Sequence[RankInfo]) -> None:
    """Raise RanksDiffer, naming the ranks that differ, unless all ranks run the same versions."""
    for name in sorted({name for info in ranks for name in info.versions}):
        by_rank = [info.versions.get(name, "none") for info in ranks]
        usual, count = Counter(by_rank).most_common(1)[0]
        different = [
            f"rank {info.rank} on {info.host} has {version}"
            for info, version in zip(ranks, by_rank, strict=True)
            if version != usual
        ]
        if different:
            more = f" and {len(different) - 4} more" if len(different) > 4 else ""
            raise RanksDiffer(
                f"ranks run different versions of {name}: {', '.join(different[:4])}{more}, but "
                f"the other {count} have {usual}. Install the same version everywhere."
            )
