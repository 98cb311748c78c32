"""PciDevice: GPUs, NICs, NVSwitches and the PCI bridges above them, as listed in /sys."""

import re
from dataclasses import dataclass
from typing import Literal

from tutti.machine.sysfs import SysFiles


@dataclass(frozen=True)
class PcieLink:
    """The PCIe link of a device. An idle GPU reduces the generation, but not the width."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


Kind = Literal["gpu", "nic", "nvswitch", "bridge"]


@dataclass(frozen=True)
class PciDevice:
    """A GPU, NIC or NVSwitch, or a bridge above such a device."""

    address: str
    """The PCI address in the kernel's format, such as "0000:18:00.0"."""
    kind: Kind
    path: tuple[str, ...]
    """The root complex (such as "pci0000:15"), the bridges and the device itself."""
    vendor: str | None
    driver: str | None
    """The name of the driver; "" if no driver is bound."""
    numa_node: int | None
    local_cpus: str | None
    link: PcieLink | None
    iommu_type: str | None
    """One of "identity", "DMA" and "DMA-FQ", or "none" if the device is in no IOMMU group."""
    acs_redirect: bool | None
    """Whether ACS redirects peer-to-peer traffic to the root complex. The value is always False
    for devices that are not bridges."""
    correctable_errors: int | None
    uncorrectable_errors: int | None
    """Non-fatal plus fatal errors since boot, from Advanced Error Reporting."""


_DEVICES = "/sys/bus/pci/devices"
_NVIDIA, _AMD = "0x10de", "0x1002"
# {GT/s per lane: PCIe generation}
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}
_ACS_CAPABILITY = 0x000D
_ACS_REDIRECT = 0b1100  # P2P request redirect and completion redirect, in the control register


def read_pci(files: SysFiles) -> tuple[PciDevice, ...]:
    """Return all GPUs, NICs and NVSwitches, and every bridge above one of them."""
    addresses = files.names(_DEVICES)
    if not addresses:
        files.unknown["pci"] = f"{_DEVICES} is empty or does not exist"
    kinds: dict[str, Kind] = {a: kind for a in addresses if (kind := _kind(files, a)) is not None}
    for address in list(kinds):
        for bridge in _path(files, address)[1:-1]:
            kinds.setdefault(bridge, "bridge")
    return tuple(
        _read_device(files, address, kinds[address], f"pci[{number}]")
        for number, address in enumerate(sorted(kinds))
    )


def _path(files: SysFiles, address: str) -> tuple[str, ...]:
    """Return the path from the root complex to the device, or () if /sys has no such path."""
    parts = (files.target(f"{_DEVICES}/{address}") or "").split("/")
    roots = [index for index, part in enumerate(parts) if re.match(r"pci[0-9a-f]{4,}:", part)]
    return tuple(parts[roots[0] :]) if roots else ()


def _kind(files: SysFiles, address: str) -> Kind | None:
    """Return the kind of a device, or None if such devices are not recorded.

    The PCI class codes are 0300 and 0302 for display controllers, 1200 for accelerators, 0680 for
    NVSwitches and 02xx for network controllers.
    """
    code = (files.text(f"{_DEVICES}/{address}/class") or "")[2:6]
    vendor = files.text(f"{_DEVICES}/{address}/vendor")
    if code in ("0300", "0302", "1200") and vendor in (_NVIDIA, _AMD):
        return "gpu"
    if code == "0680" and vendor == _NVIDIA:
        return "nvswitch"
    return "nic" if code.startswith("02") else None


def _read_device(files: SysFiles, address: str, kind: Kind, field: str) -> PciDevice:
    directory = f"{_DEVICES}/{address}"

    def count_errors(name: str, *severities: str) -> int | None:
        paths = [f"{directory}/aer_dev_{severity}" for severity in severities]
        texts = [files.text(path, f"{field}.{name}") for path in paths]
        counts = re.findall(r"TOTAL_ERR_\w+ (\d+)", "\n".join(text or "" for text in texts))
        return None if None in texts else sum(map(int, counts))

    iommu_type: str | None = "none"
    if files.exists(f"{directory}/iommu_group"):
        iommu_type = files.text(f"{directory}/iommu_group/type", f"{field}.iommu_type")
    acs_redirect: bool | None = False
    if kind == "bridge":
        acs_redirect = _read_acs_redirect(files, f"{directory}/config", f"{field}.acs_redirect")
    return PciDevice(
        address=address,
        kind=kind,
        path=_path(files, address),
        vendor=files.text(f"{directory}/vendor", f"{field}.vendor"),
        driver=files.target_name(f"{directory}/driver"),
        numa_node=files.numa_node(directory, f"{field}.numa_node"),
        local_cpus=files.text(f"{directory}/local_cpulist", f"{field}.local_cpus"),
        link=_read_link(files, directory, f"{field}.link"),
        iommu_type=iommu_type,
        acs_redirect=acs_redirect,
        correctable_errors=count_errors("correctable_errors", "correctable"),
        uncorrectable_errors=count_errors("uncorrectable_errors", "nonfatal", "fatal"),
    )


def _read_link(files: SysFiles, directory: str, field: str) -> PcieLink | None:
    if files.text(f"{directory}/max_link_speed", field) is None:
        return None  # a virtual device has no link
    values = {}
    for file, prefix in (("current", ""), ("max", "max_")):
        path = f"{directory}/{file}_link_speed"
        speed = files.text(path, f"{field}.{prefix}generation")
        # `speed` is "32.0 GT/s PCIe", or "Unknown" in a virtual machine.
        generation = _GENERATIONS.get((speed or "").partition(" GT/s")[0])
        if speed is not None and generation is None:
            files.unknown[f"{field}.{prefix}generation"] = f"{path} contains {speed!r}"
        values[f"{prefix}generation"] = generation
        # A width of 0 means that the link is down. Virtual machines report a width of 255.
        values[f"{prefix}width"] = files.number(
            f"{directory}/{file}_link_width", f"{field}.{prefix}width", range(1, 255)
        )
    return PcieLink(**values)


def _read_acs_redirect(files: SysFiles, path: str, field: str) -> bool | None:
    """Return whether the ACS capability of a bridge redirects peer-to-peer traffic.

    ACS is an extended PCI capability. The linked list of these capabilities starts at byte 256 of
    the PCI configuration space.
    """
    config = files.bytes(path, field)
    if config is None:
        return None
    if len(config) <= 64:
        files.unknown[field] = "only root can read PCI configuration space beyond 64 bytes"
        return None
    offset, visited = 0x100, 0
    while 0x100 <= offset <= len(config) - 8 and visited < 64:
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[offset + 6 : offset + 8], "little")
            return bool(control & _ACS_REDIRECT)
        offset, visited = header >> 20, visited + 1
    return False
