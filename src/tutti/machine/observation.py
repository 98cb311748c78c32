"""Machine: hardware, software and settings of one host. `observe()` reads this host."""

import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutti.machine import cpu_numa, environment
from tutti.machine.cpu_numa import Cpus, Limits, Memory, NumaNode
from tutti.machine.environment import Xid
from tutti.machine.gpus import Accelerator, PeerAccess, read_accelerators
from tutti.machine.nics import Nic, RdmaPort, read_nics, read_rdma
from tutti.machine.pci import PciDevice, read_pci
from tutti.machine.recording import from_json
from tutti.machine.sysfs import SysFiles


@dataclass(frozen=True)
class Machine:
    """One host. A field that is None is unknown; `unknown` contains the reason.

    Keys of `unknown` are paths such as `accelerators[0].ecc.enabled`. The reason for a path also
    applies to all fields below that path.
    """

    host: str
    observed_at: str | None
    """UTC, ISO 8601."""
    name_resolution: str | None
    """What the host's own name resolves to: outside, loopback or nothing."""
    system: str | None
    kernel: str | None
    architecture: str | None
    product: str | None
    virtualisation: str | None
    """none, or the hypervisor: kvm, microsoft, xen, vmware, …"""
    container: str | None
    """none, or the kind: docker, podman, kubernetes, …"""
    cpus: Cpus
    numa: tuple[NumaNode, ...]
    memory: Memory
    accelerators: tuple[Accelerator, ...]
    peers: tuple[PeerAccess, ...]
    pci: tuple[PciDevice, ...]
    nics: tuple[Nic, ...]
    rdma: tuple[RdmaPort, ...]
    limits: Limits
    iommu_groups: int | None
    kernel_parameters: tuple[str, ...] | None
    """Only parameters about IOMMU, PCI, NUMA, huge pages and isolated CPUs."""
    kernel_modules: tuple[str, ...] | None
    """Only drivers of GPUs and RDMA NICs, such as nvidia_peermem."""
    sysctls: dict[str, str]
    nccl_conf: dict[str, dict[str, str]]
    """The settings in /etc/nccl.conf and ~/.nccl.conf, keyed by file."""
    variables: dict[str, str]
    """Environment variables on an allow-list."""
    versions: dict[str, str]
    """Versions of python, torch, cuda (of torch), cuda_driver (the newest CUDA that the driver
    supports), driver, nccl, …"""
    xids: tuple[Xid, ...] | None
    """None if the kernel log cannot be read."""
    unknown: dict[str, str] = field(default_factory=dict)

    def why(self, path: str) -> str | None:
        """Why a field is unknown: the reason for the field or for a field that contains it."""
        while path:
            if path in self.unknown:
                return self.unknown[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None

    def pci_device(self, address: str | None) -> PciDevice | None:
        """The PCI device at an address; None if /sys does not contain the device."""
        return next((device for device in self.pci if device.address == address), None)

    @property
    def has_rdma(self) -> bool:
        """Whether any RDMA port is active."""
        return any(port.state == "ACTIVE" for port in self.rdma)

    @property
    def is_virtual(self) -> bool:
        """Whether the machine is known to be a virtual machine."""
        return self.virtualisation not in (None, "none")

    @classmethod
    def from_json(cls, values: Any) -> "Machine":
        """Inverse of asdict. A missing field is unknown; a wrong key or type is a ValueError."""
        missing: dict[str, str] = {}
        machine = from_json(cls, values, "", missing)
        machine.unknown.update(missing)
        return machine


def observe(root: Path = Path("/")) -> Machine:
    """Observe this host through /sys, /proc and the GPU driver.

    Values that cannot be read are recorded as unknown; they do not raise an error. For tests,
    `root` is the directory that contains sys and proc.
    """
    unknown: dict[str, str] = {}
    files = SysFiles(unknown, root)
    pci = read_pci(files)
    versions = environment.read_versions(files)
    accelerators, peers = read_accelerators(files, pci, versions)
    return Machine(
        host=platform.node(),
        observed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        name_resolution=environment.read_name_resolution(),
        system=environment.read_system(files),
        kernel=platform.release(),
        architecture=platform.machine(),
        product=environment.read_product(files),
        virtualisation=environment.read_virtualisation(files),
        container=environment.read_container(files),
        cpus=cpu_numa.read_cpus(files),
        numa=cpu_numa.read_numa(files),
        memory=cpu_numa.read_memory(files),
        accelerators=accelerators,
        peers=peers,
        pci=pci,
        nics=read_nics(files),
        rdma=read_rdma(files),
        limits=cpu_numa.read_limits(files),
        iommu_groups=environment.read_iommu_groups(files),
        kernel_parameters=environment.read_kernel_parameters(files),
        kernel_modules=environment.read_kernel_modules(files),
        sysctls=environment.read_sysctls(files),
        nccl_conf=environment.read_nccl_conf(files),
        variables=environment.read_variables(),
        versions=versions,
        xids=environment.read_xids(files),
        unknown=unknown,
    )
