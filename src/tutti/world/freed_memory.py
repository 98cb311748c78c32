"""Keep the memory that torch frees on a CPU: it needs as much again in the next step.

glibc gives large blocks back to the kernel, which hands them out again page by page, each with a
fault and full of zeros. A step that makes and frees its gradients pays that every time: 40 MB were
10,000 faults and 15 of 70 ms, on two cores of a virtual machine. On a GPU torch has its own cache.
"""

import ctypes
from collections.abc import Mapping

# malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = (1 << 31) - 1  # free at the end of the heap before any of it goes back: the most
# A block of this size and more is mapped by itself, and goes back when freed. Older versions of
# glibc take no more than the second.
_MMAP_BYTES = (1 << 30, 32 << 20)
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Tell glibc, unless the environment has told it otherwise; whether it was told."""
    if any(name in env for name in _VARIABLES) or "_threshold" in env.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    # Either call freezes the other limit where it happens to be, and this one may be low: so first.
    taken = any(mallopt(_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    return taken and bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))
