"""PciDevice: GPUs, NICs and the bridges above them, as /sys shows them without any driver."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PcieLink:
    """The link above a PCI device. An idle GPU lowers its generation, never its width."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


@dataclass(frozen=True)
class PciDevice:
    """A GPU, NIC or NVSwitch, or a bridge above one, as /sys shows it (no driver is needed)."""

    address: str
    """As the kernel writes it: 0000:18:00.0."""
    kind: Literal["gpu", "nic", "nvswitch", "bridge"]
    path: tuple[str, ...]
    """From the root complex (pci0000:15) over its bridges to the device itself."""
    vendor: str | None
    driver: str | None
    numa_node: int | None
    local_cpus: str | None
    link: PcieLink | None
    iommu_type: str | None
    """identity, DMA, DMA-FQ; none where no IOMMU group holds the device."""
    acs_redirect: bool | None
    """Bridges only: whether ACS sends traffic between peers up to the root complex."""
    correctable_errors: int | None
    uncorrectable_errors: int | None
    """Advanced error reporting, non-fatal and fatal, since boot."""
