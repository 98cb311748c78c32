"""Pairs of memory: where bytes lie before they are copied or read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tutti.bench.pairs.pair import Pair, Setting
from tutti.bench.pairs.unified_memory import through_pinned_copies, through_unified_memory
from tutti.machine.cpu_numa import allowed_cpus, numa_nodes

_BYTES, _QUICK_BYTES = 64 << 20, 1 << 20


def pinned(setting: Setting) -> Pair:
    """The GPU reads pinned memory itself; pageable memory is first copied into some that is."""
    setting.need(setting.on_gpu, "copies to a GPU need a GPU: use --device cuda")
    pageable = _numbers(setting)
    locked = pageable.pin_memory()
    targets = [torch.empty_like(pageable, device=setting.device) for _ in range(2)]
    return Pair(
        baseline=lambda: targets[0].copy_(pageable),
        optimized=lambda: targets[1].copy_(locked, non_blocking=True),
        reason=_about(pageable),
    )


def unified(setting: Setting) -> Pair:
    """The same work on the GPU: copied there and back, or where pages come as they are touched."""
    setting.need(setting.on_gpu, "unified memory is a GPU's: use --device cuda")
    data = _numbers(setting)

    def work(on_gpu: Tensor) -> Tensor:
        return on_gpu * 2 + 1

    return Pair(
        baseline=partial(through_pinned_copies, data, work),
        optimized=partial(through_unified_memory, data, work, prefetch=True),
        reason=f"{_about(data)} there and back; unified memory is prefetched",
    )


def placement(setting: Setting) -> Pair:
    """What it costs when memory is on the other side of the host."""
    nodes = {node: cpus for node, cpus in numa_nodes().items() if _may_use(cpus)}
    setting.need(
        len(nodes) > 1,
        "a remote place needs two NUMA nodes whose CPUs this process may use, and here "
        f"{'is' if len(nodes) == 1 else 'are'} {len(nodes)}",
    )
    # Ranks are bound to CPUs near their device.
    near = max(nodes, key=lambda node: len(set(allowed_cpus()) & set(nodes[node])))
    far = next(node for node in nodes if node != near)
    places = {}
    for node in (near, far):
        with _on(nodes[node]):
            places[node] = _numbers(setting)
            if setting.on_gpu:
                places[node] = places[node].pin_memory()
    target = torch.empty_like(places[near], device=setting.device)

    def read(node: int) -> Tensor:
        return target.copy_(places[node], non_blocking=True)

    return Pair(
        baseline=partial(read, near),
        optimized=partial(read, far),
        reason=f"{_about(target)} from NUMA node {near}, then {far}; below 1 is what it costs",
    )


def _numbers(setting: Setting) -> Tensor:
    """Numbers in host memory, written by this thread alone: pages lie where their writer runs."""
    count = setting.pick(_BYTES, _QUICK_BYTES) // 4
    return torch.from_numpy(np.arange(count, dtype=np.float32))


def _about(tensor: Tensor) -> str:
    return f"{tensor.nbytes >> 20} MiB"


def _may_use(cpus: tuple[int, ...]) -> bool:
    try:
        with _on(cpus):
            return True
    except OSError:  # the container's set has none of them
        return False


@contextmanager
def _on(cpus: tuple[int, ...]) -> Iterator[None]:
    """This thread on these CPUs, until the end."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
