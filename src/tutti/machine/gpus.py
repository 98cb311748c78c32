"""The NVIDIA GPUs this process can use, without importing torch."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def visible_gpu_count(env: Mapping[str, str] | None = None) -> int:
    """How many GPUs CUDA would show a process started with this environment (0 without any)."""
    env = os.environ if env is None else env
    installed = _installed_gpus()
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return installed
    count = 0
    for entry in chosen.split(","):
        entry = entry.strip()
        # CUDA ends the list at the first entry that names no device.
        if entry.isdecimal() and int(entry) >= installed:
            break
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return min(count, installed) if "MIG-" not in chosen else count


def numa_node_of_gpu(pci_address: str) -> int | None:
    """The NUMA node that a PCI device hangs on; None where the kernel does not say."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{pci_address.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def _installed_gpus() -> int:
    with nvml() as library:
        if library is not None:
            return int(library.nvmlDeviceGetCount())
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def why_no_nvml() -> str | None:
    """Why `nvml()` gives None here; None where it does not."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    pynvml.nvmlShutdown()
    return None


@contextmanager
def nvml() -> Iterator[Any]:
    """NVIDIA's management library, started; None where the package or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
