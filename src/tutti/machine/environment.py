"""The software of a host: kernel, container, versions and allow-listed environment variables.

`describe_environment()` returns the value of `environment` in every JSON result.
"""

import contextlib
import ipaddress
import os
import platform
import re
import socket
import tomllib
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti.machine import cpu_numa
from tutti.machine.gpus import nvml
from tutti.machine.sysfs import SysFiles

RECORDED_NAMES = tomllib.loads(Path(__file__).with_name("recorded_names.toml").read_text())
_PER_PROCESS = RECORDED_NAMES["variables"]["per_process"].split()


def describe_environment() -> dict[str, Any]:
    """Return the hardware, versions and allow-listed variables of this process, for JSON."""
    with nvml() as library:
        count = 0 if library is None else library.nvmlDeviceGetCount()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        gpus = [
            {
                "name": library.nvmlDeviceGetName(handle),
                "memory_bytes": library.nvmlDeviceGetMemoryInfo(handle).total,
                "driver": library.nvmlSystemGetDriverVersion(),
            }
            for handle in handles
        ]
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_numa.read_cpu_model(SysFiles()) or platform.processor() or "unknown",
        "cpus": cpu_numa.format_cpu_list(cpu_numa.allowed_cpus()),
        "cpu_quota": cpu_numa.cpu_quota(),
        "numa_nodes": {
            str(node): cpu_numa.format_cpu_list(cpus)
            for node, cpus in cpu_numa.numa_nodes().items()
        },
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus,
        "versions": versions(),
        "variables": {
            name: value for name, value in read_variables().items() if name not in _PER_PROCESS
        },
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    names = ("tutti", "torch", "numpy")
    found = {name: _package_version(name) or "not installed" for name in names}
    return {"python": platform.python_version(), **found}


def _package_version(name: str) -> str | None:
    try:
        # The distribution of the package tutti is named tutti-torch.
        return metadata.version("tutti-torch" if name == "tutti" else name)
    except metadata.PackageNotFoundError:
        return None


def boot_id() -> str:
    """Return the kernel's random boot id. It is the same in all containers of a machine."""
    return SysFiles().text("/proc/sys/kernel/random/boot_id") or "unknown"


# --- environment variables -----------------------------------------------------------------------

# Variables with a misspelt prefix are also recorded, so that the check `env.misspelt` finds them.
_MISSPELT = re.compile("(NC+L+|NCC|NNCCL|GLO+|OPM|TROCH|TOCH)_", re.IGNORECASE)
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)


def read_variables() -> dict[str, str]:
    """Return the allow-listed environment variables of this process."""
    recorded = {*RECORDED_NAMES["variables"]["names"].split(), *_PER_PROCESS}
    prefixes = tuple(RECORDED_NAMES["variables"]["prefixes"].split())
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in recorded or name.startswith(prefixes) or _MISSPELT.match(name))
        and not _SECRET.search(name)
    }


def read_nccl_conf(files: SysFiles) -> dict[str, dict[str, str]]:
    """Return {path: settings} of NCCL's configuration files."""
    found = {}
    for path in ("/etc/nccl.conf", str(Path.home() / ".nccl.conf")):
        lines = re.findall(r"(?m)^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", files.text(path) or "")
        if lines:
            found[path] = dict(lines)
    return found


def read_versions(files: SysFiles) -> dict[str, str]:
    """Return the versions of Python, packages, CUDA, NCCL and the driver. torch is not imported."""
    names = ("tutti", "torch", "numpy", "nvidia-ml-py", "triton", "mpi4py")
    found = {"python": platform.python_version()} | {name: _package_version(name) for name in names}
    found["nccl"] = _package_version("nvidia-nccl-cu13") or _package_version("nvidia-nccl-cu12")
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            text = (Path(spec.origin).parent / "version.py").read_text()
            cuda = re.search(r"(?m)^cuda\b[^=\n]*= '([\d.]+)'", text)
            found["cuda"] = cuda and cuda[1]
    file = "/proc/driver/nvidia/version"
    if driver := files.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", file):
        found["driver"] = driver
        is_open = files.search("(Open Kernel Module)", file)
        found["kernel_module"] = "open" if is_open else "proprietary"
    return {name: version for name, version in found.items() if version}


# --- operating system ----------------------------------------------------------------------------


def read_name_resolution() -> str:
    """Return the kind of address to which the hostname resolves.

    The kinds are "loopback", "outside" (any other address) and "nothing" (the name cannot be
    resolved). The address itself is not recorded.
    """
    try:
        found = socket.getaddrinfo(platform.node(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "nothing"
    # Check only the first address, because gloo uses the first address.
    first = str(found[0][4][0]).partition("%")[0]
    return "loopback" if ipaddress.ip_address(first).is_loopback else "outside"


def read_product(files: SysFiles) -> str | None:
    """Return the vendor and product name of the machine, as reported by the firmware."""
    names = [files.text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    product = " ".join(name for name in names if name)
    if not product:
        files.unknown["product"] = "/sys/class/dmi/id cannot be read"
    return product or None


def read_virtualisation(files: SysFiles) -> str | None:
    """Return the name of the hypervisor, "none" if the machine is not virtual, or None if unknown.

    On x86, the CPU flag `hypervisor` shows whether the machine is virtual.
    """
    flags = files.search(r"^flags\s*:(.*)$", "/proc/cpuinfo")
    product = (read_product(files) or files.text("/sys/hypervisor/type") or "").lower()
    name = next(
        (kind for word, kind in RECORDED_NAMES["hypervisors"].items() if word in product), None
    )
    if flags is not None:
        return (name or "unnamed hypervisor") if "hypervisor" in flags.split() else "none"
    if name is None:
        files.unknown["virtualisation"] = "neither CPU flags nor the firmware name a hypervisor"
    return name


def read_container(files: SysFiles) -> str:
    """Return the kind of container, or "none".

    A container engine is recognised by the files that it creates and the variables that it sets.
    """
    if engine := files.text("/run/systemd/container"):
        return engine
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if files.exists("/.dockerenv"):
        return "docker"
    if files.exists("/run/.containerenv"):
        return "podman"
    if "APPTAINER_NAME" in os.environ or "SINGULARITY_NAME" in os.environ:
        return "apptainer"
    found = files.search("(kubepods|docker|lxc|containerd)", "/proc/1/cgroup")
    return (found or "none").replace("kubepods", "kubernetes")


def read_kernel_parameters(files: SysFiles) -> tuple[str, ...] | None:
    """Return the kernel parameters that concern IOMMU, PCI, NUMA, huge pages and isolated CPUs."""
    text = files.text("/proc/cmdline", "kernel_parameters")
    if text is None:
        return None
    names = RECORDED_NAMES["kernel"]["parameters"].split()
    return tuple(word for word in text.split() if word.partition("=")[0] in names)


def read_kernel_modules(files: SysFiles) -> tuple[str, ...] | None:
    """Return the loaded kernel modules for GPUs and RDMA NICs."""
    text = files.text("/proc/modules", "kernel_modules")
    if text is None:
        return None
    loaded = re.findall(r"(?m)^\w+", text)
    return tuple(name for name in RECORDED_NAMES["kernel"]["modules"].split() if name in loaded)


def read_sysctls(files: SysFiles) -> dict[str, str]:
    """Return the sysctl values that concern TCP buffers, ports, NUMA balancing and memory."""
    names = RECORDED_NAMES["kernel"]["sysctls"].split()
    values = {name: files.text(f"/proc/sys/{name.replace('.', '/')}") for name in names}
    return {name: " ".join(value.split()) for name, value in values.items() if value is not None}


def read_iommu_groups(files: SysFiles) -> int | None:
    """Return the number of IOMMU groups. 0 means that the IOMMU is off."""
    if not files.exists("/sys/kernel/iommu_groups"):
        files.unknown["iommu_groups"] = "/sys/kernel/iommu_groups does not exist"
        return None
    return len(files.names("/sys/kernel/iommu_groups"))


@dataclass(frozen=True)
class Xid:
    """An Xid error: a GPU error that the NVIDIA driver has written to the kernel log."""

    pci_address: str
    code: int
    age_s: float | None
    text: str


_XID = re.compile(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)")


def read_xids(files: SysFiles) -> tuple[Xid, ...] | None:
    """Return the Xid errors in the kernel log since boot, or None if the log cannot be read."""

    def open_nonblocking(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)

    uptime = (files.text("/proc/uptime") or "").split()
    found: list[Xid] = []
    try:
        with open(files.root / "dev/kmsg", "rb", buffering=0, opener=open_nonblocking) as log:
            while True:
                try:
                    record = log.read(1 << 14)
                except BrokenPipeError:  # the record was overwritten; read the next record
                    continue
                if not record:
                    return tuple(found)
                # Format of a record: priority,sequence,microseconds since boot,flags;text
                head, _, text = record.decode(errors="replace").partition(";")
                if match := _XID.search(text):
                    address = match[1] if match[1].count(":") > 1 else f"0000:{match[1]}"
                    address = address if "." in address else f"{address}.0"
                    time_s = int(head.split(",")[2]) / 1e6
                    age_s = round(float(uptime[0]) - time_s, 1) if uptime else None
                    found.append(Xid(address, int(match[2]), age_s, text.splitlines()[0]))
    except OSError as error:
        files.unknown["xids"] = f"/dev/kmsg: {error.strerror}"
        return None
