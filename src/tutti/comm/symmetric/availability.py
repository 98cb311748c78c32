"""Which kinds of symmetric memory this machine has, and why not the others."""

import importlib.util

import torch

from tutti.comm.symmetric import shm


def available(device: str | torch.device = "cpu") -> dict[str, tuple[bool, str]]:
    """For each backend of a device, whether it can be used here, and why: {"shm": (True, "…")}.

    On cpu there is shm, on cuda there are cuda and nvshmem.

    What only several ranks together can find out (whether they share a host or a GPU) is said by
    `Heap` itself.
    """
    if torch.device(device).type == "cpu":
        return {"shm": shm.available()}
    cuda = _cuda()
    return {"cuda": cuda, "nvshmem": _nvshmem() if cuda[0] else cuda}


def _cuda() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, "torch sees no NVIDIA GPU"
    if torch.version.hip is not None:
        return False, "this torch is built for ROCm, and the heap's kernels are for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return False, "signals and atomics are Triton kernels: pip install triton"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return False, f"torch {torch.__version__} has no symmetric memory: use 2.11 or newer"
    return True, "torch's symmetric memory on NVIDIA GPUs"


def _nvshmem() -> tuple[bool, str]:
    from torch.distributed import _symmetric_memory as symm_mem

    asks = getattr(symm_mem, "is_nvshmem_available", None)
    if asks is None or not asks():
        return False, f"torch {torch.__version__} was built without NVSHMEM, or does not find it"
    return True, "torch's NVSHMEM, for ranks that have a GPU each"
