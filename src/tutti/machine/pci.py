"""PciDevice: GPUs, NICs and the bridges above them, as /sys shows them without any driver."""

import re
from dataclasses import dataclass
from typing import Literal

from tutti.machine.files import Files


@dataclass(frozen=True)
class PcieLink:
    """The link above a PCI device. An idle GPU lowers its generation, never its width."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


Kind = Literal["gpu", "nic", "nvswitch", "bridge"]


@dataclass(frozen=True)
class PciDevice:
    """A GPU, NIC or NVSwitch, or a bridge above one, as /sys shows it (no driver is needed)."""

    address: str
    """As the kernel writes it: 0000:18:00.0."""
    kind: Kind
    path: tuple[str, ...]
    """From the root complex (pci0000:15) over its bridges to the device itself."""
    vendor: str | None
    driver: str | None
    """"" for none."""
    numa_node: int | None
    local_cpus: str | None
    link: PcieLink | None
    iommu_type: str | None
    """identity, DMA, DMA-FQ; none where no IOMMU group holds the device."""
    acs_redirect: bool | None
    """Whether ACS sends traffic between peers up to the root complex; only bridges do."""
    correctable_errors: int | None
    uncorrectable_errors: int | None
    """Advanced error reporting, non-fatal and fatal, since boot."""


_DEVICES = "/sys/bus/pci/devices"
_NVIDIA, _AMD = "0x10de", "0x1002"
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}


def read_pci(files: Files) -> tuple[PciDevice, ...]:
    """The devices that matter to communication, and every bridge above one of them."""
    kinds: dict[str, Kind] = {}
    addresses = files.names(_DEVICES)
    if not addresses:
        files.unknown["pci"] = f"{_DEVICES} is empty or hidden"
    for address in addresses:
        kind = _kind(files, address)
        if kind is not None:
            kinds[address] = kind
    for address in list(kinds):
        for above in pci_path(files, address)[1:-1]:
            kinds.setdefault(above, "bridge")
    return tuple(
        _read(files, address, kinds[address], f"pci[{number}]")
        for number, address in enumerate(sorted(kinds))
    )


def pci_path(files: Files, address: str) -> tuple[str, ...]:
    """From the root complex down to the device; () where /sys does not show it."""
    parts = (files.target(f"{_DEVICES}/{address}") or "").split("/")
    roots = [place for place, part in enumerate(parts) if re.match(r"pci[0-9a-f]{4,}:", part)]
    return tuple(parts[roots[0] :]) if roots else ()


def read_numa_node(files: Files, directory: str, field: str) -> int | None:
    """A device's NUMA node. The kernel writes -1 for "not told by the firmware"."""
    node = files.number(f"{directory}/numa_node", field)
    if node is not None and node < 0:
        files.unknown[field] = f"{directory}/numa_node says {node}: the firmware does not tell"
        return None
    return node


def _kind(files: Files, address: str) -> Kind | None:
    code = (files.text(f"{_DEVICES}/{address}/class") or "")[2:6]
    vendor = files.text(f"{_DEVICES}/{address}/vendor")
    if code in ("0300", "0302", "1200") and vendor in (_NVIDIA, _AMD):
        return "gpu"
    if code == "0680" and vendor == _NVIDIA:
        return "nvswitch"
    return "nic" if code.startswith("02") else None


def _read(files: Files, address: str, kind: Kind, field: str) -> PciDevice:
    where = f"{_DEVICES}/{address}"
    driver = files.target(f"{where}/driver")
    group = files.exists(f"{where}/iommu_group")
    return PciDevice(
        address=address,
        kind=kind,
        path=pci_path(files, address),
        vendor=files.text(f"{where}/vendor", f"{field}.vendor"),
        driver=driver.rpartition("/")[2] if driver else "",
        numa_node=read_numa_node(files, where, f"{field}.numa_node"),
        local_cpus=files.text(f"{where}/local_cpulist", f"{field}.local_cpus"),
        link=_read_link(files, where, f"{field}.link"),
        iommu_type=(
            files.text(f"{where}/iommu_group/type", f"{field}.iommu_type") if group else "none"
        ),
        acs_redirect=(
            _acs_redirect(files, f"{where}/config", f"{field}.acs_redirect")
            if kind == "bridge"
            else False
        ),
        correctable_errors=_aer(files, where, f"{field}.correctable_errors", "correctable"),
        uncorrectable_errors=_aer(
            files, where, f"{field}.uncorrectable_errors", "nonfatal", "fatal"
        ),
    )


def _read_link(files: Files, where: str, field: str) -> PcieLink | None:
    if files.text(f"{where}/max_link_speed", field) is None:
        return None  # a virtual device has no link
    return PcieLink(
        generation=_generation(files, f"{where}/current_link_speed", f"{field}.generation"),
        width=_width(files, f"{where}/current_link_width", f"{field}.width"),
        max_generation=_generation(files, f"{where}/max_link_speed", f"{field}.max_generation"),
        max_width=_width(files, f"{where}/max_link_width", f"{field}.max_width"),
    )


def _generation(files: Files, path: str, field: str) -> int | None:
    text = files.text(path, field)  # "32.0 GT/s PCIe", or "Unknown" in a virtual machine
    if text is None:
        return None
    generation = _GENERATIONS.get(text.partition(" GT/s")[0])
    if generation is None:
        files.unknown[field] = f"{path} says {text!r}"
    return generation


def _width(files: Files, path: str, field: str) -> int | None:
    width = files.number(path, field)
    if width in (0, 255):  # the link is down, or the machine is virtual
        files.unknown[field] = f"{path} says {width}"
        return None
    return width


def _aer(files: Files, where: str, field: str, *severities: str) -> int | None:
    total = 0
    for severity in severities:
        text = files.text(f"{where}/aer_dev_{severity}", field)
        if text is None:
            return None
        found = re.search(r"TOTAL_ERR_\w+ (\d+)", text)
        total += int(found[1]) if found else 0
    return total


_ACS, _REDIRECT = 0x000D, 0b1100  # P2P request and completion redirect, in the control word


def _acs_redirect(files: Files, path: str, field: str) -> bool | None:
    """Walk the extended capabilities: the configuration space of PCI Express from byte 256 on."""
    config = files.bytes(path, field)
    if config is None:
        return None
    if len(config) <= 64:
        files.unknown[field] = "only root reads the configuration space beyond 64 bytes"
        return None
    place, seen = 0x100, 0
    while 0x100 <= place <= len(config) - 8 and seen < 64:
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[place + 6 : place + 8], "little") & _REDIRECT)
        place, seen = header >> 20, seen + 1
    return False
