"""`tutti.init()` joins the world and returns a World: this process's rank, device and backend."""

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.world import liveness, placement
from tutti.world.errors import (
    START_TIMEOUT,
    TIMEOUT,
    RanksDiffer,
    UsageError,
    checked_seconds,
    name_ranks,
)
from tutti.world.failure import FailureHandler, print_usage_errors
from tutti.world.launchers import identify
from tutti.world.rendezvous import (
    Rendezvous,
    Roster,
    describe_rank,
    exchange_rank_info,
    open_rendezvous,
    refuse_different_versions,
    shm_unavailable,
)

_NO_SHM = "shm is not available"


@dataclass(frozen=True)
class World:
    """The rank, device and backend of this process. `reasons` names the source of each value.

    Use a World as a context manager, so that the process group is destroyed after an exception too:

        with tutti.init() as world:
            model.to(world.device)
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    device: torch.device
    backend: str
    launcher: str
    master: str
    cpus: str
    threads: int
    ranks_on_device: int
    reasons: Mapping[str, str]
    # This reference keeps rank 0's store alive until the world ends.
    _rendezvous: Rendezvous = field(repr=False, compare=False)
    _failures: FailureHandler = field(repr=False, compare=False)
    # Environment variables that `init` has set for the backends. `close` removes them.
    _variables: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    @property
    def sharing_note(self) -> str | None:
        """The note to print with all results if ranks share a GPU, or None if no ranks do."""
        if self.ranks_on_device < 2:
            return None
        return (
            f"{self.ranks_on_device} ranks share one GPU: results show correctness and software "
            "overhead, not the speed of links between GPUs"
        )

    def row(self) -> dict[str, Any]:
        """Return this rank's row for tables and JSON."""
        names = ("rank", "local_rank", "node", "host", "backend", "launcher", "cpus", "threads")
        values = {name: getattr(self, name) for name in (*names, "ranks_on_device")}
        return values | {"device": str(self.device), "reasons": dict(self.reasons)}

    def close(self) -> None:
        """Leave the world and destroy the process group. A second call does nothing."""
        atexit.unregister(self.close)
        if dist.is_initialized():  # False if the script has destroyed the process group
            if self._failures.failed and self.device.type == "cuda":
                # destroy_process_group would wait for peers that have ended.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
                liveness.wait_for_gloo_threads()
        self._failures.stop()
        for name in self._variables:
            os.environ.pop(name, None)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        normal_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        # A BrokenPipeError means that the reader of the output has ended (`tutti world | head`).
        if error is not None and not normal_exit and not isinstance(error, BrokenPipeError):
            self._failures.handle(error)
        self.close()


def init(
    *,
    device: str = "auto",
    backend: str | None = None,
    ranks_per_gpu: int | None = None,
    bind_cpus: bool = True,
    start_timeout: float | None = None,
    timeout: float | None = None,
) -> World:
    """Join the world that the launcher started. Without a launcher, create a world of one rank.

    `device` is "auto", "cpu" or "cuda". The default `backend` is "nccl" on CUDA. On the CPU, it is
    "shm" (shared memory inside a host, gloo between hosts), or "gloo" if shm is not available.
    `ranks_per_gpu` is the maximum number of ranks that share a GPU. `bind_cpus=False` leaves the
    CPU affinity and the number of threads unchanged. `start_timeout` is the time limit in seconds
    for all ranks to start. `timeout` is the time limit in seconds of a collective. In a rank that
    `tutti run` started, the flags of `tutti run` are the defaults of `ranks_per_gpu`,
    `start_timeout` and `timeout`.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is already initialised in this process. Call tutti.init() once, "
            "instead of init_process_group()."
        )
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda, got {device!r}")
    hook = sys.excepthook
    sys.excepthook = print_usage_errors(hook)
    env = os.environ
    start_timeout = _seconds("start_timeout", start_timeout, START_TIMEOUT)
    timeout = _seconds("timeout", timeout, TIMEOUT)
    if ranks_per_gpu is None:
        ranks_per_gpu = int(env.get("TUTTI_RANKS_PER_GPU", "1"))
    if ranks_per_gpu < 1:
        raise UsageError(f"ranks_per_gpu must be at least 1, got {ranks_per_gpu}")
    _check_backend(backend)

    identity = identify(env)
    rank = identity.rank
    rendezvous = open_rendezvous(identity, start_timeout)
    address = liveness.local_address_towards(rendezvous.host) if rendezvous.host else None
    gpus = [] if device == "cpu" else placement.visible_gpus()
    listener = None
    if rank == 0 and identity.size > 1:
        # Listen on loopback unless other hosts must connect.
        reachable = "" if address is None or address.startswith("127.") else address
        one_host = identity.local_size == identity.size
        listener = liveness.open_listener("127.0.0.1" if one_host else reachable)
    port = listener.getsockname()[1] if listener else 0
    info = describe_rank(identity, address or "", gpus, port)
    roster = exchange_rank_info(rendezvous.store, info, identity.size, start_timeout)
    try:
        refuse_different_versions(roster.ranks)
        places = placement.place(roster.ranks, device, ranks_per_gpu)
    except (UsageError, RanksDiffer):
        # All ranks have the same roster and find the same error, so only rank 0 prints it.
        if rank != 0:
            raise SystemExit(2) from None
        if identity.size > 1:
            time.sleep(0.5)  # other ranks may still read the store, which ends with rank 0
        raise
    place = places[rank]

    counted = ("local_rank", "local_size", "node", "nodes")
    reasons = dict.fromkeys(counted, "counted per machine at the rendezvous")
    reasons |= identity.reasons
    reasons |= {"host": "gethostname", "master": rendezvous.reason}
    reasons["device"] = "requested" if device == "cpu" else "no GPU is visible"
    torch_device = torch.device("cpu")
    if place.gpu is not None:
        torch_device = torch.device("cuda", place.gpu)
        reasons["device"] = f"GPU {place.gpu} of {len(info.gpus)} visible"
    reasons["backend"] = "requested"
    if backend is None:
        backend, reasons["backend"] = _default_backend(torch_device, roster)
    variables: dict[str, str] = {}  # environment variables to set for the backends
    # shm uses gloo between hosts. nccl uses gloo for CPU tensors.
    if backend == "nccl" or "gloo" in backend or "shm" in backend:
        interface, reasons["gloo_interface"] = placement.gloo_interface(roster.ranks, rank, env)
        if interface:
            variables["GLOO_SOCKET_IFNAME"] = interface
    if backend == "shm":
        variables["DDP_DISABLE_COMM_MEM"] = "0"  # lets DDP allocate its buckets in shared memory
    if max(place.ranks_on_gpu for place in places) > 1:
        from tutti.world.gpu_sharing import shared_gpu_variables

        one_machine = len({place.machine for place in places}) == 1
        variables |= shared_gpu_variables(rank, one_machine)
    variables = {name: value for name, value in variables.items() if name not in env}
    env.update(variables)
    if bind_cpus:
        cpus, threads, binding_reasons = placement.bind(roster.ranks, place, env)
    else:
        cpus, threads = info.cpus, torch.get_num_threads()
        binding_reasons = dict.fromkeys(("cpus", "threads"), "bind_cpus=False")
    report = env.get("TUTTI_REPORT")
    failures = FailureHandler(rank, info.host, Path(report) if report else None)
    world = World(
        rank=rank,
        size=identity.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node=place.node,
        nodes=len({place.node for place in places}),
        host=place.host,
        device=torch_device,
        backend=backend,
        launcher=identity.launcher,
        master=f"{rendezvous.host}:{rendezvous.port}" if rendezvous.port else "",
        cpus=cpus,
        threads=threads,
        ranks_on_device=max(1, place.ranks_on_gpu),
        reasons=reasons | binding_reasons,
        _variables=tuple(variables),
        _rendezvous=rendezvous,
        _failures=failures,
    )
    if world.size > 1:
        failures.liveness = _open_liveness(
            listener, rendezvous.host, roster, rank, failures.on_failure, start_timeout
        )
    atexit.register(world.close)

    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    else:
        placement.disable_malloc_trim(env)
    dist.init_process_group(
        # NCCL supports only CUDA tensors. gloo is used for small CPU tensors.
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=dist.PrefixStore(f"tutti/{roster.start_id}/torch", rendezvous.store),
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=torch_device if torch_device.type == "cuda" else None,
    )
    failures.install_hook(hook)
    if world.is_first:
        if reasons["backend"].startswith(_NO_SHM):
            print(f"note: the backend is gloo, because {reasons['backend']}", file=sys.stderr)
        if world.sharing_note:
            print(f"note: {world.sharing_note}", file=sys.stderr)
    return world


def _seconds(name: str, argument: float | None, default: float) -> float:
    if argument is not None:
        return checked_seconds(name, argument)
    variable = f"TUTTI_{name.upper()}"
    return checked_seconds(variable, os.environ.get(variable, default))


def _check_backend(backend: str | None) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend='nccl' needs a GPU, but no GPU is visible. Use shm or gloo.")
    if backend not in (None, "nccl", "gloo", "shm") and ":" not in backend:
        raise UsageError(f"backend must be nccl, shm, gloo or None, got {backend!r}")
    if backend is not None and "shm" in backend and (reason := shm_unavailable()):
        raise UsageError(
            f"backend={backend!r}: {_NO_SHM} ({reason}). Solve this problem, or use backend='gloo'."
        )


def _default_backend(device: torch.device, roster: Roster) -> tuple[str, str]:
    if device.type == "cuda":
        return "nccl", "the default on cuda"
    without = [info.rank for info in roster.ranks if not info.shm]
    if not without:
        return "shm", "the default on cpu"
    reason = shm_unavailable() or "tutti.comm.shm.available() on these ranks returns the reason"
    return "gloo", f"{_NO_SHM} on {name_ranks(without[:4])} ({reason})"


def _open_liveness(
    listener: socket.socket | None,
    store_host: str,
    roster: Roster,
    rank: int,
    on_failure: Callable[[liveness.Failure], None],
    timeout: float,
) -> liveness.Liveness:
    hosts = [info.host for info in roster.ranks]
    if listener is not None:
        hub = liveness.Liveness(rank, hosts, roster.start_id, on_failure, listener=listener)
        if not hub.wait_until_all_connected(timeout):
            raise UsageError(
                "a rank ended after the rendezvous, before it connected to rank 0. See the output "
                "of all ranks."
            )
        return hub
    first = roster.ranks[0]
    same_machine = first.machine == roster.ranks[rank].machine
    # If rank 0 has published a loopback address, use the address of the store.
    host = store_host if same_machine or first.address.startswith("127.") else first.address
    try:
        address = (host, first.liveness_port)
        return liveness.Liveness(rank, hosts, roster.start_id, on_failure, address=address)
    except OSError as error:
        raise UsageError(
            f"rank {rank} could not connect to rank 0 at {host} port {first.liveness_port} "
            f"({error}). Check whether a firewall between the hosts blocks connections."
        ) from None
