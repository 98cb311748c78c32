"""PCIe: width, generation, errors, and what stands in the way of peers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tutti.machine.checks.check import Check, on_machine
from tutti.machine.checks.environment import settings
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gpus
from tutti.machine.checks.limits import has_rdma
from tutti.machine.observation import Machine

if TYPE_CHECKING:
    from tutti.machine.pci import PcieLink


def _links(machine: Machine) -> "list[tuple[str, str, PcieLink]]":
    """The scope, the address and the link of every GPU, and of every NIC with RDMA."""
    links = [
        (f"gpu:{gpu.index}", gpu.pci_address or "", gpu.pcie)
        for gpu in machine.accelerators
        if gpu.pcie is not None
    ]
    for port in machine.rdma:
        device = machine.pci_device(port.pci_address)
        if device is not None and device.link is not None:
            links.append((f"nic:{port.device}", device.address, device.link))
    if not links:
        gpus(machine)
        raise Skip(machine.why("accelerators[0].pcie") or "no GPU tells its PCIe link")
    return links


def _width(machine: Machine) -> Iterator[Verdict]:
    told = False
    for scope, address, link in _links(machine):
        if link.width is None or link.max_width is None:
            continue
        told = True
        if link.width < link.max_width:
            observed = f"{address} runs {link.width} lanes"
            cure = "seat the card again; look at the riser, the slot and its BIOS setting"
            command = f"sudo lspci -vv -s {address} | grep -i lnk"
            yield fail(scope, observed, f"{link.max_width} lanes", cure, command)
    if not told:
        raise Skip(machine.why("accelerators[0].pcie.width") or "no link tells its width")


def _generation(machine: Machine) -> Iterator[Verdict]:
    """An idle GPU lowers its generation to save power: only one that works is judged."""
    told = False
    idle = {f"gpu:{gpu.index}" for gpu in machine.accelerators if not gpu.processes}
    for scope, address, link in _links(machine):
        if link.generation is None or link.max_generation is None or scope in idle:
            continue
        told = True
        if link.generation < link.max_generation:
            observed = f"{address} runs PCIe {link.generation} under load"
            command = f"sudo lspci -vv -s {address} | grep -i lnk"
            yield warn(scope, observed, f"PCIe {link.max_generation}", "", command)
    if not told:
        raise Skip("idle GPUs lower their PCIe generation: run it beside a job")


def _errors(machine: Machine) -> Iterator[Verdict]:
    devices = [each for each in machine.pci if each.kind != "bridge"]
    if not devices:
        raise Skip(machine.why("pci") or "no GPU or NIC on the PCI bus")
    for device in devices:
        scope = _scope(machine, device.address)
        command = f"cat /sys/bus/pci/devices/{device.address}/aer_dev_*"
        if device.uncorrectable_errors:
            observed = f"{device.uncorrectable_errors} uncorrectable errors since boot"
            yield fail(scope, observed, "0", "", command)
        elif (device.correctable_errors or 0) > 100:
            observed = f"{device.correctable_errors} corrected errors since boot"
            yield warn(scope, observed, "a handful at most", "", command)
    for gpu in machine.accelerators:
        if (gpu.pcie_replays or 0) > 100:
            observed = f"{gpu.pcie_replays} packets were sent again"
            yield warn(f"gpu:{gpu.index}", observed, "a handful at most", "")


def _scope(machine: Machine, address: str) -> str:
    for gpu in machine.accelerators:
        if gpu.pci_address == address:
            return f"gpu:{gpu.index}"
    for nic in machine.nics:
        if nic.pci_address == address:
            return f"nic:{nic.name}"
    return f"pci:{address}"


def _peers_use_pcie(machine: Machine) -> bool:
    """Whether data goes from device to device over PCIe: GPUs without NVLink, or NICs with RDMA."""
    linked = all(any(link.active for link in gpu.nvlinks or ()) for gpu in machine.accelerators)
    return (len(machine.accelerators) > 1 and not linked) or has_rdma(machine)


def _acs(machine: Machine) -> Iterator[Verdict]:
    gpus(machine)
    if machine.virtualisation not in (None, "none"):
        raise Skip("a virtual machine: its host decides")
    if not _peers_use_pcie(machine):
        raise Skip("no traffic between PCIe devices")
    above = {
        bridge
        for gpu in machine.accelerators
        if (device := machine.pci_device(gpu.pci_address)) is not None
        for bridge in device.path[1:-1]
    }
    bridges = [each for each in machine.pci if each.kind == "bridge" and each.address in above]
    if not any(each.acs_redirect is not None for each in bridges):
        number = next((i for i, each in enumerate(machine.pci) if each.kind == "bridge"), 0)
        why = machine.why(f"pci[{number}].acs_redirect")
        raise Skip(why or "no bridge above a GPU tells its ACS (it needs root)")
    on = [each.address for each in bridges if each.acs_redirect]
    if on:
        shown = ", ".join(on[:3]) + (" …" if len(on) > 3 else "")
        commands = [f"sudo setpci -s {address} ECAP_ACS+0x6.w=0000" for address in on]
        observed = f"ACS sends peers' traffic up to the root complex at {shown}"
        yield warn("machine", observed, "off on bare metal", "", *commands)


def _iommu(machine: Machine) -> Iterator[Verdict]:
    gpus(machine)
    if machine.virtualisation not in (None, "none"):
        raise Skip("a virtual machine: its host decides")
    kinds = {
        device.iommu_type
        for gpu in machine.accelerators
        if (device := machine.pci_device(gpu.pci_address)) is not None
    } - {None}
    if not kinds:
        raise Skip("the kernel does not tell")
    if kinds & {"DMA", "DMA-FQ"} and _peers_use_pcie(machine):
        yield warn(
            "machine",
            f"the IOMMU translates what GPUs read and write ({', '.join(sorted(map(str, kinds)))})",
            "off, or pass-through (iommu=pt)",
            "boot with iommu=pt, or switch VT-d / AMD-Vi off",
            "sudo grubby --update-kernel=ALL --args=iommu=pt",
        )
    else:
        yield fine(f"IOMMU {', '.join(sorted(map(str, kinds)))}")


def _hidden(machine: Machine) -> Iterator[Verdict]:
    """A virtual machine that shows GPUs as if each hung alone at the root, of unknown speed."""
    if len(gpus(machine)) < 2:
        raise Skip("one GPU")
    if "NCCL_TOPO_FILE" in settings(machine):
        yield fine(f"NCCL_TOPO_FILE={settings(machine)['NCCL_TOPO_FILE']}")
        return
    blind = []
    for gpu in machine.accelerators:
        device = machine.pci_device(gpu.pci_address)
        speeds = [
            gpu.pcie and gpu.pcie.max_generation,
            device and device.link and device.link.width,
        ]
        flat = device is None or len(device.path) <= 2
        if flat and (gpu.numa_node is None or not any(speeds)):
            blind.append(str(gpu.index))
    if blind:
        kind = machine.virtualisation if machine.virtualisation not in (None, "none") else "machine"
        yield warn(
            "machine",
            f"this {kind} hides the PCIe topology of GPU {', '.join(blind)}",
            "switches, speeds and NUMA nodes, by which NCCL chooses its rings",
            "give NCCL the provider's topology file: NCCL_TOPO_FILE",
            "export NCCL_TOPO_FILE=/path/to/topology.xml",
        )


CHECKS = (
    Check(
        "pcie.width",
        "PCIe lanes in use against lanes there are",
        "half the lanes, half the speed, for every copy",
        "seat the card again; check riser, slot and BIOS",
        on_machine(_width),
    ),
    Check(
        "pcie.generation",
        "PCIe generation under load",
        "each step down halves the speed",
        "look at the BIOS setting of the slot, at risers and retimers",
        on_machine(_generation),
    ),
    Check(
        "pcie.errors",
        "PCIe errors since boot",
        "a bad contact is repeated, then fails",
        "seat the card again; if they grow, have it serviced",
        on_machine(_errors),
    ),
    Check(
        "pcie.acs",
        "access control on the bridges above GPUs (bare metal)",
        "it sends neighbours' traffic through the CPU: slow, and wrong or stuck on some boards",
        "switch ACS off in the BIOS, or on each bridge after every boot",
        on_machine(_acs),
    ),
    Check(
        "pcie.iommu",
        "whether the IOMMU translates addresses of GPUs (bare metal)",
        "peer access through a translating IOMMU is slow, and wrong or stuck on some boards",
        "boot with iommu=pt, or switch it off",
        on_machine(_iommu),
    ),
    Check(
        "pcie.hidden",
        "whether switches, speeds and NUMA nodes of GPUs can be seen",
        "NCCL plans its rings by them; in a virtual machine they are often missing",
        "set NCCL_TOPO_FILE",
        on_machine(_hidden),
    ),
)
