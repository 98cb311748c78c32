"""NVLink: whether every link is up and clean, the switch's fabric, and access between peers."""

from collections.abc import Iterator

from tutti.machine.checks.check import Check, on_machine
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gpus, of_gpus
from tutti.machine.observation import Machine

# Boards that always have all their links; a PCIe card has some only with a bridge.
_LINKS = (("V100-SXM", 6), ("A100-SXM", 12), ("H100 80GB HBM3", 18), ("B200", 18))


def _active(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "nvlinks", lambda gpu: gpu.nvlinks)
    active = {gpu.index: sum(link.active is True for link in links) for gpu, links in told}
    expected = max(active.values())
    board = ""
    for gpu, _ in told:
        for name, count in _LINKS:
            # One GPU of such a board, passed through to a virtual machine, may have none.
            if name in gpu.name and count > expected and len(told) > 1:
                expected, board = count, f", as a {gpu.name} has"
    if expected == 0:
        raise Skip("no NVLink, or no bridge on it")
    for gpu, links in told:
        missing = expected - active[gpu.index]
        if missing <= 0:
            continue
        down = [str(link.index) for link in links if link.active is False]
        which = f" (down: {', '.join(down)})" if down else ""
        observed = f"{active[gpu.index]} of {expected} links are up{which}"
        yield fail(
            f"gpu:{gpu.index}",
            observed,
            f"{expected}{board or ', as its peers have'}",
            "reset the GPU (on NVSwitch with fabric manager restarted); else have it serviced",
            f"nvidia-smi nvlink -s -i {gpu.index}",
            "sudo systemctl restart nvidia-fabricmanager",
            f"sudo nvidia-smi --gpu-reset -i {gpu.index}",
        )
    if set(active.values()) == {expected}:
        yield fine(f"{expected} links up on each of {len(told)} GPUs")


def _speed(machine: Machine) -> Iterator[Verdict]:
    """A link that trained at a lower speed than the rest."""
    speeds = [
        (gpu.index, link.index, link.speed_mbs)
        for gpu, links in of_gpus(machine, "nvlinks", lambda gpu: gpu.nvlinks)
        for link in links
        if link.active and link.speed_mbs
    ]
    if not speeds:
        raise Skip("no NVLink whose speed is told")
    best = max(speed for _, _, speed in speeds)
    for gpu, link, speed in speeds:
        if speed < 0.95 * best:
            observed = f"link {link} runs at {speed / 1000:.1f} GB/s"
            command = f"sudo nvidia-smi --gpu-reset -i {gpu}"
            yield fail(f"gpu:{gpu}", observed, f"{best / 1000:.1f} GB/s as the others", "", command)


def _errors(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "nvlinks", lambda gpu: gpu.nvlinks)
    if not any(links for _, links in told):
        raise Skip("no NVLink")
    for gpu, links in told:
        for link in links:
            errors = {
                "replays": link.replay_errors or 0,
                "recoveries": link.recovery_errors or 0,
                "CRC errors": link.crc_errors or 0,
            }
            if not any(errors.values()):
                continue
            counted = ", ".join(f"{count} {name}" for name, count in errors.items() if count)
            # A recovery takes the link down for a while; a replay is a packet sent twice.
            say = fail if errors["recoveries"] else warn
            observed = f"link {link.index}: {counted} since the driver was loaded"
            command = f"nvidia-smi nvlink -e -i {gpu.index}"
            yield say(f"gpu:{gpu.index}", observed, "0", "", command)


def _fabric(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "fabric_state", lambda gpu: gpu.fabric_state)
    if all(state == "not_supported" for _, state in told):
        raise Skip("no NVSwitch fabric that has to be set up")
    restart = "sudo systemctl restart nvidia-fabricmanager"
    for gpu, state in told:
        scope = f"gpu:{gpu.index}"
        if state not in ("completed", "not_supported"):
            cure = "start the fabric manager of the driver's version (in a VM: on its host)"
            yield fail(scope, f"the fabric is {state}", "completed", cure, restart)
        elif gpu.fabric_healthy is False:
            observed = "the fabric says that this GPU's bandwidth or route is degraded"
            yield fail(scope, observed, "healthy", "", restart)


def _peers(machine: Machine) -> Iterator[Verdict]:
    if len(gpus(machine)) < 2:
        raise Skip("one GPU")
    if not machine.peers:
        raise Skip(machine.why("peers") or "the driver does not tell")
    words = {
        "CNS": "the chipset does not support it",
        "GNS": "the GPU does not support it",
        "TNS": "the topology does not support it",
        "DR": "the driver's registry key disables it",
        "NS": "it is not supported",
        "U": "unknown",
    }
    by_index = {gpu.index: gpu for gpu in machine.accelerators}
    for pair in machine.peers:
        if pair.src > pair.dst or {pair.read, pair.write} <= {None, "OK"}:
            continue
        links = [by_index[i].nvlinks or () for i in (pair.src, pair.dst) if i in by_index]
        linked = all(any(link.active for link in each) for each in links)
        word = next(each for each in (pair.read, pair.write) if each not in (None, "OK"))
        observed = f"no access ({word}: {words.get(word or '', 'no reason told')})"
        scope = f"pair:{pair.src}-{pair.dst}"
        if linked or pair.nvlink == "OK":
            yield fail(scope, observed, "OK over NVLink", "", "nvidia-smi topo -p2p r")
        elif pair.driver_class in ("PIX", "PXB") and word != "GNS":
            expected = f"OK, the two share a PCIe switch ({pair.driver_class})"
            yield warn(scope, observed, expected, "", "nvidia-smi topo -p2p r")


CHECKS = (
    Check(
        "nvlink.active",
        "how many links of each GPU are up, against its peers and its board",
        "every ring is as slow as its weakest GPU",
        "reset the GPU or restart fabric manager; else have it serviced",
        on_machine(_active),
    ),
    Check(
        "nvlink.speed",
        "the speed each link was trained at",
        "one slow lane slows all traffic of its GPU",
        "reset the GPU",
        on_machine(_speed),
    ),
    Check(
        "nvlink.errors",
        "replays, recoveries and CRC errors",
        "a link that repeats itself is slow now and down soon",
        "watch whether they grow under load; then have the link serviced",
        on_machine(_errors),
    ),
    Check(
        "nvlink.fabric",
        "state and health of the NVSwitch fabric",
        "without fabric manager CUDA does not start on these boards, or without NVLink",
        "restart nvidia-fabricmanager",
        on_machine(_fabric),
    ),
    Check(
        "nvlink.peers",
        "whether GPUs may reach each other where NVLink or a PCIe switch joins them",
        "without peer access all traffic goes through host memory",
        "switch ACS and IOMMU translation off (pcie.acs, pcie.iommu); update the driver",
        on_machine(_peers),
    ),
)
