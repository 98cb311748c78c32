"""World: who this process is among all the others, as one frozen value."""

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.world.liveness import wait_for_gloo_threads

if TYPE_CHECKING:
    from tutti.world.failure import Watch
    from tutti.world.rendezvous import Rendezvous
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from tutti.world.addresses import gloo_interface, local_address_towards
from tutti.world.errors import START_TIMEOUT, TIMEOUT, RanksDiffer, UsageError, checked_seconds
from tutti.world.failure import Watch, one_line_for_mistakes
from tutti.world.gpu_sharing import shared_gpu_variables
from tutti.world.launchers import Identity, identify
from tutti.world.liveness import Liveness, open_listener
from tutti.world.placement import Place, bind, keep_freed_memory, place, visible_gpus
from tutti.world.rendezvous import (
    Rendezvous,
    Roster,
    describe_rank,
    exchange_rank_info,
    has_shm,
    open_rendezvous,
    refuse_different_versions,
)


@dataclass(frozen=True)
class World:
    """Who this process is. `reasons` says for every value where it came from.

    Use it as a context manager, so that the process group is torn down whatever happens:

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
    # The store of rank 0 must live as long as the world does, and so must its watch.
    _meeting: "Rendezvous" = field(repr=False, compare=False)
    _watch: "Watch" = field(repr=False, compare=False)
    # The environment variables that were set for this world's backends, and end with it.
    _variables: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes for all."""
        return self.rank == 0

    @property
    def sharing_note(self) -> str | None:
        """What every output must say when ranks share a GPU; None when they do not."""
        if self.ranks_on_device < 2:
            return None
        return (
            f"{self.ranks_on_device} ranks share one GPU: figures show correctness and software "
            "overhead, not links between GPUs"
        )

    def row(self) -> dict[str, Any]:
        """This rank's row for tables and JSON."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "node": self.node,
            "host": self.host,
            "device": str(self.device),
            "backend": self.backend,
            "launcher": self.launcher,
            "cpus": self.cpus,
            "threads": self.threads,
            "ranks_on_device": self.ranks_on_device,
            "reasons": dict(self.reasons),
        }

    def close(self) -> None:
        """Leave the world: tear the process group down. Safe to call twice."""
        atexit.unregister(self.close)
        if dist.is_initialized():  # unless the script has torn it down itself
            if self._watch.failed and self.device.type == "cuda":
                # An orderly end would wait for peers that will never come.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
                wait_for_gloo_threads()
        self._watch.stop()
        for name in self._variables:
            os.environ.pop(name, None)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        # A reader that has gone (`tutti world | head`) is no failure either.
        well = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not well and not isinstance(error, BrokenPipeError):
            self._watch.handle(error)
        self.close()


_NO_SHM = "the shared-memory library is missing (it needs a C compiler at installation)"


def init(
    *,
    device: str = "auto",
    backend: str | None = None,
    ranks_per_gpu: int | None = None,
    bind_cpus: bool = True,
    start_timeout: float | None = None,
    timeout: float | None = None,
) -> World:
    """Join the world that the launcher started, or make a world of one.

    device: auto, cpu or cuda. backend: unless given, nccl on CUDA, and on CPU shm (shared memory
    inside a host, gloo between hosts), or gloo where shm is not installed.
    ranks_per_gpu: how many ranks may share a GPU. Timeouts are in seconds: `start_timeout` for
    all ranks to arrive, `timeout` for a collective. What is not given here comes from the
    launcher's flags (`tutti run --timeout …`), else from the defaults.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is already initialised in this process: call tutti.init() once, "
            "and in place of init_process_group()"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device={device!r} is not known: use auto, cpu or cuda")
    hook = sys.excepthook
    sys.excepthook = one_line_for_mistakes(hook)
    env = os.environ
    start_timeout = _seconds("start_timeout", start_timeout, START_TIMEOUT, env)
    timeout = _seconds("timeout", timeout, TIMEOUT, env)
    if ranks_per_gpu is None:
        ranks_per_gpu = int(env.get("TUTTI_RANKS_PER_GPU", "1"))
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend='nccl' needs a GPU, and none is visible: leave it out")
    if backend is not None and backend not in ("nccl", "gloo", "shm") and ":" not in backend:
        raise UsageError(
            f"backend={backend!r} is not known: use nccl, shm or gloo, or leave it out"
        )
    if backend is not None and "shm" in backend and not has_shm():
        raise UsageError(f"backend={backend!r}: {_NO_SHM}: install tutti again where there is one")

    identity = identify(env)
    meeting = open_rendezvous(identity, start_timeout)
    address = local_address_towards(meeting.host) if meeting.host else None
    gpus = [] if device == "cpu" else visible_gpus()
    listener = None
    if identity.rank == 0 and identity.size > 1:
        listener = open_listener(_lines_address(identity, address))
    port = listener.getsockname()[1] if listener else 0
    answer = describe_rank(identity, address or "", gpus, port)
    roll = exchange_rank_info(meeting.store, answer, identity.size, start_timeout)
    places = _places(roll, identity, device, ranks_per_gpu)
    report = env.get("TUTTI_REPORT")
    watch = Watch(identity.rank, answer.host, Path(report) if report else None)
    asked_for_cpu = device == "cpu"
    world = _world(identity, meeting, roll, places, backend, bind_cpus, env, watch, asked_for_cpu)
    if world.size > 1:
        watch.start(_open_lines(listener, meeting, roll, identity.rank, watch, start_timeout))
    atexit.register(world.close)

    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    else:
        keep_freed_memory(env)
    dist.init_process_group(
        backend=_torch_backend(world.backend),
        store=dist.PrefixStore(f"tutti/{roll.start_id}/torch", meeting.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=world.device if world.device.type == "cuda" else None,
    )
    watch.take_uncaught(hook)
    if world.sharing_note and world.is_first:
        print(f"note: {world.sharing_note}", file=sys.stderr)
    return world


def _seconds(name: str, given: float | None, default: float, env: Mapping[str, str]) -> float:
    variable = f"TUTTI_{name.upper()}"
    if given is not None:
        return checked_seconds(f"{name} =", given)
    return checked_seconds(f"{variable} =", env.get(variable, default))


def _lines_address(identity: Identity, address: str | None) -> str:
    """Where rank 0 listens for the others' lines: loopback, unless other hosts must reach it."""
    if identity.local_size == identity.size:
        return "127.0.0.1"
    return "" if address is None or address.startswith("127.") else address


def _open_lines(
    listener: socket.socket | None,
    meeting: Rendezvous,
    roll: Roster,
    rank: int,
    watch: Watch,
    timeout: float,
) -> Liveness:
    hosts = [answer.host for answer in roll.ranks]
    if listener is not None:
        lines = Liveness.hub(listener, hosts, roll.start_id, watch.on_failure)
        if not lines.all_have_called(timeout):
            raise UsageError("a rank went away between the roll call and the start: see its output")
        return lines
    hub = roll.ranks[0]
    near = hub.machine == roll.ranks[rank].machine
    # Rank 0 may know itself by loopback only; then the store, which it hosts, is where it is.
    host = meeting.host if near or hub.address.startswith("127.") else hub.address
    try:
        return Liveness.member(
            rank, (host, hub.liveness_port), hosts, roll.start_id, watch.on_failure
        )
    except OSError as error:
        raise UsageError(
            f"rank {rank} could not call rank 0 at {host} port {hub.liveness_port}: {error}: does "
            "a firewall between the hosts let connections through?"
        ) from None


def _torch_backend(backend: str) -> str:
    # NCCL moves CUDA tensors only; gloo beside it serves small values on the CPU.
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def _default_backend(device: torch.device, roll: Roster) -> tuple[str, str]:
    if device.type == "cuda":
        return "nccl", "the default on cuda"
    without = [answer.rank for answer in roll.ranks if not answer.shm]
    if not without:
        return "shm", "the default on cpu"
    return "gloo", f"on rank {', '.join(map(str, without[:4]))} {_NO_SHM}"


def _places(roll: Roster, identity: Identity, device: str, ranks_per_gpu: int) -> list[Place]:
    try:
        refuse_different_versions(roll.ranks)
        return place(roll.ranks, device, ranks_per_gpu)
    except (UsageError, RanksDiffer):
        # Every rank finds the same fault in the same roll: rank 0 speaks for all.
        if identity.rank != 0:
            raise SystemExit(2) from None
        if identity.size > 1:
            time.sleep(0.5)  # the store goes with this rank: let the others read the roll first
        raise


def _world(
    identity: Identity,
    meeting: Rendezvous,
    roll: Roster,
    places: list[Place],
    backend: str | None,
    bind_cpus: bool,
    env: Mapping[str, str],
    watch: Watch,
    asked_for_cpu: bool,
) -> World:
    variables: dict[str, str] = {}  # what the backends must be told, as long as this world lives
    mine = places[identity.rank]
    nodes = len({place.node for place in places})
    reasons = dict.fromkeys(("local_rank", "local_size", "node", "nodes"), "roll call")
    reasons |= identity.reasons
    reasons["host"] = "gethostname"
    reasons["master"] = meeting.reason
    if mine.gpu is None:
        device = torch.device("cpu")
        reasons["device"] = "asked for" if asked_for_cpu else "no GPU is visible"
    else:
        device = torch.device("cuda", mine.gpu)
        reasons["device"] = f"GPU {mine.gpu} of {len(roll.ranks[mine.rank].gpus)} visible"
    reasons["backend"] = "asked for"
    if backend is None:
        backend, reasons["backend"] = _default_backend(device, roll)
    # Between hosts shm speaks gloo.
    if "gloo" in _torch_backend(backend) or "shm" in backend:
        interface, reasons["gloo_interface"] = gloo_interface(roll.ranks, identity.rank, env)
        if interface:
            variables["GLOO_SOCKET_IFNAME"] = interface
    if backend == "shm" and "DDP_DISABLE_COMM_MEM" not in env:
        variables["DDP_DISABLE_COMM_MEM"] = "0"  # DDP's buckets where peers can reduce them
    if max(place.ranks_on_gpu for place in places) > 1:
        one_machine = len({place.machine for place in places}) == 1
        shared = shared_gpu_variables(identity.rank, one_machine)
        variables |= {name: value for name, value in shared.items() if name not in env}
    os.environ.update(variables)
    if bind_cpus:
        binding = bind(roll.ranks, places, identity.rank, env)
        cpus, threads = binding.cpus, binding.threads
        reasons |= {"cpus": binding.cpus_reason, "threads": binding.threads_reason}
    else:
        cpus, threads = roll.ranks[mine.rank].cpus, torch.get_num_threads()
        reasons |= {"cpus": "bind_cpus=False", "threads": "bind_cpus=False"}
    return World(
        rank=identity.rank,
        size=identity.size,
        local_rank=mine.local_rank,
        local_size=mine.local_size,
        node=mine.node,
        nodes=nodes,
        host=mine.host,
        device=device,
        backend=backend,
        launcher=identity.launcher,
        master=f"{meeting.host}:{meeting.port}" if meeting.port else "",
        cpus=cpus,
        threads=threads,
        ranks_on_device=max(1, mine.ranks_on_gpu),
        reasons=reasons,
        _variables=tuple(variables),
        _meeting=meeting,
        _watch=watch,
    )
