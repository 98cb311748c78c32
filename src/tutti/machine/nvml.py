"""Reading accelerators from NVML, NVIDIA's management library."""

import contextlib
import ctypes
from typing import Any

from tutti.machine.accelerator import Accelerator, Clocks, Ecc, NvLink, PeerAccess
from tutti.machine.cpus import format_cpu_list
from tutti.machine.files import Files
from tutti.machine.gpus import nvml
from tutti.machine.pci import PciDevice, PcieLink
from tutti.machine.without_nvml import accelerators_without_nvml

# NVML's numbers. They are part of its interface; the bindings lack names for some of them.
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
_READ, _WRITE, _NVLINK, _ATOMICS = 0, 1, 2, 3
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_PEERS = {0: "gpu", 1: "cpu", 2: "switch"}
_SPEED_FIELD = 164
_VOLATILE, _AGGREGATE = 0, 1
_CORRECTED, _UNCORRECTED = 0, 1


class _Ask:
    """Calls NVML; what it refuses is None, and its reason is kept under the field's name."""

    def __init__(self, library: Any, unknown: dict[str, str]) -> None:
        self.library = library
        self.unknown = unknown

    def __call__(self, field: str, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.library, f"nvmlDeviceGet{function}")(*arguments)
        except AttributeError:
            self.unknown[field] = f"this nvidia-ml-py has no nvmlDeviceGet{function}"
        except Exception as error:  # besides NVMLError the bindings have others, of no common base
            said = str(error).partition("\n")[0].partition(". ")[0]
            self.unknown[field] = f"NVML {function}: {said}"
        return None

    def word(self, field: str, words: dict[int, str], function: str, *arguments: Any) -> str | None:
        number = self(field, function, *arguments)
        if number is not None and number not in words:
            self.unknown[field] = f"NVML {function} says {number}"
        return words.get(number)

    def field_value(self, field: str, number: int, handle: Any, scope: int = 0) -> int | None:
        values = self(field, "FieldValues", handle, [(number, scope)])
        if values is None:
            return None
        if values[0].nvmlReturn != 0:
            self.unknown[field] = f"NVML field {number}: error {values[0].nvmlReturn}"
            return None
        # Every kind of whole number lies at the beginning of the union.
        return int(
            values[0].value.ullVal if values[0].valueType in (2, 3) else values[0].value.uiVal
        )


def read_accelerators(
    files: Files, pci: tuple[PciDevice, ...], versions: dict[str, str]
) -> tuple[tuple[Accelerator, ...], tuple[PeerAccess, ...]]:
    """Every GPU of this host, whatever CUDA_VISIBLE_DEVICES hides; adds the driver's versions."""
    with nvml() as library:
        if library is None:
            return accelerators_without_nvml(files), ()
        ask = _Ask(library, files.unknown)
        with contextlib.suppress(library.NVMLError):
            versions["driver"] = library.nvmlSystemGetDriverVersion()
            cuda = library.nvmlSystemGetCudaDriverVersion()
            versions["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        handles = {}
        for index in range(ask("accelerators", "Count") or 0):
            handle = ask(f"accelerators[{index}]", "HandleByIndex", index)
            if handle is not None:  # a GPU that is lost has no handle
                handles[index] = handle
        places = {each.address: each for each in pci}
        accelerators = tuple(
            _read_accelerator(ask, handle, index, f"accelerators[{number}]", places)
            for number, (index, handle) in enumerate(handles.items())
        )
        return accelerators, _read_peers(ask, handles)


def _read_accelerator(
    ask: _Ask, handle: Any, index: int, field: str, places: dict[str, PciDevice]
) -> Accelerator:
    address = _address(ask(f"{field}.pci_address", "PciInfo", handle))
    place = places.get(address or "")
    memory = ask(f"{field}.memory_bytes", "MemoryInfo", handle)
    bar1 = ask(f"{field}.bar1_bytes", "BAR1MemoryInfo", handle)
    capability = ask(f"{field}.compute_capability", "CudaComputeCapability", handle)
    processes = ask(f"{field}.processes", "ComputeRunningProcesses", handle)
    if memory is None:
        ask.unknown[f"{field}.used_bytes"] = ask.unknown[f"{field}.memory_bytes"]
    numa_node = place.numa_node if place else None
    if numa_node is None:
        numa_node = ask(f"{field}.numa_node", "NumaNodeId", handle)
    fabric_state, fabric_healthy = _read_fabric(ask, handle, field)
    watts = {
        name: ask(f"{field}.{name}", function, handle)
        for name, function in (
            ("power_w", "PowerUsage"),
            ("power_limit_w", "EnforcedPowerLimit"),
            ("default_power_limit_w", "PowerManagementDefaultLimit"),
        )
    }
    recovery = ask.field_value(f"{field}.recovery_action", _RECOVERY_FIELD, handle)
    persistence = ask(f"{field}.persistence", "PersistenceMode", handle)
    mig = ask(f"{field}.mig", "MigMode", handle)
    return Accelerator(
        index=index,
        name=ask(f"{field}.name", "Name", handle) or "unknown",
        uuid=ask(f"{field}.uuid", "UUID", handle),
        pci_address=address,
        numa_node=numa_node,
        cpus=_cpus(ask, handle, f"{field}.cpus", place),
        memory_bytes=memory and int(memory.total),
        used_bytes=memory and int(memory.used),
        bar1_bytes=bar1 and int(bar1.bar1Total),
        compute_capability=capability and f"{capability[0]}.{capability[1]}",
        processes=None if processes is None else len(processes),
        pcie=PcieLink(
            generation=ask(f"{field}.pcie.generation", "CurrPcieLinkGeneration", handle),
            width=ask(f"{field}.pcie.width", "CurrPcieLinkWidth", handle),
            max_generation=ask(f"{field}.pcie.max_generation", "MaxPcieLinkGeneration", handle),
            max_width=ask(f"{field}.pcie.max_width", "MaxPcieLinkWidth", handle),
        ),
        pcie_replays=ask(f"{field}.pcie_replays", "PcieReplayCounter", handle),
        nvlinks=_read_nvlinks(ask, handle, f"{field}.nvlinks"),
        fabric_state=fabric_state,
        fabric_healthy=fabric_healthy,
        clocks=_read_clocks(ask, handle, f"{field}.clocks"),
        temperature_c=ask(f"{field}.temperature_c", "Temperature", handle, 0),
        slowdown_c=ask(f"{field}.slowdown_c", "TemperatureThreshold", handle, 1),
        **{name: None if value is None else value / 1000 for name, value in watts.items()},
        ecc=_read_ecc(ask, handle, f"{field}.ecc"),
        recovery_action=None if recovery is None else _RECOVERY.get(recovery, str(recovery)),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
        compute_mode=ask.word(f"{field}.compute_mode", _COMPUTE_MODES, "ComputeMode", handle),
    )


def _address(info: Any) -> str | None:
    """NVML writes 00000000:18:00.0, the kernel 0000:18:00.0."""
    if info is None:
        return None
    text = info.busId if isinstance(info.busId, str) else info.busId.decode()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}".lower()


def _cpus(ask: _Ask, handle: Any, field: str, place: PciDevice | None) -> str | None:
    if place is not None and place.local_cpus:
        return place.local_cpus
    words = ask(field, "CpuAffinity", handle, 16)
    if words is None:
        return None
    bits = sum(int(word) << 64 * number for number, word in enumerate(words))
    return format_cpu_list(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def _read_nvlinks(ask: _Ask, handle: Any, field: str) -> tuple[NvLink, ...] | None:
    links: list[NvLink] = []
    for index in range(ask.library.NVML_NVLINK_MAX_LINKS):
        # Whichever call is asked first for a link beyond the last refuses: there the list ends.
        try:
            active = bool(ask.library.nvmlDeviceGetNvLinkState(handle, index))
        except ask.library.NVMLError as error:
            wrong = (ask.library.NVML_ERROR_INVALID_ARGUMENT, ask.library.NVML_ERROR_NOT_SUPPORTED)
            if error.value in wrong:
                break
            ask.unknown[field] = f"NVML NvLinkState: {error}"
            return None
        links.append(_read_nvlink(ask, handle, index, active, f"{field}[{index}]"))
    return tuple(links)


def _read_nvlink(ask: _Ask, handle: Any, index: int, active: bool, field: str) -> NvLink:
    peer: Any = ask.word(f"{field}.peer_kind", _PEERS, "NvLinkRemoteDeviceType", handle, index)
    errors = {
        name: ask(f"{field}.{name}", "NvLinkErrorCounter", handle, index, number)
        for name, number in (("replay_errors", 0), ("recovery_errors", 1), ("crc_errors", 2))
    }
    return NvLink(
        index=index,
        active=active,
        version=ask(f"{field}.version", "NvLinkVersion", handle, index),
        peer_kind=peer,
        peer_pci=_address(ask(f"{field}.peer_pci", "NvLinkRemotePciInfo", handle, index)),
        speed_mbs=ask.field_value(f"{field}.speed_mbs", _SPEED_FIELD, handle, index),
        **errors,
    )


def _read_fabric(ask: _Ask, handle: Any, field: str) -> tuple[str | None, bool | None]:
    healthy = f"{field}.fabric_healthy"
    if not hasattr(ask.library, "c_nvmlGpuFabricInfoV_t"):
        for name in (f"{field}.fabric_state", healthy):
            ask.unknown[name] = "this nvidia-ml-py has no nvmlDeviceGetGpuFabricInfoV"
        return None, None
    info = ask.library.c_nvmlGpuFabricInfoV_t()
    if ask(f"{field}.fabric_state", "GpuFabricInfoV", handle, ctypes.byref(info)) is None:
        ask.unknown[healthy] = ask.unknown[f"{field}.fabric_state"]
        return None, None
    # Two bits each for degraded bandwidth, route recovery, unhealthy route and access timeouts:
    # 0 is "not told", 1 yes, 2 no.
    told = [info.healthMask >> shift & 3 for shift in (0, 2, 4, 6)]
    state = _FABRIC_STATES.get(info.state, str(info.state))
    if not any(told):
        ask.unknown[healthy] = f"the fabric's state is {state}: it tells nothing of its health"
        return state, None
    return state, 1 not in told


def _read_clocks(ask: _Ask, handle: Any, field: str) -> Clocks:
    reasons = ask(f"{field}.throttle", "CurrentClocksEventReasons", handle)
    return Clocks(
        sm_mhz=ask(f"{field}.sm_mhz", "ClockInfo", handle, _SM),
        memory_mhz=ask(f"{field}.memory_mhz", "ClockInfo", handle, _MEMORY),
        max_sm_mhz=ask(f"{field}.max_sm_mhz", "MaxClockInfo", handle, _SM),
        max_memory_mhz=ask(f"{field}.max_memory_mhz", "MaxClockInfo", handle, _MEMORY),
        throttle=(
            None
            if reasons is None
            else tuple(word for bit, word in _THROTTLE.items() if reasons & bit)
        ),
    )


def _read_ecc(ask: _Ask, handle: Any, field: str) -> Ecc:
    mode = ask(f"{field}.enabled", "EccMode", handle)
    if mode is None:
        ask.unknown[f"{field}.pending"] = ask.unknown[f"{field}.enabled"]
    errors = {
        f"{life}_{severity}": ask(
            f"{field}.{life}_{severity}", "TotalEccErrors", handle, kind, span
        )
        for life, span in (("volatile", _VOLATILE), ("aggregate", _AGGREGATE))
        for severity, kind in (("corrected", _CORRECTED), ("uncorrected", _UNCORRECTED))
    }
    retired = [ask(f"{field}.retired_pages", "RetiredPages", handle, cause) for cause in (0, 1)]
    pending = ask(f"{field}.retired_pages_pending", "RetiredPagesPendingStatus", handle)
    rows = ask(f"{field}.remapped_correctable", "RemappedRows", handle)
    if rows is None:
        for name in ("remapped_uncorrectable", "remap_pending", "remap_failed"):
            ask.unknown[f"{field}.{name}"] = ask.unknown[f"{field}.remapped_correctable"]
    return Ecc(
        enabled=None if mode is None else bool(mode[0]),
        pending=None if mode is None else bool(mode[1]),
        **errors,
        retired_pages=None if None in retired else sum(len(pages) for pages in retired),
        retired_pages_pending=None if pending is None else bool(pending),
        remapped_correctable=rows and rows[0],
        remapped_uncorrectable=rows and rows[1],
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
    )


def _read_peers(ask: _Ask, handles: dict[int, Any]) -> tuple[PeerAccess, ...]:
    pairs = [(src, dst) for src in handles for dst in handles if src != dst]
    return tuple(
        _read_peer(ask, handles, src, dst, f"peers[{number}]")
        for number, (src, dst) in enumerate(pairs)
    )


def _read_peer(ask: _Ask, handles: dict[int, Any], src: int, dst: int, field: str) -> PeerAccess:
    two = (handles[src], handles[dst])
    return PeerAccess(
        src=src,
        dst=dst,
        read=ask.word(f"{field}.read", _P2P, "P2PStatus", *two, _READ),
        write=ask.word(f"{field}.write", _P2P, "P2PStatus", *two, _WRITE),
        nvlink=ask.word(f"{field}.nvlink", _P2P, "P2PStatus", *two, _NVLINK),
        atomics=ask.word(f"{field}.atomics", _P2P, "P2PStatus", *two, _ATOMICS),
        driver_class=ask.word(f"{field}.driver_class", _ANCESTORS, "TopologyCommonAncestor", *two),
    )
