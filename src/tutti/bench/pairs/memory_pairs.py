"""Pairs of memory: pageable or pinned, copied or unified, on the near or the far NUMA node."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tutti.bench.pairs import Pair, Setting
from tutti.bench.pairs.unified_memory import through_pinned_copies, through_unified_memory
from tutti.machine.cpu_numa import allowed_cpus, numa_nodes

_BYTES, _QUICK_BYTES = 64 << 20, 1 << 20


def pinned(setting: Setting) -> Pair:
    """The GPU reads pinned memory directly; pageable memory is first copied to a pinned buffer."""
    setting.need(setting.on_gpu, "copies to a GPU need a GPU: use --device cuda")
    pageable = _host_tensor(setting)
    pinned = pageable.pin_memory()
    targets = [torch.empty_like(pageable, device=setting.device) for _ in range(2)]
    return Pair(
        baseline=lambda: targets[0].copy_(pageable),
        optimized=lambda: targets[1].copy_(pinned, non_blocking=True),
        reason=_size_of(pageable),
    )


def unified(setting: Setting) -> Pair:
    """The same work on the GPU, with explicit copies or with pages that migrate on access."""
    setting.need(setting.on_gpu, "unified memory needs a GPU: use --device cuda")
    data = _host_tensor(setting)

    def work(on_gpu: Tensor) -> Tensor:
        return on_gpu * 2 + 1

    return Pair(
        baseline=partial(through_pinned_copies, data, work),
        optimized=partial(through_unified_memory, data, work, prefetch=True),
        reason=f"{_size_of(data)} to the GPU and back; unified memory is prefetched",
    )


def placement(setting: Setting) -> Pair:
    """The cost of memory on a remote NUMA node."""
    nodes = {node: cpus for node, cpus in numa_nodes().items() if _can_run_on(cpus)}
    setting.need(
        len(nodes) > 1,
        f"it needs two NUMA nodes with CPUs that this process may use, there are {len(nodes)}",
    )
    # Ranks are bound to CPUs near their device.
    near = max(nodes, key=lambda node: len(set(allowed_cpus()) & set(nodes[node])))
    far = next(node for node in nodes if node != near)
    sources = {}
    for node in (near, far):
        with _running_on(nodes[node]):
            sources[node] = _host_tensor(setting)
            if setting.on_gpu:
                sources[node] = sources[node].pin_memory()
    target = torch.empty_like(sources[near], device=setting.device)

    def read(node: int) -> Tensor:
        return target.copy_(sources[node], non_blocking=True)

    return Pair(
        baseline=partial(read, near),
        optimized=partial(read, far),
        reason=f"{_size_of(target)} from NUMA node {near}, then {far}; below 1 is the cost",
    )


def _host_tensor(setting: Setting) -> Tensor:
    """Written by this thread alone: the kernel places pages on the node of the first writer."""
    count = setting.pick(_BYTES, _QUICK_BYTES) // 4
    return torch.from_numpy(np.arange(count, dtype=np.float32))


def _size_of(tensor: Tensor) -> str:
    return f"{tensor.nbytes >> 20} MiB"


def _can_run_on(cpus: tuple[int, ...]) -> bool:
    try:
        with _running_on(cpus):
            return True
    except OSError:  # none of them is in the container's cpuset
        return False


@contextmanager
def _running_on(cpus: tuple[int, ...]) -> Iterator[None]:
    """This thread on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
