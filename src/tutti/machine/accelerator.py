"""Accelerator: one GPU with its links, clocks and errors, and who may reach its memory."""

from dataclasses import dataclass
from typing import Literal

from tutti.machine.pci import PcieLink


@dataclass(frozen=True)
class NvLink:
    """One NVLink of an accelerator. Counters are since the driver was loaded."""

    index: int
    active: bool | None
    version: int | None
    peer_kind: Literal["gpu", "switch", "cpu"] | None
    peer_pci: str | None
    speed_mbs: int | None
    """One way, in 1e6 bytes per second, as the driver states it (H100: 26562)."""
    replay_errors: int | None
    recovery_errors: int | None
    crc_errors: int | None


@dataclass(frozen=True)
class Clocks:
    """Clocks in MHz, and what the driver says holds them back."""

    sm_mhz: int | None
    memory_mhz: int | None
    max_sm_mhz: int | None
    max_memory_mhz: int | None
    throttle: tuple[str, ...] | None
    """Of idle, application_clocks, sw_power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal,
    hw_power_brake, display; () for none."""


@dataclass(frozen=True)
class Ecc:
    """Memory errors of an accelerator: volatile since the driver was loaded, aggregate for life."""

    enabled: bool | None
    pending: bool | None
    """What `enabled` will be after the next reset."""
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
    """The CPUs near it."""
    memory_bytes: int | None
    used_bytes: int | None
    bar1_bytes: int | None
    compute_capability: str | None
    processes: int | None
    """How many processes compute on it."""
    pcie: PcieLink | None
    pcie_replays: int | None
    nvlinks: tuple[NvLink, ...] | None
    """() where the GPU has none."""
    fabric_state: str | None
    """Of the NVSwitch fabric: not_supported, not_started, in_progress, completed."""
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
    """Whether accelerator `src` may reach the memory of `dst`, and if not, why not."""

    src: int
    dst: int
    read: str | None
    """OK, or the driver's word as `nvidia-smi topo -p2p r` has it: CNS, GNS, TNS, DR, NS, U."""
    write: str | None
    nvlink: str | None
    atomics: str | None
    driver_class: str | None
    """PIX, PXB, PHB, NODE or SYS by the driver's own reckoning."""


@dataclass(frozen=True)
class Xid:
    """An error that the NVIDIA driver wrote to the kernel's log."""

    pci_address: str
    code: int
    age_s: float | None
    text: str
