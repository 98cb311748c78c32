"""The one place where ranks first meet: a key-value store on rank 0's host.

torch's TCPStore listens on every interface, whatever host it is given, and answers anybody. So
rank 0 binds the socket itself, to loopback when the world is on one host, and hands it over.
"""

import ipaddress
import queue
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tutti.world.errors import UsageError
from tutti.world.identity import Identity
from tutti.world.network import free_port, local_address_towards, port_candidates

_PROBE_SECONDS = 1.0
_HANDSHAKE_SECONDS = 5.0


@dataclass(frozen=True)
class Meeting:
    """An open store, and where it listens."""

    store: dist.Store
    host: str
    port: int
    is_host: bool
    reason: str


def meet(identity: Identity, timeout: float) -> Meeting:
    """Open the store that all ranks of this world share, within `timeout` seconds."""
    if identity.size == 1 and not identity.agent_store:
        return Meeting(dist.HashStore(), "", 0, True, "a world of one needs no port")
    if identity.master_host is None:
        raise UsageError(
            f"{identity.launcher} started {identity.size} ranks on several hosts and does not say "
            "where rank 0 is: give all ranks MASTER_ADDR, the name of rank 0's host, and "
            "MASTER_PORT (-x MASTER_ADDR=HOST -x MASTER_PORT=29500 with Open MPI, "
            "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500 with MPICH)"
        )
    on_several_hosts = identity.local_size != identity.size
    if not identity.job and on_several_hosts and identity.master_port is None:
        raise UsageError(
            "MPICH's ranks on several hosts share no job id to derive a port from: give all ranks "
            "MASTER_PORT, too (-genv MASTER_PORT 29500)"
        )
    deadline = time.monotonic() + timeout
    reason = identity.reasons.get("master", "")
    if identity.rank == 0 and not identity.agent_store:
        return _host(identity, identity.master_host, reason, timeout)
    address = _resolve(identity.master_host, reason)
    return _join(identity, address, reason, deadline)


def _host(identity: Identity, name: str, reason: str, timeout: float) -> Meeting:
    address = _resolve(name, reason)
    is_loopback = ipaddress.ip_address(address).is_loopback
    on_one_host = identity.local_size == identity.size
    says_loopback = name == "localhost" or name == address
    if is_loopback and says_loopback and identity.local_size not in (None, identity.size):
        raise UsageError(
            f"MASTER_ADDR={name} is this host only, but {identity.size - identity.local_size} of "
            f"{identity.size} ranks are on others: set it to the name of rank 0's host, or unset it"
        )
    if not is_loopback and local_address_towards(address) != address:
        raise UsageError(
            f"rank 0 runs on {socket.gethostname()}, but the master address {name} ({address}, "
            f"from {reason}) is another host's: set MASTER_ADDR to rank 0's host"
        )
    bind_to = address
    if is_loopback and not (says_loopback or on_one_host):
        # Debian maps a host's own name to 127.0.1.1: peers resolve the name to something else.
        bind_to = ""
        reason += f"; {name} is {address} here, so it listens on every interface"
    ports = [identity.master_port] if identity.master_port else port_candidates(identity.job)
    listener, port = _listen(bind_to, ports)
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    store.set(_job_key(identity.job), "here")
    return Meeting(store, address, port, True, reason)


def _listen(address: str, ports: list[int]) -> tuple[socket.socket, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(4096)  # every rank of a large world may connect in the same moment
            return listener, port
        except OSError:
            listener.close()
    tried = ", ".join(str(port) for port in ports)
    raise UsageError(
        f"port {tried} is in use on {socket.gethostname()}: set MASTER_PORT to a free one "
        f"({free_port()} is free now), or stop what listens there"
    )


def _join(identity: Identity, address: str, reason: str, deadline: float) -> Meeting:
    # A probe with an ordinary socket comes first: torch's client writes a page of C++ frames to
    # standard error for every refused connection.
    ports = [identity.master_port] if identity.master_port else port_candidates(identity.job)
    while time.monotonic() < deadline:
        for port in ports:
            if not _somebody_listens(address, port):
                continue
            store = _call(address, port, min(_HANDSHAKE_SECONDS, deadline - time.monotonic()))
            # A derived port may be another job's store: only ours holds our key.
            given = identity.master_port is not None
            if store is not None and (given or store.check([_job_key(identity.job)])):
                store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
                return Meeting(store, address, port, False, reason)
        time.sleep(0.05)
    tried = ", ".join(str(port) for port in ports)
    raise UsageError(
        f"rank {identity.rank} on {socket.gethostname()} could not reach rank 0 at {address} port "
        f"{tried} (from {reason}): did rank 0 start, and does a firewall let the port through? "
        "A longer start timeout (--start-timeout, start_timeout=) gives it more time"
    )


def _call(address: str, port: int, seconds: float) -> dist.Store | None:
    """The store at this port, or None if what listens there is none.

    In a thread: torch's client waits without end for the greeting of something that is no store.
    """
    answer: queue.Queue[dist.Store | None] = queue.Queue()

    def call() -> None:
        try:
            timeout = timedelta(seconds=max(1.0, seconds))
            answer.put(
                dist.TCPStore(
                    address, port, is_master=False, wait_for_workers=False, timeout=timeout
                )
            )
        except RuntimeError:
            answer.put(None)

    threading.Thread(target=call, daemon=True).start()
    try:
        return answer.get(timeout=max(1.0, seconds))
    except queue.Empty:
        return None


def _somebody_listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_PROBE_SECONDS):
            return True
    except OSError:
        return False


def _job_key(job: str) -> str:
    return f"tutti/job/{job}"


def _resolve(name: str, reason: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        raise UsageError(
            f"the master {name!r} (from {reason}) does not resolve on {socket.gethostname()}: "
            "set MASTER_ADDR to an address or a name that every host knows"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 where there is a choice
    return str(found[0][4][0])
