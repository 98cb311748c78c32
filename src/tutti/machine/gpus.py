"""GPUs of this host: state, links and peer access from NVML, and the number of visible GPUs."""

import contextlib
import ctypes
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti.machine.cpu_numa import format_cpu_list
from tutti.machine.pci import PciDevice, PcieLink
from tutti.machine.sysfs import SysFiles


@dataclass(frozen=True)
class NvLink:
    """One NVLink of a GPU. The error counters start at 0 when the driver is loaded."""

    index: int
    active: bool | None
    version: int | None
    peer_kind: Literal["gpu", "switch", "cpu"] | None
    peer_pci: str | None
    speed_mbs: int | None
    """Speed of one direction in 1e6 bytes/s, as reported by the driver (H100: 26562)."""
    replay_errors: int | None
    recovery_errors: int | None
    crc_errors: int | None

    @property
    def errors(self) -> dict[str, int]:
        """{kind of error: count} for all counts that are not zero."""
        counts = {
            "replay": self.replay_errors,
            "recovery": self.recovery_errors,
            "CRC": self.crc_errors,
        }
        return {kind: count for kind, count in counts.items() if count}


@dataclass(frozen=True)
class Clocks:
    """Clock rates in MHz, and the driver's reasons for reducing the clock rates."""

    sm_mhz: int | None
    memory_mhz: int | None
    max_sm_mhz: int | None
    max_memory_mhz: int | None
    throttle: tuple[str, ...] | None
    """Any of "idle", "application_clocks", "sw_power_cap", "hw_slowdown", "sync_boost",
    "sw_thermal", "hw_thermal", "hw_power_brake" and "display"; () if the clock rates are not
    reduced."""


@dataclass(frozen=True)
class Ecc:
    """ECC state and memory errors of a GPU.

    Volatile counts start when the driver is loaded. Aggregate counts cover the GPU's lifetime.
    """

    enabled: bool | None
    pending: bool | None
    """The value that `enabled` will have after the next GPU reset."""
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
    """One GPU, as described by the driver and /sys."""

    index: int
    name: str
    uuid: str | None
    pci_address: str | None
    numa_node: int | None
    cpus: str | None
    """The CPUs of the GPU's NUMA node, in the format "0-3,8"."""
    memory_bytes: int | None
    used_bytes: int | None
    bar1_bytes: int | None
    compute_capability: str | None
    processes: int | None
    """The number of processes with a compute context on the GPU."""
    pcie: PcieLink | None
    pcie_replays: int | None
    nvlinks: tuple[NvLink, ...] | None
    """The NVLinks; () if the GPU has none."""
    fabric_state: str | None
    """The state of the NVSwitch fabric: "not_supported", "not_started", "in_progress" or
    "completed"."""
    fabric_healthy: bool | None
    clocks: Clocks
    temperature_c: int | None
    slowdown_c: int | None
    power_w: float | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    ecc: Ecc
    recovery_action: str | None
    """One of "none", "gpu_reset", "node_reboot", "drain_p2p" and "drain_and_reset"."""
    persistence: bool | None
    mig: bool | None
    compute_mode: str | None
    """One of "default", "exclusive_process", "exclusive_thread" and "prohibited"."""

    @property
    def active_nvlinks(self) -> list[NvLink]:
        """The NVLinks that are known to be active."""
        return [link for link in self.nvlinks or () if link.active]


@dataclass(frozen=True)
class PeerAccess:
    """Whether GPU `src` can access the memory of GPU `dst`.

    The values are those of `nvidia-smi topo -p2p r`. "OK" means that access is possible. The other
    values (CNS, GNS, TNS, DR, NS and U) are reasons, which checks/known_errors.toml explains.
    """

    src: int
    dst: int
    read: str | None
    write: str | None
    nvlink: str | None
    atomics: str | None
    driver_class: str | None
    """The class of the PCIe path that the driver reports: PIX, PXB, PHB, NODE or SYS."""


# --- GPUs that are visible to CUDA ---------------------------------------------------------------


def visible_gpu_count(env: Mapping[str, str] | None = None) -> int:
    """Return the number of GPUs that CUDA sees with the environment variables `env`.

    torch is not imported.
    """
    env = os.environ if env is None else env
    with nvml() as library:
        if library is not None:
            installed = int(library.nvmlDeviceGetCount())
        else:
            installed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    selected = env.get("CUDA_VISIBLE_DEVICES")
    if selected is None:
        return installed

    def is_device(entry: str) -> bool:
        return int(entry) < installed if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))

    # CUDA ignores the rest of the list after the first entry that is not a device.
    entries = [entry.strip() for entry in selected.split(",")]
    count = len(list(itertools.takewhile(is_device, entries)))
    return min(count, installed) if "MIG-" not in selected else count


def numa_node_of_gpu(pci_address: str) -> int | None:
    """Return the NUMA node of the GPU at a PCI address, or None if the node is unknown."""
    return SysFiles().numa_node(f"/sys/bus/pci/devices/{pci_address.lower()}")


@contextmanager
def nvml(reasons: dict[str, str] | None = None) -> Iterator[Any]:
    """Yield the initialised NVML library, or None if nvidia-ml-py or the driver is missing.

    If NVML is not available, the reason is stored as `reasons["accelerators"]`.
    """
    reason = ""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        reason = "the package nvidia-ml-py is not installed"
    except pynvml.NVMLError as error:
        reason = f"NVML: {error}"
    if reason:
        if reasons is not None:
            reasons["accelerators"] = reason
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


# --- all GPUs of the host, from NVML -------------------------------------------------------------

# Constants of the NVML interface. Some of them have no name in older versions of nvidia-ml-py.
_SM, _MEMORY = 1, 2
_THROTTLE = (  # in bit order, lowest bit first
    "idle",
    "application_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display",
)
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
_RECOVERY_FIELD = 230
_RECOVERY = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset"}
_P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_PCI_CLASSES = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_NVLINK_PEERS = {0: "gpu", 1: "cpu", 2: "switch"}
_NVLINK_SPEED_FIELD = 164


@dataclass(frozen=True)
class _Query:
    """Calls NVML functions. `handles` identifies the GPU, the NVLink or the pair of GPUs.

    If an NVML call fails, the result is None, and NVML's reason is stored in `unknown` for each
    field that the call would have set. The argument `names` lists these fields, separated by
    spaces, as paths below `field`.
    """

    library: Any
    unknown: dict[str, str]
    field: str
    handles: tuple[Any, ...]

    def part(self, name: str, *handles: Any) -> "_Query":
        """Return a query for the subfield `name`, with additional handles."""
        handles = (*self.handles, *handles)
        return _Query(self.library, self.unknown, f"{self.field}.{name}".lstrip("."), handles)

    def note(self, names: str, reason: str) -> None:
        """Record why the fields in `names` are unknown."""
        for name in names.split():
            self.unknown[f"{self.field}.{name}".lstrip(".")] = reason

    def __call__(self, names: str, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.library, f"nvmlDeviceGet{function}")(*self.handles, *arguments)
        except AttributeError:
            self.note(names, f"this nvidia-ml-py has no nvmlDeviceGet{function}")
        except Exception as error:  # the exceptions of nvidia-ml-py have no common base class
            message = str(error).partition("\n")[0].partition(". ")[0]
            self.note(names, f"NVML {function}: {message}")
        return None

    def enum(self, name: str, words: dict[int, str], function: str, *arguments: Any) -> Any:
        """Call an NVML function that returns a number, and return the number's entry in `words`."""
        number = self(name, function, *arguments)
        if number is not None and number not in words:
            self.note(name, f"NVML {function} returned {number}")
        return words.get(number)

    def field_value(self, name: str, number: int, scope: int = 0) -> int | None:
        gpu = _Query(self.library, self.unknown, self.field, self.handles[:1])
        values = gpu(name, "FieldValues", [(number, scope)])
        if values is None:
            return None
        if values[0].nvmlReturn != 0:
            self.note(name, f"NVML field {number}: error {values[0].nvmlReturn}")
            return None
        # Value types 2 and 3 have 64 bits. The other integer types have 32 bits.
        wide = values[0].valueType in (2, 3)
        return int(values[0].value.ullVal if wide else values[0].value.uiVal)


def read_accelerators(
    files: SysFiles, pci: tuple[PciDevice, ...], versions: dict[str, str]
) -> tuple[tuple[Accelerator, ...], tuple[PeerAccess, ...]]:
    """Return (all GPUs of this host, peer access of each pair of GPUs).

    GPUs that CUDA_VISIBLE_DEVICES hides are included. The driver version and the newest CUDA
    version that the driver supports are added to `versions`.
    """
    with nvml(files.unknown) as library:
        if library is None:
            return (), ()
        with contextlib.suppress(library.NVMLError):
            versions["driver"] = library.nvmlSystemGetDriverVersion()
            cuda = library.nvmlSystemGetCudaDriverVersion()
            versions["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        handles = {}
        host = _Query(library, files.unknown, "", ())
        for index in range(host("accelerators", "Count") or 0):
            handle = host(f"accelerators[{index}]", "HandleByIndex", index)
            if handle is not None:  # a GPU that has fallen off the PCI bus has no handle
                handles[index] = handle
        devices = {device.address: device for device in pci}
        accelerators = tuple(
            _read_accelerator(host.part(f"accelerators[{number}]", handle), index, devices)
            for number, (index, handle) in enumerate(handles.items())
        )
        peers: list[PeerAccess] = []
        for src, dst in itertools.permutations(handles, 2):
            query = host.part(f"peers[{len(peers)}]", handles[src], handles[dst])
            access = {
                name: query.enum(name, _P2P, "P2PStatus", capability)
                for capability, name in enumerate(("read", "write", "nvlink", "atomics"))
            }
            pci_class = query.enum("driver_class", _PCI_CLASSES, "TopologyCommonAncestor")
            peers.append(PeerAccess(src, dst, **access, driver_class=pci_class))
        return accelerators, tuple(peers)


def _read_accelerator(query: _Query, index: int, devices: dict[str, PciDevice]) -> Accelerator:
    def watts(name: str, function: str) -> float | None:
        milliwatts = query(name, function)
        return None if milliwatts is None else milliwatts / 1000

    address = _pci_address(query("pci_address", "PciInfo"))
    device = devices.get(address or "")
    memory = query("memory_bytes used_bytes", "MemoryInfo")
    bar1 = query("bar1_bytes", "BAR1MemoryInfo")
    numa_node = device.numa_node if device else None
    if numa_node is None:
        numa_node = query("numa_node", "NumaNodeId")
    cpus = device.local_cpus if device else None
    if not cpus and (words := query("cpus", "CpuAffinity", 16)) is not None:
        mask = sum(int(word) << 64 * number for number, word in enumerate(words))
        cpus = format_cpu_list(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)
    capability = query("compute_capability", "CudaComputeCapability")
    processes = query("processes", "ComputeRunningProcesses")
    fabric_state, fabric_healthy = _read_fabric(query)
    recovery = query.field_value("recovery_action", _RECOVERY_FIELD)
    pcie = query.part("pcie")
    return Accelerator(
        index=index,
        name=query("name", "Name") or "unknown",
        uuid=query("uuid", "UUID"),
        pci_address=address,
        numa_node=numa_node,
        cpus=cpus,
        memory_bytes=memory and int(memory.total),
        used_bytes=memory and int(memory.used),
        bar1_bytes=bar1 and int(bar1.bar1Total),
        compute_capability=capability and f"{capability[0]}.{capability[1]}",
        processes=None if processes is None else len(processes),
        pcie=PcieLink(
            generation=pcie("generation", "CurrPcieLinkGeneration"),
            width=pcie("width", "CurrPcieLinkWidth"),
            max_generation=pcie("max_generation", "MaxPcieLinkGeneration"),
            max_width=pcie("max_width", "MaxPcieLinkWidth"),
        ),
        pcie_replays=query("pcie_replays", "PcieReplayCounter"),
        nvlinks=_read_nvlinks(query),
        fabric_state=fabric_state,
        fabric_healthy=fabric_healthy,
        clocks=_read_clocks(query.part("clocks")),
        temperature_c=query("temperature_c", "Temperature", 0),
        slowdown_c=query("slowdown_c", "TemperatureThreshold", 1),
        power_w=watts("power_w", "PowerUsage"),
        power_limit_w=watts("power_limit_w", "EnforcedPowerLimit"),
        default_power_limit_w=watts("default_power_limit_w", "PowerManagementDefaultLimit"),
        ecc=_read_ecc(query.part("ecc")),
        recovery_action=None if recovery is None else _RECOVERY.get(recovery, str(recovery)),
        persistence=_flag(query("persistence", "PersistenceMode")),
        mig=_flag((query("mig", "MigMode") or [None])[0]),
        compute_mode=query.enum("compute_mode", _COMPUTE_MODES, "ComputeMode"),
    )


def read_gpu_load(library: Any) -> list[dict[str, Any]]:
    """Return what each GPU of this host does now. `library` is the NVML library, or None.

    A value is None if the driver does not report it. `pids` are the processes that use the GPU.
    """
    rows: list[dict[str, Any]] = []
    host = _Query(library, {}, "", ())
    for index in range(0 if library is None else host("", "Count") or 0):
        handle = host("", "HandleByIndex", index)
        if handle is None:
            continue
        gpu = host.part("", handle)
        rates, memory, power = (
            gpu("", "UtilizationRates"),
            gpu("", "MemoryInfo"),
            gpu("", "PowerUsage"),
        )
        traffic = [gpu("", "PcieThroughput", way) for way in (0, 1)]  # KB/s sent and received
        clocks = _read_clocks(gpu)
        rows.append(
            {
                "index": index,
                "name": gpu("", "Name") or "unknown",
                "utilisation": rates and rates.gpu / 100,
                "memory_bytes": memory and int(memory.used),
                "power_w": None if power is None else power / 1000,
                "temperature_c": gpu("", "Temperature", 0),
                "sm_mhz": clocks.sm_mhz,
                "max_sm_mhz": clocks.max_sm_mhz,
                "throttle": list(clocks.throttle or ()),
                "pcie_bytes_per_s": None if None in traffic else 1000 * sum(traffic),
                "pids": [each.pid for each in gpu("", "ComputeRunningProcesses") or ()],
            }
        )
    return rows


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _pci_address(info: Any) -> str | None:
    """Return the PCI address in the kernel's format, 0000:18:00.0 (NVML: 00000000:18:00.0)."""
    if info is None:
        return None
    text = info.busId if isinstance(info.busId, str) else info.busId.decode()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}".lower()


def _read_nvlinks(gpu: _Query) -> tuple[NvLink, ...] | None:
    library = gpu.library
    no_such_link = (library.NVML_ERROR_INVALID_ARGUMENT, library.NVML_ERROR_NOT_SUPPORTED)
    links: list[NvLink] = []
    for index in range(library.NVML_NVLINK_MAX_LINKS):
        # NVML does not report the number of NVLinks, so stop at the first invalid index.
        try:
            active = bool(library.nvmlDeviceGetNvLinkState(*gpu.handles, index))
        except library.NVMLError as error:
            if error.value in no_such_link:
                break
            gpu.note("nvlinks", f"NVML NvLinkState: {error}")
            return None
        query = gpu.part(f"nvlinks[{index}]", index)
        links.append(
            NvLink(
                index=index,
                active=active,
                version=query("version", "NvLinkVersion"),
                peer_kind=query.enum("peer_kind", _NVLINK_PEERS, "NvLinkRemoteDeviceType"),
                peer_pci=_pci_address(query("peer_pci", "NvLinkRemotePciInfo")),
                speed_mbs=query.field_value("speed_mbs", _NVLINK_SPEED_FIELD, index),
                replay_errors=query("replay_errors", "NvLinkErrorCounter", 0),
                recovery_errors=query("recovery_errors", "NvLinkErrorCounter", 1),
                crc_errors=query("crc_errors", "NvLinkErrorCounter", 2),
            )
        )
    return tuple(links)


def _read_fabric(query: _Query) -> tuple[str | None, bool | None]:
    """Return (state of the NVSwitch fabric, whether the fabric is healthy)."""
    names = "fabric_state fabric_healthy"
    if not hasattr(query.library, "c_nvmlGpuFabricInfoV_t"):
        query.note(names, "this nvidia-ml-py has no nvmlDeviceGetGpuFabricInfoV")
        return None, None
    info = query.library.c_nvmlGpuFabricInfoV_t()
    if query(names, "GpuFabricInfoV", ctypes.byref(info)) is None:
        return None, None
    # healthMask has two bits for each of these conditions: degraded bandwidth, route recovery,
    # unhealthy route and access timeout. The two bits are 0 (not reported), 1 (true) or 2 (false).
    bits = [info.healthMask >> shift & 3 for shift in (0, 2, 4, 6)]
    state = _FABRIC_STATES.get(info.state, str(info.state))
    if not any(bits):
        query.note("fabric_healthy", f"fabric state {state}: health is not reported")
        return state, None
    return state, 1 not in bits


def _read_clocks(query: _Query) -> Clocks:
    reasons = query("throttle", "CurrentClocksEventReasons")
    names = [name for bit, name in enumerate(_THROTTLE) if (reasons or 0) >> bit & 1]
    return Clocks(
        sm_mhz=query("sm_mhz", "ClockInfo", _SM),
        memory_mhz=query("memory_mhz", "ClockInfo", _MEMORY),
        max_sm_mhz=query("max_sm_mhz", "MaxClockInfo", _SM),
        max_memory_mhz=query("max_memory_mhz", "MaxClockInfo", _MEMORY),
        throttle=None if reasons is None else tuple(names),
    )


def _read_ecc(query: _Query) -> Ecc:
    enabled, pending = query("enabled pending", "EccMode") or (None, None)
    errors = {
        f"{life}_{severity}": query(f"{life}_{severity}", "TotalEccErrors", kind, counter)
        for counter, life in enumerate(("volatile", "aggregate"))
        for kind, severity in enumerate(("corrected", "uncorrected"))
    }
    retired = [query("retired_pages", "RetiredPages", cause) for cause in (0, 1)]
    names = ("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failed")
    rows = query(" ".join(names), "RemappedRows") or (None,) * 4
    return Ecc(
        enabled=_flag(enabled),
        pending=_flag(pending),
        **errors,
        retired_pages=None if None in retired else sum(map(len, retired)),
        retired_pages_pending=_flag(query("retired_pages_pending", "RetiredPagesPendingStatus")),
        remapped_correctable=rows[0],
        remapped_uncorrectable=rows[1],
        remap_pending=_flag(rows[2]),
        remap_failed=_flag(rows[3]),
    )
