"""What a machine runs: its kernel, settings, versions and allow-listed variables."""

import contextlib
import ipaddress
import os
import platform
import re
import socket
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tutti.machine.accelerator import Xid
from tutti.machine.files import Files

# Prefixes and names of variables that steer communication. Never the whole environment.
_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "NVIDIA_", "NVSHMEM_"),
    *("OMP_", "KMP_", "UCX_", "FI_", "OMPI_MCA_", "TUTTI_", "HIP_", "HSA_", "ROCR_", "RCCL_"),
)
_VARIABLES = (
    *("MKL_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    *("LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_PER_TASK", "GOMP_CPU_AFFINITY"),
)
# Names that were meant to be one of those: whoever looks for mistakes must see them.
_SLIPS = re.compile("(NC+L+|NCC|NNCCL|GLO+|OPM|TROCH|TOCH)_", re.IGNORECASE)
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)

_PARAMETERS = (
    *("intel_iommu", "amd_iommu", "iommu", "iommu.passthrough", "iommu.strict", "pci"),
    *("pcie_aspm", "numa_balancing", "isolcpus", "nohz_full", "hugepages", "hugepagesz"),
    *("default_hugepagesz", "transparent_hugepage", "intel_idle.max_cstate"),
)
_MODULES = (
    *("nvidia", "nvidia_uvm", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "amdgpu"),
    *("ib_core", "ib_uverbs", "rdma_cm", "mlx5_core", "mlx5_ib", "efa", "irdma", "bnxt_re"),
)
_SYSCTLS = (
    *("net.core.rmem_max", "net.core.wmem_max", "net.core.somaxconn", "net.ipv4.tcp_rmem"),
    *("net.ipv4.tcp_wmem", "net.ipv4.ip_local_port_range", "kernel.numa_balancing"),
    *("kernel.pid_max", "vm.max_map_count", "vm.overcommit_memory"),
)
_PACKAGES = ("tutti", "torch", "numpy", "nvidia-ml-py", "triton", "mpi4py")


def boot_id() -> str:
    """The kernel's random id of this boot, the same in every container of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux, or /proc is hidden
        return "unknown"


def read_name_resolution() -> str:
    """Where the host's own name leads. The addresses themselves are nobody's business."""
    try:
        found = socket.getaddrinfo(platform.node(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "nothing"
    # What is tried first counts: it is what gloo takes, too.
    first = str(found[0][4][0]).partition("%")[0]
    return "loopback" if ipaddress.ip_address(first).is_loopback else "outside"


def read_system(files: Files) -> str | None:
    """The distribution's own name for itself."""
    text = files.text("/etc/os-release", "system") or ""
    found = re.search(r'(?m)^PRETTY_NAME="?([^"\n]*)', text)
    if found is None:
        files.unknown.setdefault("system", "/etc/os-release has no PRETTY_NAME")
    return found[1] if found else None


def read_product(files: Files) -> str | None:
    """Vendor and product, as the firmware gives them."""
    names = [files.text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    told = " ".join(name for name in names if name)
    if not told:
        files.unknown["product"] = "/sys/class/dmi/id is hidden"
    return told or None


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


def read_virtualisation(files: Files) -> str | None:
    """none, or which hypervisor. On x86 the processor says whether there is one."""
    flags = re.search(r"(?m)^flags\s*:(.*)$", files.text("/proc/cpuinfo") or "")
    product = (read_product(files) or files.text("/sys/hypervisor/type") or "").lower()
    name = next((kind for word, kind in _HYPERVISORS.items() if word in product), None)
    if flags is not None:
        return (name or "unnamed hypervisor") if "hypervisor" in flags[1].split() else "none"
    if name is None:
        files.unknown["virtualisation"] = "neither the processor nor the firmware says"
    return name


def read_container(files: Files) -> str:
    """none, or its kind by the marks that container engines leave."""
    told = files.text("/run/systemd/container")
    if told:
        return told
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if files.exists("/.dockerenv"):
        return "docker"
    if files.exists("/run/.containerenv"):
        return "podman"
    if "APPTAINER_NAME" in os.environ or "SINGULARITY_NAME" in os.environ:
        return "apptainer"
    groups = files.text("/proc/1/cgroup") or ""
    found = re.search(r"kubepods|docker|lxc|containerd", groups)
    return found[0].replace("kubepods", "kubernetes") if found else "none"


def read_kernel_parameters(files: Files) -> tuple[str, ...] | None:
    """Those of the kernel's command line that bear on communication."""
    text = files.text("/proc/cmdline", "kernel_parameters")
    if text is None:
        return None
    return tuple(word for word in text.split() if word.partition("=")[0] in _PARAMETERS)


def read_kernel_modules(files: Files) -> tuple[str, ...] | None:
    """The loaded ones of those that move data between GPUs and NICs."""
    text = files.text("/proc/modules", "kernel_modules")
    if text is None:
        return None
    loaded = {line.split()[0] for line in text.splitlines() if line}
    return tuple(name for name in _MODULES if name in loaded)


def read_sysctls(files: Files) -> dict[str, str]:
    """Settings of the kernel by their names."""
    values = {name: files.text(f"/proc/sys/{name.replace('.', '/')}") for name in _SYSCTLS}
    return {name: " ".join(value.split()) for name, value in values.items() if value is not None}


def read_nccl_conf(files: Files) -> dict[str, dict[str, str]]:
    """What NCCL's own files set."""
    found = {}
    for path in ("/etc/nccl.conf", str(Path.home() / ".nccl.conf")):
        lines = re.findall(r"(?m)^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", files.text(path) or "")
        if lines:
            found[path] = dict(lines)
    return found


def read_variables() -> dict[str, str]:
    """The allow-listed variables of this process."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in _VARIABLES or name.startswith(_PREFIXES) or _SLIPS.match(name))
        and not _SECRET.search(name)
    }


def read_versions(files: Files) -> dict[str, str]:
    """Versions that a result depends on, found without importing torch."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            text = (Path(spec.origin).parent / "version.py").read_text()
            cuda = re.search(r"(?m)^cuda\b[^=\n]*= '([\d.]+)'", text)
            if cuda:
                found["cuda"] = cuda[1]
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.setdefault("nccl", metadata.version(package))
    driver = files.text("/proc/driver/nvidia/version") or ""
    number = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", driver)
    if number:
        found["driver"] = number[1]
        found["kernel_module"] = "open" if "Open Kernel Module" in driver else "proprietary"
    return found


_XID = re.compile(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)")


def read_xids(files: Files) -> tuple[Xid, ...] | None:
    """Errors of NVIDIA's driver in the kernel's log since boot."""
    try:
        log = os.open(files.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        files.unknown["xids"] = f"/dev/kmsg: {error.strerror}"
        return None
    up = float((files.text("/proc/uptime") or "nan").split()[0])
    found = []
    try:
        while True:
            try:
                record = os.read(log, 1 << 14).decode(errors="replace")
            except BrokenPipeError:  # overwritten while we read: the next one follows
                continue
            except BlockingIOError:
                break
            if not record:
                break
            # priority,sequence,microseconds since boot,flags;text
            head, _, text = record.partition(";")
            if match := _XID.search(text):
                age = up - int(head.split(",")[2]) / 1e6
                address = match[1] if match[1].count(":") > 1 else f"0000:{match[1]}"
                address = address if "." in address else f"{address}.0"
                known = round(age, 1) if age == age else None
                found.append(Xid(address, int(match[2]), known, text.splitlines()[0]))
    except OSError as error:
        files.unknown["xids"] = f"/dev/kmsg: {error.strerror}"
        return None
    finally:
        os.close(log)
    return tuple(found)
