"""Machine: what one host is, as one frozen value that can be recorded, read back and judged."""

from dataclasses import dataclass, field
from typing import Any

from tutti.machine.accelerator import Accelerator, PeerAccess, Xid
from tutti.machine.cpus import Cpus
from tutti.machine.limits import Limits
from tutti.machine.nics import Nic, RdmaPort
from tutti.machine.numa import Memory, NumaNode
from tutti.machine.pci import PciDevice
from tutti.machine.record import decode, encode


@dataclass(frozen=True)
class Machine:
    """One host. None means unknown, never a guess, and `unknown` says why.

    Keys of `unknown` are paths such as `accelerators[0].ecc.enabled`; a reason at a path holds for
    all that is below it.
    """

    host: str
    observed_at: str | None
    """UTC, ISO 8601."""
    name_resolution: str | None
    """What the host's own name leads to on it: outside, loopback or nothing."""
    system: str | None
    kernel: str | None
    architecture: str | None
    product: str | None
    virtualisation: str | None
    """none, or the hypervisor: kvm, microsoft, xen, vmware, …"""
    container: str | None
    """none, or its kind: docker, podman, kubernetes, …"""
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
    """Those about IOMMU, PCI, NUMA, huge pages and isolated CPUs."""
    kernel_modules: tuple[str, ...] | None
    """Those that move data between GPUs and NICs, such as nvidia_peermem."""
    sysctls: dict[str, str]
    nccl_conf: dict[str, dict[str, str]]
    """By file: what /etc/nccl.conf and ~/.nccl.conf set, which applies without a word."""
    variables: dict[str, str]
    """Environment variables by an allow-list, never all."""
    versions: dict[str, str]
    """python, torch, cuda (torch's), cuda_driver (the newest it can serve), driver, nccl, …"""
    xids: tuple[Xid, ...] | None
    """None where the kernel's log may not be read."""
    unknown: dict[str, str] = field(default_factory=dict)

    def why(self, path: str) -> str | None:
        """Why a field is unknown: its own reason, or that of what it is part of."""
        while path:
            if path in self.unknown:
                return self.unknown[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None

    def pci_device(self, address: str | None) -> PciDevice | None:
        """The PCI device at an address, where /sys shows it."""
        return next((each for each in self.pci if each.address == address), None)

    def to_json(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @classmethod
    def from_json(cls, values: Any) -> "Machine":
        """Read it back. What is missing becomes unknown; a wrong key or type is a ValueError."""
        missing: dict[str, str] = {}
        machine = decode(cls, values, "", missing)
        machine.unknown.update(missing)
        return machine
