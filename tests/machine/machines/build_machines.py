"""Writes the recorded machines into this folder.

    python tests/machine/machines/build_machines.py

The machines are not observed: their values are what /sys, /proc and NVML report on such machines.
"""

from dataclasses import replace
from pathlib import Path

from machine_parts import (  # from this folder
    GIB,
    a10,
    a100,
    devices,
    ethernet,
    explain,
    h100,
    infiniband,
    l40s,
    loopback,
    machine,
    nic_of,
    numa,
    ports_of,
    roce,
    virtual,
)

from tutti.machine.cpu_numa import Cpus, NumaNode
from tutti.machine.pci import PcieLink
from tutti.machine.recording import Machine, format_machines

HERE = Path(__file__).parent
NOTE = "written by hand from knowledge of such machines, not observed"


def main() -> None:
    for name, machines in {
        "h100-nvswitch": [h100_nvswitch()],
        "pcie-box": [pcie_box()],
        "degraded-nvlink": [degraded_nvlink()],
        "vm-hidden-pcie": [vm_hidden_pcie()],
        "roce-cluster": [roce_host("roce-1"), bad_port(roce_host("roce-2"))],
        "cpu-only": [cpu_only()],
    }.items():
        explained = [explain(machine) for machine in machines]
        text = format_machines(explained, [], f"{name}: {NOTE}")
        (HERE / f"{name}.json").write_text(text)


def h100_nvswitch() -> Machine:
    """Return eight H100 SXM behind four NVSwitches. Each GPU shares a PCIe switch with a NIC."""
    nodes = numa([("0-55,112-167", 1024), ("56-111,168-223", 1024)], 21)
    nic_buses = [0x18, 0x40, 0x4F, 0x5E, 0x9A, 0xC0, 0xCE, 0xDC]
    pci, gpus, ports, nics = [], [], [], []
    switches = [f"0000:{bus:02x}:00.0" for bus in (0x07, 0x08, 0x09, 0x0A)]
    for index, bus in enumerate(nic_buses):
        node = nodes[index // 4]
        # Root port, upstream port of the switch, and two downstream ports: to the NIC and the GPU.
        above = (f"pci0000:{bus - 3:02x}", *ports_of((bus - 3, 1), (bus - 2, 0)))
        gpu = (*above, *ports_of((bus - 1, 2), (bus + 3, 0)))
        nic = (*above, *ports_of((bus - 1, 0), (bus, 0)))
        pci += devices(node, {gpu: "gpu", nic: "nic"}, generation=5)
        # 18 links: five to two of the switches, four to the others.
        peers = [switches[number % 4] for number in range(18)]
        gpus.append(h100(index, gpu[-1], node, [("switch", peer) for peer in peers]))
        ports.append(infiniband(f"mlx5_{index}", nic[-1], node))
        nics.append(nic_of(ports[-1], f"ibp{bus}s0", 2044, 400000))
    for number, switch in enumerate(switches):
        path = ("pci0000:00", *ports_of((0, number + 1), (7 + number, 0)))
        pci += devices(nodes[0], {path: "nvswitch"}, generation=4, width=2)
        assert path[-1] == switch
    mgmt = ("pci0000:00", *ports_of((0, 0x1C), (0x0B, 0)))
    pci += devices(nodes[0], {mgmt: "nic"}, generation=3, width=4, driver="ixgbe")
    nics += [ethernet("eno3", mgmt[-1], nodes[0], "ixgbe", 10000), virtual("docker0"), loopback()]
    return machine(
        "dgx-1",
        product="NVIDIA DGXH100",
        cpus=Cpus("Intel(R) Xeon(R) Platinum 8480C", 2, 112, 224, "0-223", "", ("performance",)),
        numa=nodes,
        gpus=gpus,
        pci=pci,
        nics=nics,
        rdma=ports,
        classes=lambda a, b: "NODE" if a // 4 == b // 4 else "SYS",
    )


def pcie_box() -> Machine:
    """Return four L40S without NVLink: two below one root port, two below a root port each."""
    nodes = numa([("0-31,64-95", 256), ("32-63,96-127", 256)], 32)
    root = ("pci0000:c0", *ports_of((0xC0, 1), (0xC1, 0)))
    near = (*root, *ports_of((0xC2, 0), (0xC3, 0)))  # a second switch below the first
    far = (*root, *ports_of((0xC2, 1), (0xC8, 0)))
    paths = [
        (*near, *ports_of((0xC4, 0), (0xC5, 0))),
        (*far, *ports_of((0xC9, 0), (0xCA, 0))),
        ("pci0000:40", *ports_of((0x40, 1), (0x41, 0))),
        ("pci0000:40", *ports_of((0x40, 3), (0x42, 0))),
    ]
    nic = (*near, *ports_of((0xC4, 1), (0xC6, 0)))
    board = [("pci0000:80", *ports_of((0x80, 1), (0x81, 0)))]
    board.append((*board[0][:-1], "0000:81:00.1"))
    pci = devices(nodes[0], dict.fromkeys(paths[:2], "gpu") | {nic: "nic"}, generation=4)
    pci += devices(nodes[1], dict.fromkeys(paths[2:], "gpu"), generation=4)
    pci += devices(nodes[1], dict.fromkeys(board, "nic"), generation=3, width=4, driver="ixgbe")
    # An idle GPU lowers its PCIe link to generation 1.
    resting = {address for path in paths for address in path[-2:]}
    pci = [
        replace(each, link=PcieLink(1, 16, 4, 16)) if each.address in resting else each
        for each in pci
    ]
    port = roce("mlx5_0", nic[-1], nodes[0], 100, "100 Gb/sec (4X EDR)")
    nics = [
        nic_of(port, "ens1np0", 9000, 100000),
        ethernet("eno1", board[0][-1], nodes[1], "ixgbe", 10000),
        replace(
            ethernet("eno2", board[1][-1], nodes[1], "ixgbe", None),
            state="down",
            carrier=False,
            families=(),
            default_route=False,
        ),
        loopback(),
    ]
    return machine(
        "pcie-1",
        product="Supermicro AS-4125GS-TNRT",
        cpus=Cpus("AMD EPYC 9354 32-Core Processor", 2, 64, 128, "0-127", "", ("performance",)),
        numa=nodes,
        gpus=[l40s(i, path[-1], nodes[i // 2]) for i, path in enumerate(paths)],
        pci=pci,
        nics=nics,
        rdma=[port],
        classes=lambda a, b: {(0, 1): "PXB", (2, 3): "PHB"}.get((min(a, b), max(a, b)), "SYS"),
    )


def degraded_nvlink() -> Machine:
    """Return eight A100 SXM with six NVSwitches and four NUMA nodes per socket. NVLink 7 of GPU 3
    is down."""
    cpus = [f"{16 * i}-{16 * i + 15},{128 + 16 * i}-{128 + 16 * i + 15}" for i in range(8)]
    nodes = tuple(
        NumaNode(
            id=i,
            cpus=cpus[i],
            memory_bytes=128 * GIB,
            free_bytes=120 * GIB,
            distances=tuple(10 if i == j else 12 if i // 4 == j // 4 else 32 for j in range(8)),
        )
        for i in range(8)
    )
    pci, gpus, ports, nics = [], [], [], []
    switches = [f"0000:{bus:02x}:00.0" for bus in (0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9)]
    for quarter, (root, home) in enumerate(((0x00, 3), (0x40, 1), (0x80, 7), (0xB0, 5))):
        node = nodes[home]
        # One switch on each root complex, with two GPUs and two NICs.
        above = (f"pci0000:{root:02x}", *ports_of((root, 1), (root + 1, 0)))
        below = [(*above, *ports_of((root + 2, i), (root + 4 + i, 0))) for i in range(4)]
        kinds = dict(zip(below, ("gpu", "nic", "gpu", "nic"), strict=True))
        pci += devices(node, kinds, generation=4)
        for half in range(2):
            index = 2 * quarter + half
            links = [("switch", switches[number // 2]) for number in range(12)]
            gpus.append(a100(index, below[2 * half][-1], node, links))
            address = below[2 * half + 1][-1]
            port = infiniband(f"mlx5_{index}", address, node, 200, "200 Gb/sec (4X HDR)")
            ports.append(port)
            nics.append(nic_of(port, f"ib{index}", 2044, 200000))
    for number, _ in enumerate(switches):
        path = ("pci0000:c0", *ports_of((0xC0, number + 1), (0xC4 + number, 0)))
        pci += devices(nodes[5], {path: "nvswitch"}, generation=3, width=2)
    mgmt = ("pci0000:e0", *ports_of((0xE0, 5), (0xE2, 0)))
    pci += devices(nodes[4], {mgmt: "nic"}, generation=3, width=4, driver="ixgbe")
    nics += [ethernet("enp226s0", mgmt[-1], nodes[4], "ixgbe", 10000), loopback()]
    assert gpus[3].nvlinks is not None
    lost = replace(
        gpus[3].nvlinks[7],
        active=False,
        peer_kind=None,
        peer_pci=None,
        speed_mbs=None,
        replay_errors=1843,
        recovery_errors=12,
        crc_errors=52011,
    )
    rest = gpus[3].nvlinks
    gpus[3] = replace(gpus[3], nvlinks=(*rest[:7], lost, *rest[8:]))
    return machine(
        "a100-7",
        product="GIGABYTE G492-ID0-00",
        cpus=Cpus("AMD EPYC 7742 64-Core Processor", 2, 128, 256, "0-255", "", ("performance",)),
        numa=nodes,
        gpus=gpus,
        pci=pci,
        nics=nics,
        rdma=ports,
        classes=lambda a, b: "PIX" if a // 2 == b // 2 else "SYS",
        unknown={
            "accelerators[3].nvlinks[7].peer_kind": "NVML NvLinkRemoteDeviceType: Not Supported",
            "accelerators[3].nvlinks[7].peer_pci": "NVML NvLinkRemotePciInfo: Not Supported",
            "accelerators[3].nvlinks[7].speed_mbs": "NVML field 164: error 3",
        },
    )


def vm_hidden_pcie() -> Machine:
    """Return a virtual machine with four A10 that hides PCI paths and NUMA nodes."""
    hidden = "/sys/bus/pci/devices is empty or does not exist"
    gpus = [
        replace(
            a10(index, f"0000:00:{0x1B + index:02x}.0"),
            pcie=None,
        )
        for index in range(4)
    ]
    nic = replace(
        ethernet("eth0", "", None, "virtio_net", None),
        pci_address=None,
        numa_node=None,
    )
    unknown = {
        "pci": hidden,
        "numa": "/sys/devices/system/node is empty or does not exist",
        "cpus.packages": "/sys/devices/system/cpu/cpu*/topology cannot be read",
        "cpus.cores": "/sys/devices/system/cpu/cpu*/topology cannot be read",
        "iommu_groups": "/sys/kernel/iommu_groups does not exist",
        "nics[0].pci_address": "/sys/devices/virtio0 is not on a PCI bus",
        "nics[0].numa_node": "/sys/devices/virtio0/numa_node: No such file or directory",
    }
    for index in range(4):
        unknown[f"accelerators[{index}].numa_node"] = "NVML NumaNodeId: Not Supported"
        unknown[f"accelerators[{index}].pcie"] = "NVML CurrPcieLinkGeneration: Not Supported"
    unknown |= {
        f"peers[{number}].driver_class": "NVML TopologyCommonAncestor: Unknown Error"
        for number in range(12)
    }
    made = machine(
        "vm-1",
        product="QEMU Standard PC (Q35 + ICH9, 2009)",
        cpus=Cpus("Intel Xeon Processor (Icelake)", None, None, 48, "0-47", "", ()),
        numa=(),
        gpus=gpus,
        pci=[],
        nics=[nic, loopback()],
        rdma=[],
        classes=lambda a, b: None,
        p2p="CNS",
        unknown=unknown,
    )
    return replace(
        made,
        virtualisation="kvm",
        iommu_groups=None,
        kernel_parameters=(),
        kernel_modules=("nvidia", "nvidia_uvm"),
        memory=replace(made.memory, total_bytes=192 * GIB, available_bytes=180 * GIB),
        limits=replace(made.limits, shm_bytes=96 * GIB, shm_free_bytes=96 * GIB),
    )


def roce_host(host: str) -> Machine:
    """Return four H100 SXM with six NVLinks per pair and one 400 Gb/s RoCE port each."""
    nodes = numa([("0-47,96-143", 512), ("48-95,144-191", 512)], 21)
    buses = [0x1A, 0x3A, 0x9A, 0xBA]
    addresses = [f"0000:{bus + 3:02x}:00.0" for bus in buses]
    pci, gpus, ports, nics = [], [], [], []
    for index, bus in enumerate(buses):
        node = nodes[index // 2]
        above = (f"pci0000:{bus - 3:02x}", *ports_of((bus - 3, 1), (bus - 2, 0)))
        gpu = (*above, *ports_of((bus - 1, 2), (bus + 3, 0)))
        nic = (*above, *ports_of((bus - 1, 0), (bus, 0)))
        pci += devices(node, {gpu: "gpu", nic: "nic"}, generation=5)
        others = [address for address in addresses if address != gpu[-1]]
        links = [("gpu", others[number // 6]) for number in range(18)]
        gpu_here = h100(index, gpu[-1], node, links)
        gpus.append(replace(gpu_here, fabric_state="not_supported", fabric_healthy=None))
        ports.append(roce(f"mlx5_{index}", nic[-1], node, 400, "400 Gb/sec (4X NDR)"))
        nics.append(nic_of(ports[-1], f"rdma{index}", 9000, 400000))
    mgmt = ("pci0000:00", *ports_of((0, 0x1C), (0x03, 0)))
    pci += devices(nodes[0], {mgmt: "nic"}, generation=3, width=4, driver="bnxt_en")
    nics += [ethernet("eno1", mgmt[-1], nodes[0], "bnxt_en", 25000), loopback()]
    return machine(
        host,
        product="Dell Inc. PowerEdge XE8640",
        cpus=Cpus("Intel(R) Xeon(R) Platinum 8468", 2, 96, 192, "0-191", "", ("performance",)),
        numa=nodes,
        gpus=gpus,
        pci=pci,
        nics=nics,
        rdma=ports,
        classes=lambda a, b: "NODE" if a // 2 == b // 2 else "SYS",
    )


def bad_port(host: Machine) -> Machine:
    """Return the host with a bad port: the port of mlx5_2 has a quarter of its rate, and errors."""
    counters = host.rdma[2].counters | {
        "symbol_error": 48211,
        "link_error_recovery": 37,
        "link_downed": 4,
        "port_rcv_errors": 912,
        "out_of_sequence": 1204,
        "packet_seq_err": 377,
        "local_ack_timeout_err": 58,
    }
    port = replace(host.rdma[2], rate_gbps=100, rate="100 Gb/sec (1X NDR)", counters=counters)
    nics = [
        replace(each, speed_mbps=100000, rx_errors=912) if each.rdma == "mlx5_2" else each
        for each in host.nics
    ]
    return replace(host, rdma=(*host.rdma[:2], port, *host.rdma[3:]), nics=tuple(nics))


def cpu_only() -> Machine:
    """Return a small virtual machine: two CPUs, one NUMA node, a virtio NIC, no GPU."""
    nodes = numa([("0-1", 16)], 10)
    path = ("pci0000:00", "0000:00:03.0")
    pci = [
        replace(each, link=None, correctable_errors=None, uncorrectable_errors=None, numa_node=None)
        for each in devices(nodes[0], {path: "nic"}, generation=1, driver="virtio-pci")
    ]
    nic = ethernet("eth0", path[-1], None, "virtio_net", None)
    reason = "numa_node is -1"
    made = machine(
        "small-vm",
        product=None,
        cpus=Cpus("AMD EPYC", 1, 2, 2, "0-1", "", ()),
        numa=nodes,
        gpus=[],
        pci=pci,
        nics=[nic, loopback()],
        rdma=[],
        classes=lambda a, b: None,
        unknown={
            "accelerators": "NVML: NVML Shared Library Not Found",
            "pci[0].numa_node": reason,
            "nics[0].numa_node": reason,
        },
    )
    return replace(
        made,
        virtualisation="kvm",
        container="docker",
        iommu_groups=0,
        kernel_parameters=(),
        kernel_modules=None,
        limits=replace(
            made.limits, memlock_bytes=8 << 20, shm_bytes=8 * GIB, shm_free_bytes=8 * GIB
        ),
        versions={"python": "3.11.9", "torch": "2.11.0+cpu", "numpy": "2.3.4", "tutti": "0.1.0"},
    )


if __name__ == "__main__":
    main()
