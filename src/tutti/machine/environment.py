"""Software of a host: kernel, container, versions and allow-listed environment variables.

`describe_environment()` is the `environment` entry of every JSON result.
"""

import contextlib
import ipaddress
import os
import platform
import re
import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti.machine.cpu_numa import (
    allowed_cpus,
    cpu_quota,
    format_cpu_list,
    numa_nodes,
    read_cpu_model,
)
from tutti.machine.gpus import nvml
from tutti.machine.sysfs import SysFiles

# --- the `environment` entry of every JSON result ------------------------------------------------


def describe_environment() -> dict[str, Any]:
    """Hardware, versions and allow-listed variables of this process, ready for JSON."""
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": read_cpu_model(SysFiles()) or platform.processor() or "unknown",
        "cpus": format_cpu_list(allowed_cpus()),
        "cpu_quota": cpu_quota(),
        "numa_nodes": {str(node): format_cpu_list(c) for node, c in numa_nodes().items()},
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
        "versions": versions(),
        "variables": {
            name: value for name, value in read_variables().items() if name not in _PER_PROCESS
        },
    }


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


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("tutti", "torch", "numpy"):
        found[name] = _package_version(name) or "not installed"
    return found


def _package_version(name: str) -> str | None:
    try:
        # The distribution of the package tutti is named tutti-torch.
        return metadata.version("tutti-torch" if name == "tutti" else name)
    except metadata.PackageNotFoundError:
        return None


def boot_id() -> str:
    """The random id that the kernel chose at boot. All containers of a machine have the same id."""
    return SysFiles().text("/proc/sys/kernel/random/boot_id") or "unknown"


# --- environment variables -----------------------------------------------------------------------

# Variables that affect torch, its communication backends and launchers. The whole environment is
# never recorded, because it may contain keys and passwords.
_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "NVIDIA_", "NVSHMEM_"),
    *("OMP_", "KMP_", "UCX_", "FI_", "OMPI_MCA_", "TUTTI_", "HIP_", "HSA_", "ROCR_", "RCCL_"),
)
# Variables that differ between processes or between runs. They are left out of JSON results.
_PER_PROCESS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_GPUS_PER_TASK"),
)
_VARIABLES = (
    *_PER_PROCESS,
    *("MKL_NUM_THREADS", "GOMP_CPU_AFFINITY"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES"),
)
# Variables with a misspelt prefix are recorded too, so that the check env.misspelt can find them.
_MISSPELT = re.compile("(NC+L+|NCC|NNCCL|GLO+|OPM|TROCH|TOCH)_", re.IGNORECASE)
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)


def read_variables() -> dict[str, str]:
    """The allow-listed environment variables of this process."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in _VARIABLES or name.startswith(_PREFIXES) or _MISSPELT.match(name))
        and not _SECRET.search(name)
    }


def read_nccl_conf(files: SysFiles) -> dict[str, dict[str, str]]:
    """The settings in NCCL's configuration files, keyed by file."""
    found = {}
    for path in ("/etc/nccl.conf", str(Path.home() / ".nccl.conf")):
        lines = re.findall(r"(?m)^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", files.text(path) or "")
        if lines:
            found[path] = dict(lines)
    return found


def read_versions(files: SysFiles) -> dict[str, str]:
    """Versions of Python, packages, CUDA, NCCL and the driver, without importing torch."""
    found = {"python": sys.version.split()[0]}
    for name in ("tutti", "torch", "numpy", "nvidia-ml-py", "triton", "mpi4py"):
        if version := _package_version(name):
            found[name] = version
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            text = (Path(spec.origin).parent / "version.py").read_text()
            cuda = re.search(r"(?m)^cuda\b[^=\n]*= '([\d.]+)'", text)
            if cuda:
                found["cuda"] = cuda[1]
    nccl = _package_version("nvidia-nccl-cu13") or _package_version("nvidia-nccl-cu12")
    if nccl:
        found["nccl"] = nccl
    driver = files.text("/proc/driver/nvidia/version") or ""
    number = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", driver)
    if number:
        found["driver"] = number[1]
        found["kernel_module"] = "open" if "Open Kernel Module" in driver else "proprietary"
    return found


# --- operating system ----------------------------------------------------------------------------

_KERNEL_PARAMETERS = (
    *("intel_iommu", "amd_iommu", "iommu", "iommu.passthrough", "iommu.strict", "pci"),
    *("pcie_aspm", "numa_balancing", "isolcpus", "nohz_full", "hugepages", "hugepagesz"),
    *("default_hugepagesz", "transparent_hugepage", "intel_idle.max_cstate"),
)
_KERNEL_MODULES = (
    *("nvidia", "nvidia_uvm", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "amdgpu"),
    *("ib_core", "ib_uverbs", "rdma_cm", "mlx5_core", "mlx5_ib", "efa", "irdma", "bnxt_re"),
)
_SYSCTLS = (
    *("net.core.rmem_max", "net.core.wmem_max", "net.core.somaxconn", "net.ipv4.tcp_rmem"),
    *("net.ipv4.tcp_wmem", "net.ipv4.ip_local_port_range", "kernel.numa_balancing"),
    *("kernel.pid_max", "vm.max_map_count", "vm.overcommit_memory"),
)
_HYPERVISORS = {
    "qemu": "kvm",
    "kvm": "kvm",
    "google": "kvm",
    "amazon ec2": "kvm",
    "openstack": "kvm",
    "microsoft": "microsoft",
    "vmware": "vmware",
    "virtualbox": "virtualbox",
    "xen": "xen",
}


def read_name_resolution() -> str:
    """What the host's own name resolves to: outside, loopback or nothing.

    The address itself is not recorded.
    """
    try:
        found = socket.getaddrinfo(platform.node(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "nothing"
    # gloo uses the first address, so only the first address matters.
    first = str(found[0][4][0]).partition("%")[0]
    return "loopback" if ipaddress.ip_address(first).is_loopback else "outside"


def read_system(files: SysFiles) -> str | None:
    """The name of the distribution."""
    text = files.text("/etc/os-release", "system") or ""
    found = re.search(r'(?m)^PRETTY_NAME="?([^"\n]*)', text)
    if found is None:
        files.unknown.setdefault("system", "/etc/os-release has no PRETTY_NAME")
    return found[1] if found else None


def read_product(files: SysFiles) -> str | None:
    """Vendor and product name of the machine, as reported by the firmware."""
    names = [files.text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    product = " ".join(name for name in names if name)
    if not product:
        files.unknown["product"] = "/sys/class/dmi/id cannot be read"
    return product or None


def read_virtualisation(files: SysFiles) -> str | None:
    """The name of the hypervisor, or none. On x86, a CPU flag shows whether one is present."""
    flags = re.search(r"(?m)^flags\s*:(.*)$", files.text("/proc/cpuinfo") or "")
    product = (read_product(files) or files.text("/sys/hypervisor/type") or "").lower()
    name = next((kind for word, kind in _HYPERVISORS.items() if word in product), None)
    if flags is not None:
        return (name or "unnamed hypervisor") if "hypervisor" in flags[1].split() else "none"
    if name is None:
        files.unknown["virtualisation"] = "neither CPU flags nor the firmware name a hypervisor"
    return name


def read_container(files: SysFiles) -> str:
    """The kind of container, or none.

    Container engines are recognised by the files and environment variables that they set.
    """
    engine = files.text("/run/systemd/container")
    if engine:
        return engine
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if files.exists("/.dockerenv"):
        return "docker"
    if files.exists("/run/.containerenv"):
        return "podman"
    if "APPTAINER_NAME" in os.environ or "SINGULARITY_NAME" in os.environ:
        return "apptainer"
    found = re.search(r"kubepods|docker|lxc|containerd", files.text("/proc/1/cgroup") or "")
    return found[0].replace("kubepods", "kubernetes") if found else "none"


def read_kernel_parameters(files: SysFiles) -> tuple[str, ...] | None:
    """Kernel command-line parameters about IOMMU, PCI, NUMA, huge pages and isolated CPUs."""
    text = files.text("/proc/cmdline", "kernel_parameters")
    if text is None:
        return None
    return tuple(word for word in text.split() if word.partition("=")[0] in _KERNEL_PARAMETERS)


def read_kernel_modules(files: SysFiles) -> tuple[str, ...] | None:
    """The loaded kernel modules that drive GPUs and RDMA NICs."""
    text = files.text("/proc/modules", "kernel_modules")
    if text is None:
        return None
    loaded = {line.split()[0] for line in text.splitlines() if line}
    return tuple(name for name in _KERNEL_MODULES if name in loaded)


def read_sysctls(files: SysFiles) -> dict[str, str]:
    """Kernel settings about TCP buffers, ports, NUMA balancing and memory."""
    values = {name: files.text(f"/proc/sys/{name.replace('.', '/')}") for name in _SYSCTLS}
    return {name: " ".join(value.split()) for name, value in values.items() if value is not None}


def read_iommu_groups(files: SysFiles) -> int | None:
    """The number of IOMMU groups; 0 means that the IOMMU is off."""
    if not files.exists("/sys/kernel/iommu_groups"):
        files.unknown["iommu_groups"] = "/sys/kernel/iommu_groups does not exist"
        return None
    return len(files.names("/sys/kernel/iommu_groups"))


# --- the kernel log ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Xid:
    """An error that the NVIDIA driver wrote to the kernel log."""

    pci_address: str
    code: int
    age_s: float | None
    text: str


_XID = re.compile(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)")


def read_xids(files: SysFiles) -> tuple[Xid, ...] | None:
    """The Xid errors in the kernel log since boot; None if the log cannot be read."""
    try:
        log = os.open(files.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        files.unknown["xids"] = f"/dev/kmsg: {error.strerror}"
        return None
    uptime_s = float((files.text("/proc/uptime") or "nan").split()[0])
    found = []
    try:
        while True:
            try:
                record = os.read(log, 1 << 14).decode(errors="replace")
            except BrokenPipeError:  # the record was overwritten; the next read returns a later one
                continue
            except BlockingIOError:
                break
            if not record:
                break
            # Format of a record: priority,sequence,microseconds since boot,flags;text
            head, _, text = record.partition(";")
            if match := _XID.search(text):
                age_s = uptime_s - int(head.split(",")[2]) / 1e6
                address = match[1] if match[1].count(":") > 1 else f"0000:{match[1]}"
                address = address if "." in address else f"{address}.0"
                age = round(age_s, 1) if age_s == age_s else None  # NaN: /proc/uptime is unreadable
                found.append(Xid(address, int(match[2]), age, text.splitlines()[0]))
    except OSError as error:
        files.unknown["xids"] = f"/dev/kmsg: {error.strerror}"
        return None
    finally:
        os.close(log)
    return tuple(found)
