"""Healthy parts of the recorded machines, and the reason for every unknown field."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from tutti.machine.cpu_numa import Cpus, Limits, Memory, NumaNode
from tutti.machine.gpus import Accelerator, Clocks, Ecc, NvLink, PeerAccess
from tutti.machine.nics import Nic, RdmaPort
from tutti.machine.pci import PciDevice, PcieLink
from tutti.machine.recording import Machine

GIB = 1 << 30

# Field name → why the field is unknown on these machines.
REASONS = {
    "retired_pages": "NVML RetiredPages: Not Supported",
    "retired_pages_pending": "NVML RetiredPagesPendingStatus: Not Supported",
    "fabric_healthy": "fabric state not_supported: no health is reported",
    "speed_mbps": "/sys/class/net/*/speed is -1",
    "pci_address": "the interface has no hardware device",
    "numa_node": "the interface has no hardware device",
    "carrier": "/sys/class/net/*/carrier: Invalid argument",
    "correctable_errors": "aer_dev_correctable: No such file or directory",
    "uncorrectable_errors": "aer_dev_nonfatal: No such file or directory",
    "link": "max_link_speed: No such file or directory",
    "product": "/sys/class/dmi/id cannot be read",
    "kernel_modules": "/proc/modules: No such file or directory",
}


def ports_of(*places: tuple[int, int]) -> tuple[str, ...]:
    return tuple(f"0000:{bus:02x}:{device:02x}.0" for bus, device in places)


def numa(parts: Sequence[tuple[str, int]], remote_distance: int) -> tuple[NumaNode, ...]:
    return tuple(
        NumaNode(
            id=number,
            cpus=cpus,
            memory_bytes=gib * GIB,
            free_bytes=gib * GIB * 15 // 16,
            distances=tuple(
                10 if number == other else remote_distance for other in range(len(parts))
            ),
        )
        for number, (cpus, gib) in enumerate(parts)
    )


def devices(
    node: NumaNode,
    kinds: dict[tuple[str, ...], Any],
    generation: int,
    width: int = 16,
    driver: str = "mlx5_core",
) -> list[PciDevice]:
    """Return the devices at the ends of these paths, and the bridges above them."""
    drivers = {"gpu": "nvidia", "nvswitch": "nvidia-nvswitch", "nic": driver, "bridge": "pcieport"}
    makers = {"mlx5_core": "0x15b3", "ixgbe": "0x8086", "bnxt_en": "0x14e4", "virtio-pci": "0x1af4"}
    vendors = {"gpu": "0x10de", "nvswitch": "0x10de", "nic": makers[driver], "bridge": "0x1000"}
    by_address = {}
    for path, kind in kinds.items():
        for depth in range(2, len(path) + 1):
            own_kind = kind if depth == len(path) else "bridge"
            by_address[path[depth - 1]] = PciDevice(
                address=path[depth - 1],
                kind=own_kind,
                path=path[:depth],
                vendor=vendors[own_kind],
                driver=drivers[own_kind],
                numa_node=node.id,
                local_cpus=node.cpus,
                link=PcieLink(generation, width, generation, width),
                iommu_type="identity",
                acs_redirect=False,
                correctable_errors=0,
                uncorrectable_errors=0,
            )
    return [by_address[address] for address in sorted(by_address)]


def h100(index: int, address: str, node: NumaNode, peers: Sequence[tuple[Any, str]]) -> Accelerator:
    return gpu(
        index,
        "NVIDIA H100 80GB HBM3",
        address,
        node,
        memory=81559 << 20,
        bar1=128 * GIB,
        capability="9.0",
        pcie=PcieLink(5, 16, 5, 16),
        links=nvlinks(peers, 4, 26562),
        clocks=Clocks(345, 2619, 1980, 2619, ("idle",)),
        watts=(71.3, 700.0),
    )


def a100(index: int, address: str, node: NumaNode, peers: Sequence[tuple[Any, str]]) -> Accelerator:
    made = gpu(
        index,
        "NVIDIA A100-SXM4-80GB",
        address,
        node,
        memory=81920 << 20,
        bar1=128 * GIB,
        capability="8.0",
        pcie=PcieLink(4, 16, 4, 16),
        links=nvlinks(peers, 3, 25781),
        clocks=Clocks(210, 1593, 1410, 1593, ("idle",)),
        watts=(62.1, 400.0),
    )
    return replace(made, fabric_state="not_supported", fabric_healthy=None)


def l40s(index: int, address: str, node: NumaNode) -> Accelerator:
    made = gpu(
        index,
        "NVIDIA L40S",
        address,
        node,
        memory=46068 << 20,
        bar1=64 * GIB,
        capability="8.9",
        pcie=PcieLink(1, 16, 4, 16),
        links=(),
        clocks=Clocks(210, 405, 2520, 9001, ("idle",)),
        watts=(33.8, 350.0),
    )
    return replace(made, fabric_state="not_supported", fabric_healthy=None)


def a10(index: int, address: str) -> Accelerator:
    made = gpu(
        index,
        "NVIDIA A10",
        address,
        None,
        memory=23028 << 20,
        bar1=32 * GIB,
        capability="8.6",
        pcie=PcieLink(None, None, None, None),
        links=(),
        clocks=Clocks(210, 405, 1695, 6251, ("idle",)),
        watts=(16.2, 150.0),
    )
    return replace(made, fabric_state="not_supported", fabric_healthy=None)


def gpu(
    index: int,
    name: str,
    address: str,
    node: NumaNode | None,
    *,
    memory: int,
    bar1: int,
    capability: str,
    pcie: PcieLink,
    links: tuple[NvLink, ...],
    clocks: Clocks,
    watts: tuple[float, float],
) -> Accelerator:
    """Return a healthy idle GPU."""
    return Accelerator(
        index=index,
        name=name,
        uuid=None,  # set by its host
        pci_address=address,
        numa_node=node.id if node else None,
        cpus=node.cpus if node else "0-47",
        memory_bytes=memory,
        used_bytes=4 << 20,
        bar1_bytes=bar1,
        compute_capability=capability,
        processes=0,
        pcie=pcie,
        pcie_replays=0,
        nvlinks=links,
        fabric_state="completed",
        fabric_healthy=True,
        clocks=clocks,
        temperature_c=30 + index,
        slowdown_c=87,
        power_w=watts[0],
        power_limit_w=watts[1],
        default_power_limit_w=watts[1],
        ecc=Ecc(True, True, 0, 0, 0, 0, None, None, 0, 0, False, False),
        recovery_action="none",
        persistence=True,
        mig=False,
        compute_mode="default",
    )


def nvlinks(peers: Sequence[tuple[Any, str]], version: int, speed: int) -> tuple[NvLink, ...]:
    return tuple(
        NvLink(number, True, version, kind, address, speed, 0, 0, 0)
        for number, (kind, address) in enumerate(peers)
    )


COUNTERS = dict.fromkeys(
    (
        *("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors"),
        *("port_xmit_discards", "local_link_integrity_errors", "out_of_sequence"),
        *("packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
    ),
    0,
)


def infiniband(
    device: str,
    address: str,
    node: NumaNode,
    gbps: float = 400,
    rate: str = "400 Gb/sec (4X NDR)",
) -> RdmaPort:
    return RdmaPort(
        device=device,
        port=1,
        netdev="",
        pci_address=address,
        numa_node=node.id,
        driver="mlx5_core",
        firmware="28.43.2026",
        link_layer="InfiniBand",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=gbps,
        rate=rate,
        gid_types=("IB/RoCE v1",),
        counters=dict(COUNTERS),
    )


def roce(device: str, address: str, node: NumaNode, gbps: float, rate: str) -> RdmaPort:
    port = infiniband(device, address, node, gbps, rate)
    return replace(port, link_layer="Ethernet", gid_types=("IB/RoCE v1", "RoCE v2"))


def nic_of(port: RdmaPort, name: str, mtu: int, speed: int) -> Nic:
    made = ethernet(name, port.pci_address, None, "mlx5_core", speed)
    return replace(made, mtu=mtu, numa_node=port.numa_node, rdma=port.device, default_route=False)


def ethernet(
    name: str, address: str | None, node: NumaNode | None, driver: str, speed: int | None
) -> Nic:
    return Nic(
        name=name,
        kind="physical",
        driver=driver,
        state="up",
        carrier=True,
        speed_mbps=speed,
        mtu=1500,
        pci_address=address,
        numa_node=node.id if node else None,
        families=("ipv4",),
        default_route=True,
        master="",
        rdma="",
        rx_errors=0,
        tx_errors=0,
        rx_dropped=0,
        tx_dropped=0,
    )


def virtual(name: str) -> Nic:
    made = ethernet(name, None, None, "", None)
    return replace(made, kind="bridge", state="down", carrier=False, default_route=False)


def loopback() -> Nic:
    made = ethernet("lo", None, None, "", None)
    return replace(
        made,
        kind="loopback",
        state="unknown",
        mtu=65536,
        families=("ipv4", "ipv6"),
        default_route=False,
    )


def machine(
    host: str,
    *,
    product: str | None,
    cpus: Cpus,
    numa: tuple[NumaNode, ...],
    gpus: Sequence[Accelerator],
    pci: Sequence[PciDevice],
    nics: Sequence[Nic],
    rdma: Sequence[RdmaPort],
    classes: Any,
    p2p: str = "OK",
    unknown: dict[str, str] | None = None,
) -> Machine:
    """Return a healthy, correctly configured host with these parts."""
    total = sum(each.memory_bytes or 0 for each in numa)
    ports = {each.device: each for each in rdma}
    netdevs = {each.rdma: each.name for each in nics if each.rdma}
    return Machine(
        host=host,
        observed_at="2026-01-15T12:00:00+00:00",
        name_resolution="outside",
        system="Ubuntu 24.04.3 LTS",
        kernel="6.8.0-87-generic",
        architecture="x86_64",
        product=product,
        virtualisation="none",
        container="none",
        cpus=cpus,
        numa=numa,
        memory=Memory(total, total * 15 // 16, 0, 0, 0, 0, 2 << 20, "madvise"),
        accelerators=tuple(
            replace(each, uuid=f"GPU-{uuid5(NAMESPACE_DNS, f'{each.index}.{host}')}")
            for each in gpus
        ),
        peers=tuple(
            PeerAccess(
                src=a.index,
                dst=b.index,
                read=p2p,
                write=p2p,
                nvlink="OK" if a.nvlinks else "NS",
                atomics="OK" if a.nvlinks else "NS",
                driver_class=classes(a.index, b.index),
            )
            for a in gpus
            for b in gpus
            if a is not b
        ),
        pci=tuple(sorted({each.address: each for each in pci}.values(), key=lambda d: d.address)),
        nics=tuple(sorted(nics, key=lambda each: each.name)),
        rdma=tuple(replace(ports[name], netdev=netdevs.get(name, "")) for name in sorted(ports)),
        limits=Limits(
            memlock_bytes="unlimited",
            open_files=1048576,
            processes=1 << 20,
            stack_bytes=8 << 20,
            core_bytes=0,
            shm_bytes=total // 2,
            shm_free_bytes=total // 2,
            cgroup_cpus="unlimited",
            cgroup_memory_bytes="unlimited",
            ipc_lock=True,
        ),
        iommu_groups=len(pci),
        kernel_parameters=("iommu=pt",),
        kernel_modules=(
            *("nvidia", "nvidia_uvm", "nvidia_peermem", "gdrdrv"),
            *("ib_core", "ib_uverbs", "rdma_cm", "mlx5_core", "mlx5_ib"),
        ),
        sysctls={
            "net.core.rmem_max": "268435456",
            "net.core.wmem_max": "268435456",
            "net.core.somaxconn": "4096",
            "net.ipv4.tcp_rmem": "4096 131072 268435456",
            "net.ipv4.tcp_wmem": "4096 65536 268435456",
            "net.ipv4.ip_local_port_range": "32768 60999",
            "kernel.numa_balancing": "0",
        },
        nccl_conf={},
        variables={},
        versions={
            "python": "3.12.3",
            "tutti": "0.1.0",
            "torch": "2.11.0+cu130",
            "numpy": "2.3.4",
            "nvidia-ml-py": "13.580.82",
            "cuda": "13.0",
            "nccl": "2.28.9",
            "driver": "580.95.05",
            "kernel_module": "open",
            "cuda_driver": "13.0",
        },
        xids=(),
        unknown=dict(unknown or {}),
    )


def explain(machine: Machine) -> Machine:
    """Give every unknown field a reason, as observe() does."""
    for path in unknown_paths(machine, ""):
        if machine.reason_unknown(path) is None:
            machine.unknown[path] = REASONS[path.rpartition(".")[2]]
    return machine


def unknown_paths(value: Any, path: str) -> Iterator[str]:
    if value is None:
        yield path
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            name = f"{path}.{field.name}" if path else field.name
            yield from unknown_paths(getattr(value, field.name), name)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from unknown_paths(each, f"{path}[{number}]")
