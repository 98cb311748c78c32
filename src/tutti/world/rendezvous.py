"""Rendezvous: rank 0 serves a key-value store, and every rank reads the RankInfo of all ranks.

So every rank knows before the first collective which ranks share a machine, which ranks are missing
and which versions differ.

After torchrun has restarted the ranks, the store still has the RankInfo of the old processes. So
rank 0 publishes a list with the RankInfo of all ranks under a new start id. The list becomes valid
when every rank has confirmed that its own RankInfo in the list is the current one.
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
    """An open store, its address, and the variable or rule that the address comes from."""

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
            f"of {identity.size} ranks are on other hosts. Set MASTER_ADDR to the name of rank 0's "
            "host."
        )
    here = socket.gethostname()
    if not is_loopback and local_address_towards(address) != address:
        raise UsageError(
            f"rank 0 runs on {here}, but the master address {name} ({address}, from {reason}) "
            "belongs to another host. Set MASTER_ADDR to rank 0's host."
        )
    bind_to = address
    if is_loopback and not named_loopback and identity.local_size != identity.size:
        # Debian resolves the host's own name to 127.0.1.1. Other hosts resolve the same name to an
        # address of an interface, so listen on all interfaces.
        bind_to = ""
        reason += f"; {name} is {address} on rank 0, so the store listens on every interface"
    for port in ports:
        with contextlib.suppress(OSError):
            listener = open_listener(bind_to, port)
            break
    else:
        raise UsageError(
            f"port {', '.join(map(str, ports))} is in use on {here}. Set MASTER_PORT to a free "
            f"port ({free_port()} is free now), or stop the process that listens there."
        )
    # Without master_listen_fd, TCPStore would listen on every interface.
    store = dist.TCPStore(
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
            # First try an ordinary socket, because torch's client prints a long C++ stack trace
            # for every refused connection.
            try:
                socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
            except OSError:
                continue
            store = _open_client(address, port, max(1.0, min(_HANDSHAKE_SECONDS, remaining)))
            # If the port is derived from the job id, another job may have the same port. So check
            # that the store has this job's key.
            is_set = identity.master_port is not None
            if store is not None and (is_set or store.check([f"tutti/job/{identity.job}"])):
                store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
                return Rendezvous(store, address, port, reason)
        time.sleep(0.05)
    raise UsageError(
        f"rank {identity.rank} on {socket.gethostname()} could not reach rank 0 at {address} port "
        f"{', '.join(map(str, ports))} (from {reason}). Check that rank 0 has started and that no "
        "firewall blocks the port. If rank 0 needs more time, increase --start-timeout or "
        "start_timeout=."
    )


def _open_client(address: str, port: int, timeout: float) -> dist.Store | None:
    """Return the store at this port, or None if the port belongs to a different service.

    torch's client runs in a thread, because it would wait forever for the reply of a service that
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
    """The information that a rank sends to all other ranks, as JSON."""

    rank: int
    host: str
    # Ranks with the same value share memory and the loopback interface. A container with its own
    # network namespace counts as another machine, because its loopback interface is separate.
    machine: str
    address: str
    # The port at which rank 0 accepts the liveness connections. 0 on all other ranks.
    liveness_port: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    gpus: tuple[str, ...]
    cpus: str
    versions: dict[str, str]
    # Whether the shm backend works on this rank. It is used only if it works on all ranks.
    shm: bool
    token: str  # a random id of this process, new after a restart


@dataclass(frozen=True)
class Roster:
    """The RankInfo of all ranks, in rank order, and a unique id for this start of the world."""

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
    """Return why this rank cannot use the shm backend, or "". The first call compiles shm."""
    if "shm" not in dist.Backend.backend_list:
        return "the backend is not registered with torch, because tutti-torch is not installed"
    # Find the backend's module through torch, because tutti.world must not import tutti.comm.
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
        raise UsageError(
            "the connection to rank 0's store was lost: rank 0 or its host has ended. See the "
            "output of rank 0."
        ) from None
    ranks = (
        RankInfo(**fields | {"gpus": tuple(fields["gpus"])}) for fields in map(json.loads, entries)
    )
    return Roster(tuple(ranks), start_id)


class _Poll:
    """Sleeps between reads of the store. Raises UsageError after the timeout."""

    def __init__(self, store: dist.Store, size: int, timeout: float) -> None:
        self.store, self.timeout = store, timeout
        self.keys = [f"tutti/rank/{rank}" for rank in range(size)]
        self.deadline = time.monotonic() + timeout
        # One store serves all ranks, so each rank of a larger world polls less often.
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
    """On rank 0, publish the list of RankInfo texts, and wait until all ranks have confirmed it.

    If a RankInfo changes before all ranks have confirmed the list, publish a new list. Return
    (start id, list).
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
    """On other ranks, wait for a list that has this process's RankInfo, and confirm the list.

    Return (start id, list).
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
        # A list from before a restart has another token for this rank. Wait for the next list.
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
                f"the other {count} ranks have {usual}. Install the same version on every host."
            )
