"""The one place where ranks first meet: a key-value store on rank 0's host.

torch's TCPStore listens on every interface, whatever host it is given, and answers anybody. So
rank 0 binds the socket itself, to loopback when the world is on one host, and hands it over.
"""

import importlib.util
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
from tutti.world.addresses import free_port, local_address_towards, port_candidates
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.launchers import Identity

_PROBE_SECONDS = 1.0
_HANDSHAKE_SECONDS = 5.0


@dataclass(frozen=True)
class Rendezvous:
    """An open store, and where it listens."""

    store: dist.Store
    host: str
    port: int
    is_host: bool
    reason: str


def open_rendezvous(identity: Identity, timeout: float) -> Rendezvous:
    """Open the store that all ranks of this world share, within `timeout` seconds."""
    if identity.size == 1 and not identity.agent_store:
        return Rendezvous(dist.HashStore(), "", 0, True, "a world of one needs no port")
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


def _host(identity: Identity, name: str, reason: str, timeout: float) -> Rendezvous:
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
    return Rendezvous(store, address, port, True, reason)


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


def _join(identity: Identity, address: str, reason: str, deadline: float) -> Rendezvous:
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
                return Rendezvous(store, address, port, False, reason)
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


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself at the roll call. Travels as JSON, never as a pickle."""

    rank: int
    host: str
    # Ranks with the same machine share memory and loopback; a container or a network namespace
    # of its own counts as another machine, since its loopback is another one.
    machine: str
    address: str
    # Where rank 0 waits for the others' lines; 0 on other ranks.
    liveness_port: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    gpus: tuple[str, ...]
    cpus: str
    versions: dict[str, str]
    # Whether torch knows the shared-memory backend here: all ranks must use the same one.
    shm: bool
    token: str


@dataclass(frozen=True)
class Roster:
    """All answers, in rank order, and the name of this start of the world."""

    ranks: tuple[RankInfo, ...]
    start_id: str


def describe_rank(
    identity: Identity, address: str, gpus: Sequence[str], liveness_port: int = 0
) -> RankInfo:
    """What this process says of itself."""
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
        versions=versions() | {"torch": torch.__version__},  # with its CUDA
        shm=has_shm(),
        token=uuid.uuid4().hex,
    )


def has_shm() -> bool:
    """Whether torch knows the shared-memory backend here, and its compiled core is installed."""
    known = "shm" in dist.Backend.backend_list
    return known and importlib.util.find_spec("tutti.comm.shm._core") is not None


def exchange_rank_info(store: dist.Store, answer: RankInfo, size: int, timeout: float) -> Roster:
    """Exchange answers with all ranks; returns the same Roster everywhere."""
    patience = _Patience(store, size, timeout)
    try:
        store.set(f"tutti/answer/{answer.rank}", json.dumps(asdict(answer)))
        return (
            _lead(store, size, patience) if answer.rank == 0 else _follow(store, answer, patience)
        )
    except RuntimeError:
        raise UsageError(
            "rank 0, or its host, went away at the roll call: see its output"
        ) from None


class _Patience:
    """Waits a little between two looks at the store, and says who is missing when time is up."""

    def __init__(self, store: dist.Store, size: int, timeout: float) -> None:
        self.store = store
        self.answers = [f"tutti/answer/{rank}" for rank in range(size)]
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        # One store answers all ranks: the more they are, the less often each may ask.
        self.interval = 0.02 * (1 + size / 64)

    def pause(self, waiting_for: Sequence[str] = ()) -> None:
        if time.monotonic() < self.deadline:
            time.sleep(self.interval)
            return
        keys = waiting_for or self.answers
        missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
        raise UsageError(
            f"rank {', '.join(missing) or '0'} of {len(self.answers)} did not come to the roll "
            f"call within {self.timeout:g} s: see their output, or give --start-timeout more"
        )


def _lead(store: dist.Store, size: int, patience: _Patience) -> Roster:
    """Rank 0: publish a list, have it confirmed by all, publish again when an answer changed."""
    while not store.check(patience.answers):
        patience.pause()
    while True:
        texts = [text.decode() for text in store.multi_get(patience.answers)]
        start = uuid.uuid4().hex
        store.set(f"tutti/{start}/roll", json.dumps(texts))
        store.set("tutti/start", start)
        confirmations = [f"tutti/{start}/confirmed/{rank}" for rank in range(1, size)]
        next_look = time.monotonic() + 0.5
        while confirmations and not store.check(confirmations):
            patience.pause(confirmations)
            if time.monotonic() > next_look:
                if [text.decode() for text in store.multi_get(patience.answers)] != texts:
                    break
                next_look = time.monotonic() + 0.5
        else:
            store.set(f"tutti/{start}/complete", "yes")
            return _roll(start, texts)


def _follow(store: dist.Store, answer: RankInfo, patience: _Patience) -> Roster:
    """Other ranks: confirm the first list that holds this very answer, wait until all have."""
    while not store.check(["tutti/start"]):
        patience.pause()
    while True:
        start = store.get("tutti/start").decode()
        texts = json.loads(store.get(f"tutti/{start}/roll"))
        mine = answer.rank < len(texts) and json.loads(texts[answer.rank])["token"] == answer.token
        if mine:
            store.set(f"tutti/{start}/confirmed/{answer.rank}", "yes")
        # A list from before a restart holds another token: rank 0 will write a new one.
        while store.get("tutti/start").decode() == start:
            if mine and store.check([f"tutti/{start}/complete"]):
                return _roll(start, texts)
            patience.pause()


def _roll(start: str, texts: Sequence[str]) -> Roster:
    answers = []
    for text in texts:
        fields = json.loads(text)
        answers.append(RankInfo(**{**fields, "gpus": tuple(fields["gpus"])}))
    return Roster(tuple(answers), start)


def refuse_different_versions(answers: Sequence[RankInfo]) -> None:
    """Raise RanksDiffer, naming the odd rank out, unless all ranks run the same versions."""
    for name in sorted({name for answer in answers for name in answer.versions}):
        by_rank = [answer.versions.get(name, "none") for answer in answers]
        usual, count = Counter(by_rank).most_common(1)[0]
        odd = [answer for answer, seen in zip(answers, by_rank, strict=True) if seen != usual]
        if odd:
            who = ", ".join(f"rank {a.rank} on {a.host} has {by_rank[a.rank]}" for a in odd[:4])
            more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
            raise RanksDiffer(
                f"ranks run different versions of {name}: {who}{more}, the other {count} "
                f"{usual}: install the same everywhere"
            )
