"""What a result was made on: hardware, versions and an allow-list of variables."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tutti.machine.cpus import allowed_cpus, cpu_quota, format_cpu_list, numa_nodes
from tutti.machine.gpus import nvml

# Only what steers torch, its backends and the launchers. Never the whole environment: it holds
# keys and passwords.
_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES"),
)
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "NVSHMEM_", "CUDA_MPS_", "TUTTI_")
_PACKAGES = ("tutti", "torch", "numpy")


def describe_environment() -> dict[str, Any]:
    """Machine, versions and allow-listed variables, ready for JSON."""
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpus": format_cpu_list(allowed_cpus()),
        "cpu_quota": cpu_quota(),
        "numa_nodes": {str(node): format_cpu_list(c) for node, c in numa_nodes().items()},
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
        "versions": versions(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree, say
            found[package] = "not installed"
    return found


def _gpus() -> list[dict[str, Any]]:
    with nvml() as library:
        if library is None:
            return []
        handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        return [
            {
                "name": library.nvmlDeviceGetName(handle),
                "memory_bytes": library.nvmlDeviceGetMemoryInfo(handle).total,
                "driver": library.nvmlSystemGetDriverVersion(),
            }
            for handle in handles
        ]
