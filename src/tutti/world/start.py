"""tutti.init(): from whatever launcher started this process to a working world."""

import atexit
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tutti.world.binding import bind, visible_gpus
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.failure import Watch, one_line_for_mistakes, say_farewell
from tutti.world.gpu_sharing import shared_gpu_variables
from tutti.world.identity import Identity, identify
from tutti.world.network import gloo_interface, local_address_towards
from tutti.world.placement import Place, place
from tutti.world.rendezvous import Meeting, meet
from tutti.world.rollcall import Roll, answer_for, call_roll
from tutti.world.world import World

# Ranks of a large job may start minutes apart (images to pull, file systems to mount).
START_TIMEOUT = 300.0
# Longer than any sane step or checkpoint; a rank that has died is noticed much sooner.
TIMEOUT = 600.0


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

    device: auto, cpu or cuda. backend: nccl on CUDA and gloo on CPU unless given.
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
    sys.excepthook = one_line_for_mistakes(sys.excepthook)
    env = os.environ
    start_timeout = start_timeout or float(env.get("TUTTI_START_TIMEOUT", START_TIMEOUT))
    timeout = timeout or float(env.get("TUTTI_TIMEOUT", TIMEOUT))
    ranks_per_gpu = ranks_per_gpu or int(env.get("TUTTI_RANKS_PER_GPU", "1"))

    identity = identify(env)
    meeting = meet(identity, start_timeout)
    address = local_address_towards(meeting.host) if meeting.host else None
    gpus = [] if device == "cpu" else visible_gpus()
    answer = answer_for(identity, address or "", gpus)
    roll = call_roll(meeting.store, answer, identity.size, start_timeout)
    places = _places(roll, meeting, identity, device, ranks_per_gpu)
    world = _world(identity, meeting, roll, places, backend, bind_cpus, env)

    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        if world.ranks_on_device > 1:
            os.environ.update(shared_gpu_variables(world.rank))
    dist.init_process_group(
        backend=_torch_backend(world.backend),
        store=dist.PrefixStore(f"tutti/{roll.start}/torch", meeting.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=world.device if world.device.type == "cuda" else None,
    )
    if world._watch is not None:
        world._watch.start()
    atexit.register(world.close)
    if world.sharing_note and world.is_first:
        print(f"note: {world.sharing_note}", file=sys.stderr)
    return world


def _torch_backend(backend: str) -> str:
    # NCCL moves CUDA tensors only; gloo beside it serves small values on the CPU.
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def _places(
    roll: Roll, meeting: Meeting, identity: Identity, device: str, ranks_per_gpu: int
) -> list[Place]:
    try:
        return place(roll.answers, device, ranks_per_gpu)
    except (UsageError, RanksDiffer):
        # Every rank finds the same fault in the same roll: rank 0 speaks for all.
        store = dist.PrefixStore(f"tutti/{roll.start}", meeting.store)
        say_farewell(store, identity.rank, identity.size, meeting.is_host)
        if identity.rank != 0:
            raise SystemExit(2) from None
        raise


def _world(
    identity: Identity,
    meeting: Meeting,
    roll: Roll,
    places: list[Place],
    backend: str | None,
    bind_cpus: bool,
    env: Mapping[str, str],
) -> World:
    mine = places[identity.rank]
    nodes = len({place.node for place in places})
    reasons = dict.fromkeys(("local_rank", "local_size", "node", "nodes"), "roll call")
    reasons |= identity.reasons
    reasons["host"] = "gethostname"
    reasons["master"] = meeting.reason
    if mine.gpu is None:
        device = torch.device("cpu")
        reasons["device"] = "no GPU is visible" if not roll.answers[mine.rank].gpus else "asked for"
    else:
        device = torch.device("cuda", mine.gpu)
        reasons["device"] = f"GPU {mine.gpu} of {len(roll.answers[mine.rank].gpus)} visible"
    reasons["backend"] = "asked for" if backend else f"the default on {device.type}"
    if backend is None:
        backend = "nccl" if device.type == "cuda" else "gloo"
    if "gloo" in _torch_backend(backend):
        interface, reasons["gloo_interface"] = gloo_interface(roll.answers, identity.rank, env)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if bind_cpus:
        binding = bind(roll.answers, places, identity.rank, env)
        cpus, threads = binding.cpus, binding.threads
        reasons |= {"cpus": binding.cpus_reason, "threads": binding.threads_reason}
    else:
        cpus, threads = roll.answers[mine.rank].cpus, torch.get_num_threads()
        reasons |= {"cpus": "bind_cpus=False", "threads": "bind_cpus=False"}
    report = env.get("TUTTI_REPORT")
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
        cpus=cpus,
        threads=threads,
        ranks_on_device=max(1, mine.ranks_on_gpu),
        reasons=reasons,
        _watch=None
        if identity.size == 1
        else Watch(meeting, roll, identity.rank, Path(report) if report else None),
    )
