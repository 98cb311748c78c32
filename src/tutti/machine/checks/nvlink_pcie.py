"""Checks nvlink.* and pcie.*: links that are down, slow or faulty, peer access, ACS and IOMMU."""

from tutti.machine.checks.cluster import KNOWN_ERRORS, Skip, read_gpus, require_gpus
from tutti.machine.checks.finding import Findings, fail, machine_check, passed, warn
from tutti.machine.checks.nccl_environment import settings
from tutti.machine.pci import PciDevice
from tutti.machine.recording import Machine

# {part of the GPU's name: NVLinks per GPU}, for boards with a fixed number of NVLinks. PCIe cards
# are not listed, because they have NVLinks only if an NVLink bridge is installed.
_BOARD_LINKS = {"V100-SXM": 6, "A100-SXM": 12, "H100 80GB HBM3": 18, "B200": 18}


@machine_check("nvlink.active")
def active_nvlinks(machine: Machine) -> Findings:
    nvlinks = read_gpus(machine, "nvlinks")
    active = {gpu.index: sum(link.active is True for link in links) for gpu, links in nvlinks}
    expected, source = max(active.values()), "as on other GPUs"
    for gpu, _ in nvlinks:
        for board, links_of_board in _BOARD_LINKS.items():
            # A single GPU is not compared with its board, because it may have no NVLinks in a
            # virtual machine.
            if board in gpu.name and links_of_board > expected and len(nvlinks) > 1:
                expected, source = links_of_board, f"as every {gpu.name} has"
    if expected == 0:
        raise Skip("no active NVLink on any GPU")
    for gpu, links in nvlinks:
        if active[gpu.index] < expected:
            down = [str(link.index) for link in links if link.active is False]
            which = f" (down: {', '.join(down)})" if down else ""
            observed = f"{active[gpu.index]} of {expected} NVLinks are active{which}"
            yield fail(f"gpu:{gpu.index}", observed, f"{expected}, {source}")
    yield passed(f"{expected} NVLinks active on each of {len(nvlinks)} GPUs")


@machine_check("nvlink.speed")
def nvlink_speed(machine: Machine) -> Findings:
    speeds = [
        (gpu.index, link.index, link.speed_mbs)
        for gpu, links in read_gpus(machine, "nvlinks")
        for link in links
        if link.active and link.speed_mbs
    ]
    if not speeds:
        raise Skip("no NVLink with a known speed")
    best = max(speed for _, _, speed in speeds)
    for gpu, link, speed in speeds:
        if speed < 0.95 * best:
            observed = f"NVLink {link} runs at {speed / 1000:.1f} GB/s"
            yield fail(f"gpu:{gpu}", observed, f"{best / 1000:.1f} GB/s, as on other links")


@machine_check("nvlink.errors")
def nvlink_errors(machine: Machine) -> Findings:
    nvlinks = read_gpus(machine, "nvlinks")
    if not any(links for _, links in nvlinks):
        raise Skip("no NVLink")
    for gpu, links in nvlinks:
        for link in links:
            if link.errors:
                counts = ", ".join(f"{count} {name}" for name, count in link.errors.items())
                # A recovery interrupts the link for a short time. A replay only resends a packet.
                problem = fail if link.recovery_errors else warn
                observed = f"NVLink {link.index}: {counts} errors since the driver was loaded"
                yield problem(f"gpu:{gpu.index}", observed)


@machine_check("nvlink.fabric")
def nvswitch_fabric(machine: Machine) -> Findings:
    states = read_gpus(machine, "fabric_state")
    if all(state == "not_supported" for _, state in states):
        raise Skip("no NVSwitch fabric to set up")
    for gpu, state in states:
        scope = f"gpu:{gpu.index}"
        if state not in ("completed", "not_supported"):
            cure = (
                "start the fabric manager, in the version of the driver (for a virtual machine: on "
                "its host)"
            )
            yield fail(scope, f"fabric state {state}", cure=cure)
        elif gpu.fabric_healthy is False:
            yield fail(scope, "the fabric reports degraded bandwidth or a degraded route")


@machine_check("nvlink.peers")
def peer_access(machine: Machine) -> Findings:
    if len(require_gpus(machine)) < 2:
        raise Skip("one GPU")
    if not machine.peers:
        raise Skip(machine.reason_unknown("peers") or "the driver does not report peer access")
    has_nvlink = {gpu.index: bool(gpu.active_nvlinks) for gpu in machine.accelerators}
    for pair in machine.peers:
        status = pair.write if pair.read in (None, "OK") else pair.read
        if pair.src > pair.dst or status in (None, "OK"):
            continue
        scope = f"pair:{pair.src}-{pair.dst}"
        reason = KNOWN_ERRORS["peer_access"].get(status, "unknown reason")
        observed = f"no peer access ({status}: {reason})"
        linked = all(has_nvlink.get(index, True) for index in (pair.src, pair.dst))
        if linked or pair.nvlink == "OK":
            yield fail(scope, observed, "OK over NVLink")
        elif pair.driver_class in ("PIX", "PXB") and status != "GNS":
            expected = f"OK, because both are below the same PCIe switch ({pair.driver_class})"
            yield warn(scope, observed, expected)


def _pcie_links(machine: Machine, name: str) -> list[tuple[str, str, int, int]]:
    """Return (scope, PCI address, value, maximum) for each PCIe link of a GPU or RDMA NIC.

    `name` is the name of the value: "width" or "generation".
    """
    links = [(f"gpu:{gpu.index}", gpu.pci_address, gpu.pcie) for gpu in machine.accelerators]
    for port in machine.rdma:
        if (device := machine.pci_device(port.pci_address)) is not None:
            links.append((f"nic:{port.device}", device.address, device.link))
    if not any(link for _, _, link in links):
        require_gpus(machine)
        reason = machine.reason_unknown("accelerators[0].pcie")
        raise Skip(reason or "the PCIe links of GPUs are unknown")
    return [
        (scope, address or "", value, maximum)
        for scope, address, link in links
        if (value := getattr(link, name, None)) and (maximum := getattr(link, f"max_{name}", None))
    ]


@machine_check("pcie.width")
def pcie_width(machine: Machine) -> Findings:
    links = _pcie_links(machine, "width")
    if not links:
        reason = machine.reason_unknown("accelerators[0].pcie.width")
        raise Skip(reason or "the PCIe widths are unknown")
    for scope, address, lanes, max_lanes in links:
        if lanes < max_lanes:
            command = f"sudo lspci -vv -s {address} | grep -i lnk"
            yield fail(scope, f"{address} uses {lanes} lanes", f"{max_lanes} lanes", command)


@machine_check("pcie.generation")
def pcie_generation(machine: Machine) -> Findings:
    # Idle GPUs are not checked, because they reduce their PCIe generation to save power.
    idle = {f"gpu:{gpu.index}" for gpu in machine.accelerators if not gpu.processes}
    links = [link for link in _pcie_links(machine, "generation") if link[0] not in idle]
    if not links:
        raise Skip("idle GPUs lower their PCIe generation: run tutti doctor during a job")
    for scope, address, generation, maximum in links:
        if generation < maximum:
            command = f"sudo lspci -vv -s {address} | grep -i lnk"
            yield warn(
                scope, f"{address} runs PCIe {generation} under load", f"PCIe {maximum}", command
            )


@machine_check("pcie.errors")
def pcie_errors(machine: Machine) -> Findings:
    devices = [device for device in machine.pci if device.kind != "bridge"]
    if not devices:
        raise Skip(machine.reason_unknown("pci") or "no GPU or NIC on the PCI bus")
    scopes = {nic.pci_address: f"nic:{nic.name}" for nic in reversed(machine.nics)}
    scopes |= {gpu.pci_address: f"gpu:{gpu.index}" for gpu in machine.accelerators}
    for device in devices:
        scope = scopes.get(device.address, f"pci:{device.address}")
        command = f"cat /sys/bus/pci/devices/{device.address}/aer_dev_*"
        if device.uncorrectable_errors:
            observed = f"{device.uncorrectable_errors} uncorrectable errors since boot"
            yield fail(scope, observed, "0", command)
        elif (device.correctable_errors or 0) > 100:
            observed = f"{device.correctable_errors} corrected errors since boot"
            yield warn(scope, observed, "at most 100", command)
    for gpu in machine.accelerators:
        if (gpu.pcie_replays or 0) > 100:
            observed = f"{gpu.pcie_replays} PCIe packets were sent again"
            yield warn(f"gpu:{gpu.index}", observed, "at most 100", "nvidia-smi -q -d PCI")


def _peers_use_pcie(machine: Machine) -> bool:
    """Return whether PCIe carries data between GPUs, or between GPUs and RDMA NICs."""
    linked = all(gpu.active_nvlinks for gpu in machine.accelerators)
    return (len(machine.accelerators) > 1 and not linked) or machine.has_rdma


def _pci_devices_of_gpus(machine: Machine, component: str) -> list[PciDevice]:
    require_gpus(machine)
    if machine.is_virtual:
        raise Skip(f"the host of this virtual machine configures the {component}")
    devices = [machine.pci_device(gpu.pci_address) for gpu in machine.accelerators]
    return [device for device in devices if device is not None]


@machine_check("pcie.acs")
def acs(machine: Machine) -> Findings:
    gpus = _pci_devices_of_gpus(machine, "PCIe bridges")
    if not _peers_use_pcie(machine):
        raise Skip("no traffic between PCIe devices")
    above = {bridge for device in gpus for bridge in device.path[1:-1]}
    bridges = [d for d in machine.pci if d.kind == "bridge" and d.address in above]
    if all(bridge.acs_redirect is None for bridge in bridges):
        number = next((i for i, device in enumerate(machine.pci) if device.kind == "bridge"), 0)
        reason = machine.reason_unknown(f"pci[{number}].acs_redirect")
        raise Skip(reason or "the ACS setting of bridges above GPUs is unknown: run as root")
    enabled = [bridge.address for bridge in bridges if bridge.acs_redirect]
    if enabled:
        shown = ", ".join(enabled[:3]) + (" …" if len(enabled) > 3 else "")
        commands = [f"sudo setpci -s {address} ECAP_ACS+0x6.w=0000" for address in enabled]
        observed = f"ACS redirects peer traffic to the root complex at {shown}"
        yield warn("machine", observed, "disabled on bare metal", *commands)


@machine_check("pcie.iommu")
def iommu(machine: Machine) -> Findings:
    gpus = _pci_devices_of_gpus(machine, "IOMMU")
    kinds = {device.iommu_type for device in gpus if device.iommu_type}
    if not kinds:
        raise Skip("the kernel does not report the IOMMU type of GPUs")
    names = ", ".join(sorted(kinds))
    if kinds & {"DMA", "DMA-FQ"} and _peers_use_pcie(machine):
        yield warn("machine", f"the IOMMU translates the addresses of GPUs ({names})")
    yield passed(f"IOMMU {names}")


@machine_check("pcie.hidden")
def hidden_topology(machine: Machine) -> Findings:
    if len(require_gpus(machine)) < 2:
        raise Skip("one GPU")
    if file := settings(machine).get("NCCL_TOPO_FILE"):
        yield passed(f"NCCL_TOPO_FILE={file}")
        return
    hidden = []
    for gpu in machine.accelerators:
        device = machine.pci_device(gpu.pci_address)
        no_bridges = device is None or len(device.path) <= 2
        speed = gpu.pcie and gpu.pcie.max_generation
        width = device and device.link and device.link.width
        if no_bridges and (gpu.numa_node is None or not (speed or width)):
            hidden.append(str(gpu.index))
    if hidden:
        virtual = f"virtual machine ({machine.virtualisation})"
        kind = virtual if machine.is_virtual else "machine"
        yield warn("machine", f"this {kind} hides the PCIe topology of GPU {', '.join(hidden)}")
