"""GPUs of this host: state and links from NVML, what CUDA_VISIBLE_DEVICES shows, peer access."""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti.machine.cpu_numa import format_cpu_list
from tutti.machine.pci import PciDevice, PcieLink, read_numa_node
from tutti.machine.sysfs import SysFiles


@dataclass(frozen=True)
class NvLink:
    """One NVLink of a GPU. Error counters count since the driver was loaded."""

    index: int
    active: bool | None
    version: int | None
    peer_kind: Literal["gpu", "switch", "cpu"] | None
    peer_pci: str | None
    speed_mbs: int | None
    """One direction, in 1e6 bytes/s, as the driver reports it (H100: 26562)."""
    replay_errors: int | None
    recovery_errors: int | None
    crc_errors: int | None


@dataclass(frozen=True)
class Clocks:
    """Clocks in MHz and the driver's reasons for lowering them."""

    sm_mhz: int | None
    memory_mhz: int | None
    max_sm_mhz: int | None
    max_memory_mhz: int | None
    throttle: tuple[str, ...] | None
    """Any of idle, application_clocks, sw_power_cap, hw_slowdown, sync_boost, sw_thermal,
    hw_thermal, hw_power_brake, display; () for none."""


@dataclass(frozen=True)
class Ecc:
    """Memory errors: volatile counts are since the driver was loaded, aggregate for life."""

    enabled: bool | None
    pending: bool | None
    """The value of `enabled` after the next reset."""
    volatile_corrected: int | None
    volatile_uncorrected: int | None
    aggregate_corrected: int | None
    aggregate_uncorrected: int | None
    retired_pages: int | None
    retired_pages_pending: bool | None
    remapped_correctable: int | None
    remapped_uncorrectable: int | None
    remap_pending: bool | None
    remap_failed: bool | None


@dataclass(frozen=True)
class Accelerator:
    """One GPU, as the driver and /sys describe it."""

    index: int
    name: str
    uuid: str | None
    pci_address: str | None
    numa_node: int | None
    cpus: str | None
    """The CPUs of its NUMA node."""
    memory_bytes: int | None
    used_bytes: int | None
    bar1_bytes: int | None
    compute_capability: str | None
    processes: int | None
    """The number of processes with a compute context on it."""
    pcie: PcieLink | None
    pcie_replays: int | None
    nvlinks: tuple[NvLink, ...] | None
    """() if the GPU has no NVLink."""
    fabric_state: str | None
    """State of the NVSwitch fabric: not_supported, not_started, in_progress, completed."""
    fabric_healthy: bool | None
    clocks: Clocks
    temperature_c: int | None
    slowdown_c: int | None
    power_w: float | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    ecc: Ecc
    recovery_action: str | None
    """none, gpu_reset, node_reboot, drain_p2p, drain_and_reset."""
    persistence: bool | None
    mig: bool | None
    compute_mode: str | None
    """default, exclusive_process, prohibited."""


@dataclass(frozen=True)
class PeerAccess:
    """Whether GPU `src` can access the memory of GPU `dst`.

    The values are those of `nvidia-smi topo -p2p r`: OK, or the reason CNS, GNS, TNS, DR, NS, U.
    """

    src: int
    dst: int
    read: str | None
    write: str | None
    nvlink: str | None
    atomics: str | None
    driver_class: str | None
    """PIX, PXB, PHB, NODE or SYS, as the driver classifies the PCIe path."""


# --- GPUs that CUDA shows to a process -----------------------------------------------------------


def visible_gpu_count(env: Mapping[str, str] | None = None) -> int:
    """The number of GPUs that CUDA shows to a process with this environment; needs no torch."""
    env = os.environ if env is None else env
    installed = _installed_gpus()
    selected = env.get("CUDA_VISIBLE_DEVICES")
    if selected is None:
        return installed
    count = 0
    for entry in selected.split(","):
        entry = entry.strip()
        # CUDA ignores the rest of the list after the first entry that is not a device.
        if entry.isdecimal() and int(entry) >= installed:
            break
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return min(count, installed) if "MIG-" not in selected else count


def _installed_gpus() -> int:
    with nvml() as library:
        if library is not None:
            return int(library.nvmlDeviceGetCount())
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def numa_node_of_gpu(pci_address: str) -> int | None:
    """The NUMA node of the PCI device at an address; None if the kernel does not know it."""
    return read_numa_node(SysFiles(), f"/sys/bus/pci/devices/{pci_address.lower()}", "")


@contextmanager
def nvml() -> Iterator[Any]:
    """The initialised NVML library; None if nvidia-ml-py or the driver is not installed."""
    library, _ = _start_nvml()
    try:
        yield library
    finally:
        if library is not None:
            library.nvmlShutdown()


def _start_nvml() -> tuple[Any, str]:
    """The initialised NVML library, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return pynvml, ""


# --- all GPUs of the host, from NVML -------------------------------------------------------------

# Constants of the NVML interface; older bindings have no names for some of them.
_SM, _MEMORY = 1, 2
_THROTTLE = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
_RECOVERY_FIELD = 230
_RECOVERY = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset"}
_P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_P2P_CAPABILITIES = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
_PCI_CLASSES = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_NVLINK_PEERS = {0: "gpu", 1: "cpu", 2: "switch"}
_NVLINK_SPEED_FIELD = 164


class _Query:
    """Calls NVML. A call that fails returns None, and `unknown` gets NVML's reason."""

    def __init__(self, library: Any, unknown: dict[str, str]) -> None:
        self.library = library
        self.unknown = unknown

    def __call__(self, field: str, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.library, f"nvmlDeviceGet{function}")(*arguments)
        except AttributeError:
            self.unknown[field] = f"this nvidia-ml-py has no nvmlDeviceGet{function}"
        except Exception as error:  # the bindings raise more than NVMLError, without a common base
            message = str(error).partition("\n")[0].partition(". ")[0]
            self.unknown[field] = f"NVML {function}: {message}"
        return None

    def name(self, field: str, names: dict[int, str], function: str, *arguments: Any) -> str | None:
        """The name of an enum value."""
        number = self(field, function, *arguments)
        if number is not None and number not in names:
            self.unknown[field] = f"NVML {function} returned {number}"
        return names.get(number)

    def flag(self, field: str, function: str, *arguments: Any) -> bool | None:
        value = self(field, function, *arguments)
        return None if value is None else bool(value)

    def field_value(self, field: str, number: int, handle: Any, scope: int = 0) -> int | None:
        values = self(field, "FieldValues", handle, [(number, scope)])
        if values is None:
            return None
        if values[0].nvmlReturn != 0:
            self.unknown[field] = f"NVML field {number}: error {values[0].nvmlReturn}"
            return None
        # Value types 2 and 3 are 64 bits wide, the other integer types 32.
        wide = values[0].valueType in (2, 3)
        return int(values[0].value.ullVal if wide else values[0].value.uiVal)


def read_accelerators(
    files: SysFiles, pci: tuple[PciDevice, ...], versions: dict[str, str]
) -> tuple[tuple[Accelerator, ...], tuple[PeerAccess, ...]]:
    """All GPUs of this host, also those that CUDA_VISIBLE_DEVICES hides.

    Adds the versions of the driver and of the CUDA it supports to `versions`.
    """
    with nvml() as library:
        if library is None:
            files.unknown["accelerators"] = _start_nvml()[1]
            return (), ()
        query = _Query(library, files.unknown)
        with contextlib.suppress(library.NVMLError):
            versions["driver"] = library.nvmlSystemGetDriverVersion()
            cuda = library.nvmlSystemGetCudaDriverVersion()
            versions["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        handles = {}
        for index in range(query("accelerators", "Count") or 0):
            handle = query(f"accelerators[{index}]", "HandleByIndex", index)
            if handle is not None:  # a GPU that fell off the bus has no handle
                handles[index] = handle
        devices = {each.address: each for each in pci}
        accelerators = tuple(
            _read_accelerator(query, handle, index, f"accelerators[{number}]", devices)
            for number, (index, handle) in enumerate(handles.items())
        )
        return accelerators, _read_peers(query, handles)


def _read_accelerator(
    query: _Query, handle: Any, index: int, field: str, devices: dict[str, PciDevice]
) -> Accelerator:
    address = _pci_address(query(f"{field}.pci_address", "PciInfo", handle))
    device = devices.get(address or "")
    memory = query(f"{field}.memory_bytes", "MemoryInfo", handle)
    bar1 = query(f"{field}.bar1_bytes", "BAR1MemoryInfo", handle)
    capability = query(f"{field}.compute_capability", "CudaComputeCapability", handle)
    processes = query(f"{field}.processes", "ComputeRunningProcesses", handle)
    if memory is None:
        query.unknown[f"{field}.used_bytes"] = query.unknown[f"{field}.memory_bytes"]
    numa_node = device.numa_node if device else None
    if numa_node is None:
        numa_node = query(f"{field}.numa_node", "NumaNodeId", handle)
    fabric_state, fabric_healthy = _read_fabric(query, handle, field)
    milliwatts = {
        name: query(f"{field}.{name}", function, handle)
        for name, function in (
            ("power_w", "PowerUsage"),
            ("power_limit_w", "EnforcedPowerLimit"),
            ("default_power_limit_w", "PowerManagementDefaultLimit"),
        )
    }
    recovery = query.field_value(f"{field}.recovery_action", _RECOVERY_FIELD, handle)
    mig = query(f"{field}.mig", "MigMode", handle)
    return Accelerator(
        index=index,
        name=query(f"{field}.name", "Name", handle) or "unknown",
        uuid=query(f"{field}.uuid", "UUID", handle),
        pci_address=address,
        numa_node=numa_node,
        cpus=_local_cpus(query, handle, f"{field}.cpus", device),
        memory_bytes=memory and int(memory.total),
        used_bytes=memory and int(memory.used),
        bar1_bytes=bar1 and int(bar1.bar1Total),
        compute_capability=capability and f"{capability[0]}.{capability[1]}",
        processes=None if processes is None else len(processes),
        pcie=PcieLink(
            generation=query(f"{field}.pcie.generation", "CurrPcieLinkGeneration", handle),
            width=query(f"{field}.pcie.width", "CurrPcieLinkWidth", handle),
            max_generation=query(f"{field}.pcie.max_generation", "MaxPcieLinkGeneration", handle),
            max_width=query(f"{field}.pcie.max_width", "MaxPcieLinkWidth", handle),
        ),
        pcie_replays=query(f"{field}.pcie_replays", "PcieReplayCounter", handle),
        nvlinks=_read_nvlinks(query, handle, f"{field}.nvlinks"),
        fabric_state=fabric_state,
        fabric_healthy=fabric_healthy,
        clocks=_read_clocks(query, handle, f"{field}.clocks"),
        temperature_c=query(f"{field}.temperature_c", "Temperature", handle, 0),
        slowdown_c=query(f"{field}.slowdown_c", "TemperatureThreshold", handle, 1),
        **{name: None if value is None else value / 1000 for name, value in milliwatts.items()},
        ecc=_read_ecc(query, handle, f"{field}.ecc"),
        recovery_action=None if recovery is None else _RECOVERY.get(recovery, str(recovery)),
        persistence=query.flag(f"{field}.persistence", "PersistenceMode", handle),
        mig=None if mig is None else bool(mig[0]),
        compute_mode=query.name(f"{field}.compute_mode", _COMPUTE_MODES, "ComputeMode", handle),
    )


def _pci_address(info: Any) -> str | None:
    """NVML writes 00000000:18:00.0, the kernel 0000:18:00.0."""
    if info is None:
        return None
    text = info.busId if isinstance(info.busId, str) else info.busId.decode()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}".lower()


def _local_cpus(query: _Query, handle: Any, field: str, device: PciDevice | None) -> str | None:
    if device is not None and device.local_cpus:
        return device.local_cpus
    words = query(field, "CpuAffinity", handle, 16)
    if words is None:
        return None
    mask = sum(int(word) << 64 * number for number, word in enumerate(words))
    return format_cpu_list(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def _read_nvlinks(query: _Query, handle: Any, field: str) -> tuple[NvLink, ...] | None:
    links: list[NvLink] = []
    for index in range(query.library.NVML_NVLINK_MAX_LINKS):
        # NVML does not report the number of links: the first index it rejects ends the list.
        try:
            active = bool(query.library.nvmlDeviceGetNvLinkState(handle, index))
        except query.library.NVMLError as error:
            if error.value in (
                query.library.NVML_ERROR_INVALID_ARGUMENT,
                query.library.NVML_ERROR_NOT_SUPPORTED,
            ):
                break
            query.unknown[field] = f"NVML NvLinkState: {error}"
            return None
        links.append(_read_nvlink(query, handle, index, active, f"{field}[{index}]"))
    return tuple(links)


def _read_nvlink(query: _Query, handle: Any, index: int, active: bool, field: str) -> NvLink:
    peer: Any = query.name(
        f"{field}.peer_kind", _NVLINK_PEERS, "NvLinkRemoteDeviceType", handle, index
    )
    errors = {
        name: query(f"{field}.{name}", "NvLinkErrorCounter", handle, index, number)
        for name, number in (("replay_errors", 0), ("recovery_errors", 1), ("crc_errors", 2))
    }
    return NvLink(
        index=index,
        active=active,
        version=query(f"{field}.version", "NvLinkVersion", handle, index),
        peer_kind=peer,
        peer_pci=_pci_address(query(f"{field}.peer_pci", "NvLinkRemotePciInfo", handle, index)),
        speed_mbs=query.field_value(f"{field}.speed_mbs", _NVLINK_SPEED_FIELD, handle, index),
        **errors,
    )


def _read_fabric(query: _Query, handle: Any, field: str) -> tuple[str | None, bool | None]:
    """State and health of the NVSwitch fabric."""
    state_field, health_field = f"{field}.fabric_state", f"{field}.fabric_healthy"
    if not hasattr(query.library, "c_nvmlGpuFabricInfoV_t"):
        for name in (state_field, health_field):
            query.unknown[name] = "this nvidia-ml-py has no nvmlDeviceGetGpuFabricInfoV"
        return None, None
    info = query.library.c_nvmlGpuFabricInfoV_t()
    if query(state_field, "GpuFabricInfoV", handle, ctypes.byref(info)) is None:
        query.unknown[health_field] = query.unknown[state_field]
        return None, None
    # Two bits each for degraded bandwidth, route recovery, unhealthy route and access timeout:
    # 0 means not reported, 1 true, 2 false.
    bits = [info.healthMask >> shift & 3 for shift in (0, 2, 4, 6)]
    state = _FABRIC_STATES.get(info.state, str(info.state))
    if not any(bits):
        query.unknown[health_field] = f"fabric state {state}: no health is reported"
        return state, None
    return state, 1 not in bits


def _read_clocks(query: _Query, handle: Any, field: str) -> Clocks:
    reasons = query(f"{field}.throttle", "CurrentClocksEventReasons", handle)
    throttle = None
    if reasons is not None:
        throttle = tuple(name for bit, name in _THROTTLE.items() if reasons & bit)
    return Clocks(
        sm_mhz=query(f"{field}.sm_mhz", "ClockInfo", handle, _SM),
        memory_mhz=query(f"{field}.memory_mhz", "ClockInfo", handle, _MEMORY),
        max_sm_mhz=query(f"{field}.max_sm_mhz", "MaxClockInfo", handle, _SM),
        max_memory_mhz=query(f"{field}.max_memory_mhz", "MaxClockInfo", handle, _MEMORY),
        throttle=throttle,
    )


def _read_ecc(query: _Query, handle: Any, field: str) -> Ecc:
    mode = query(f"{field}.enabled", "EccMode", handle)
    if mode is None:
        query.unknown[f"{field}.pending"] = query.unknown[f"{field}.enabled"]
    errors = {
        f"{life}_{severity}": query(
            f"{field}.{life}_{severity}", "TotalEccErrors", handle, kind, counter
        )
        for counter, life in enumerate(("volatile", "aggregate"))
        for kind, severity in enumerate(("corrected", "uncorrected"))
    }
    retired = [query(f"{field}.retired_pages", "RetiredPages", handle, cause) for cause in (0, 1)]
    rows = query(f"{field}.remapped_correctable", "RemappedRows", handle)
    if rows is None:
        for name in ("remapped_uncorrectable", "remap_pending", "remap_failed"):
            query.unknown[f"{field}.{name}"] = query.unknown[f"{field}.remapped_correctable"]
    return Ecc(
        enabled=None if mode is None else bool(mode[0]),
        pending=None if mode is None else bool(mode[1]),
        **errors,
        retired_pages=None if None in retired else sum(len(pages) for pages in retired),
        retired_pages_pending=query.flag(
            f"{field}.retired_pages_pending", "RetiredPagesPendingStatus", handle
        ),
        remapped_correctable=rows and rows[0],
        remapped_uncorrectable=rows and rows[1],
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
    )


def _read_peers(query: _Query, handles: dict[int, Any]) -> tuple[PeerAccess, ...]:
    pairs = [(src, dst) for src in handles for dst in handles if src != dst]
    found = []
    for number, (src, dst) in enumerate(pairs):
        field, both = f"peers[{number}]", (handles[src], handles[dst])
        access = {
            name: query.name(f"{field}.{name}", _P2P, "P2PStatus", *both, capability)
            for name, capability in _P2P_CAPABILITIES.items()
        }
        pci_class = query.name(
            f"{field}.driver_class", _PCI_CLASSES, "TopologyCommonAncestor", *both
        )
        found.append(PeerAccess(src, dst, **access, driver_class=pci_class))
    return tuple(found)
