"""What a trace does not say by itself: who wrote it, on what, and which groups talked.

Like capture.py, this file imports torch and the standard library alone.
"""

import contextlib
import json
import os
import resource
import socket
from typing import Any

import torch
import torch.distributed as dist

# Entries of torch's flight recorder that go into a trace: it knows group and sequence number of
# every collective, which a gloo trace does not.
_RECORDER_ENTRIES = 20_000


def cuda_in_use() -> bool:
    """Whether the program has begun with CUDA: a look must not be the beginning."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """The GPU of its parameters; None if there is none."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return next((each.device for each in parameters if each.device.type == "cuda"), None)


def identity() -> tuple[int, int]:
    """This rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def surroundings() -> dict[str, Any]:
    """Host, memory, backend, threads, and the collectives of the flight recorder."""
    about: dict[str, Any] = {
        "backend": "none",
        "host": socket.gethostname(),  # torch's traces have it, too, but not in 2.11
        "host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "recorder": [],
        "threads": torch.get_num_threads(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    if cuda_in_use():
        about["device_memory_bytes"] = torch.cuda.max_memory_allocated()
    if dist.is_available() and dist.is_initialized():
        about["backend"] = dist.get_backend()
        with contextlib.suppress(Exception):  # the recorder is not a stable interface
            about["recorder"] = _recorded()
    return about


def _recorded() -> list[dict[str, Any]]:
    """The collectives of gloo groups, as the flight recorder has them, in short."""
    dump: Any = torch._C._distributed_c10d
    entries = json.loads(dump._dump_fr_trace_json()).get("entries", [])
    return [
        {
            "name": entry["profiling_name"],
            "group": str(entry["process_group"][0]),
            "seq": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "created_ns": entry["time_created_ns"],
        }
        for entry in entries[-_RECORDER_ENTRIES:]
        if str(entry["profiling_name"]).startswith("gloo:")
    ]
