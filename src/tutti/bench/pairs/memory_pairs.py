"""Compares memory techniques with their baselines: pinned memory, unified memory, NUMA placement.

Unified memory (cudaMallocManaged) has the same address on the CPU and on the GPU. Each page
migrates in a page fault at its first access, unless it is prefetched. Explicit copies to and from
page-locked (pinned) memory run at the full speed of the link.
"""

import ctypes
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.bench.pairs import Pair, Setting
from tutti.machine.cpu_numa import allowed_cpus, numa_nodes
from tutti.world.errors import UsageError

Work = Callable[[Tensor], Tensor]
_BYTES, _QUICK_BYTES = 64 << 20, 1 << 20


def pinned(setting: Setting) -> Pair:
    """Compare copies to the GPU from pageable memory and from pinned memory.

    CUDA copies pageable memory to a pinned buffer before the transfer. The GPU reads pinned memory
    directly.
    """
    setting.need(setting.on_gpu, "copies to a GPU need a GPU: use --device cuda")
    pageable = _host_tensor(setting)
    pinned = pageable.pin_memory()
    targets = [torch.empty_like(pageable, device=setting.device) for _ in range(2)]
    return Pair(
        baseline=lambda: targets[0].copy_(pageable),
        optimized=lambda: targets[1].copy_(pinned, non_blocking=True),
        reason=f"{pageable.nbytes >> 20} MiB",
    )


def unified(setting: Setting) -> Pair:
    """Compare explicit copies with prefetched unified memory. The work on the GPU is the same."""
    setting.need(setting.on_gpu, "unified memory needs a GPU: use --device cuda")
    data = _host_tensor(setting)

    def work(on_gpu: Tensor) -> Tensor:
        return on_gpu * 2 + 1

    return Pair(
        baseline=partial(through_pinned_copies, data, work),
        optimized=partial(through_unified_memory, data, work),
        reason=f"{data.nbytes >> 20} MiB to the GPU and back; unified memory is prefetched",
    )


def placement(setting: Setting) -> Pair:
    """Compare copies from memory on this rank's NUMA node with copies from another NUMA node."""
    nodes = {node: cpus for node, cpus in numa_nodes().items() if _can_run_on(cpus)}
    setting.need(len(nodes) > 1, "placement needs two NUMA nodes on whose CPUs this rank can run")
    # A rank is pinned to CPUs near its device, so the node with most of its CPUs is the near node.
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
        reason=f"{target.nbytes >> 20} MiB from NUMA node {near} → from node {far}",
    )


def _host_tensor(setting: Setting) -> Tensor:
    # The kernel places a page on the NUMA node of the thread that first writes to the page. numpy
    # writes all elements in this thread, so the whole tensor is on the thread's NUMA node.
    count = setting.pick(_BYTES, _QUICK_BYTES) // 4
    return torch.from_numpy(np.arange(count, dtype=np.float32))


def _can_run_on(cpus: tuple[int, ...]) -> bool:
    try:
        with _running_on(cpus):
            return True
    except OSError:  # none of these CPUs is in the container's cpuset
        return False


@contextmanager
def _running_on(cpus: tuple[int, ...]) -> Iterator[None]:
    """Run this thread on these CPUs inside the `with` block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- Unified memory ----


def through_unified_memory(data: Tensor, work: Work) -> Tensor:
    """Copy `data` to unified memory, run `work` on the GPU, and return the result on the CPU.

    The pages are prefetched, so they migrate before the first access instead of in page faults.
    """
    source = Managed(data.shape, data.dtype)
    source.on_cpu.copy_(data)
    source.prefetch(to_gpu=True)
    result = work(source.on_gpu)
    target = Managed(result.shape, result.dtype)
    target.on_gpu.copy_(result)
    target.prefetch(to_gpu=False)
    torch.cuda.current_stream().synchronize()
    return target.on_cpu.clone()


def through_pinned_copies(data: Tensor, work: Work) -> Tensor:
    """Copy `data` to the GPU, run `work`, and return the result on the CPU.

    Both copies use page-locked memory. torch caches page-locked memory, so an allocation takes
    only microseconds after the first call.
    """
    staged = torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)
    result = work(staged.to("cuda", non_blocking=True))
    target = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    target.copy_(result, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return target.clone()


class Managed:
    """A block of unified memory, as a CPU tensor (`on_cpu`) and as a GPU tensor (`on_gpu`).

    The memory is freed when both tensors and this object have been deleted. The caller must
    synchronize with the GPU before the CPU reads data that the GPU wrote.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        self._block = block = _Block(max(size, 1))
        array = (ctypes.c_ubyte * block.bytes).from_address(block.address)
        array._owner = block  # type: ignore[attr-defined]
        raw_cpu = torch.frombuffer(array, dtype=torch.uint8)[:size]
        raw_gpu = torch.as_tensor(block, device=f"cuda:{block.device}")[:size]
        self.on_cpu = raw_cpu.view(dtype).view(tuple(shape))
        self.on_gpu = raw_gpu.view(dtype).view(tuple(shape))

    def prefetch(self, to_gpu: bool) -> None:
        """Migrate the pages to the GPU or to the CPU, on the current stream."""
        block = self._block
        pointer, count = ctypes.c_void_p(block.address), ctypes.c_size_t(block.bytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        place: tuple[Any, ...]
        # From CUDA 13 on, cudaMemPrefetchAsync takes a location and flags, not a device number.
        if int(str(torch.version.cuda).split(".")[0]) >= 13:
            place = (_Location(*((1, block.device) if to_gpu else (2, 0))), ctypes.c_uint(0))
        else:
            place = (ctypes.c_int(block.device if to_gpu else -1),)
        _check(_cudart().cudaMemPrefetchAsync(pointer, count, *place, stream), block.bytes)


class _Block:
    """Memory from cudaMallocManaged. It is freed when this object is deleted.

    The GPU tensor and the ctypes array of the CPU tensor hold references to this object.
    """

    def __init__(self, size: int) -> None:
        if not torch.cuda.is_available():
            raise UsageError("unified memory needs a GPU, but no GPU is visible")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.cuda.current_device()
        self.bytes = size
        pointer, count = ctypes.c_void_p(), ctypes.c_size_t(size)
        # 1 is cudaMemAttachGlobal.
        _check(_cudart().cudaMallocManaged(ctypes.byref(pointer), count, 1), size)
        assert pointer.value is not None
        self.address = pointer.value
        weakref.finalize(self, _cudart().cudaFree, pointer).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        array = {"shape": (self.bytes,), "typestr": "|u1", "data": (self.address, False)}
        return {**array, "version": 3, "strides": None}


class _Location(ctypes.Structure):
    """The struct cudaMemLocation. Type 1 is a device, and type 2 is the host."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def _check(code: int, size: int) -> None:
    if code != 0:
        message = _cudart().cudaGetErrorString
        message.restype = ctypes.c_char_p
        raise UsageError(f"a unified-memory call for {size} bytes failed: {message(code).decode()}")


@cache
def _cudart() -> ctypes.CDLL:
    """Return the CUDA runtime library that torch has loaded.

    A second copy of the library would have separate state.
    """
    found = re.search(r"(/\S*libcudart[^/\s]*\.so\S*)", Path("/proc/self/maps").read_text())
    if found is None:
        raise UsageError(
            "unified memory needs libcudart as a shared library, but torch has not loaded one"
        )
    return ctypes.CDLL(found[1])
