"""Checks gpus.*: number, models, memory errors, modes, other processes and Xid errors of GPUs."""

from collections import Counter

from tutti.machine.checks.cluster import (
    KNOWN_ERRORS,
    Cluster,
    Skip,
    gpus_of,
    is_virtual,
    known,
    read_gpus,
)
from tutti.machine.checks.finding import Findings, cluster_check, fail, machine_check, passed, warn
from tutti.machine.observation import Machine
from tutti.measure.units import format_bytes

_NVIDIA = "0x10de"


def _reset(index: int) -> str:
    return f"sudo nvidia-smi --gpu-reset -i {index}"


@machine_check("gpus.count")
def count(machine: Machine) -> Findings:
    on_bus = [each for each in machine.pci if each.kind == "gpu" and each.vendor == _NVIDIA]
    reported = {each.pci_address for each in machine.accelerators}
    if not on_bus:
        raise Skip(machine.why("pci") or "no GPU")
    if not machine.accelerators:
        yield fail(
            "machine",
            f"{len(on_bus)} NVIDIA GPUs on the PCI bus, but the driver reports none",
            f"{len(on_bus)} GPUs",
            "nvidia-smi",
            "docker run --gpus all …",
            cure="install or load the NVIDIA driver; start the container with --gpus all",
        )
        return
    for device in on_bus:
        if device.address not in reported:
            yield fail(
                "machine",
                f"the GPU at {device.address} is on the PCI bus, but the driver does not report it",
                f"{len(on_bus)} GPUs",
                f"sudo dmesg | grep -i -e xid -e {device.address.rpartition(':')[0]}",
                "sudo reboot",
                cure="it fell off the bus: look for Xid 79, reset it or reboot, check its power",
            )
    if len(reported) == len(on_bus):
        yield passed(f"{len(on_bus)} GPUs")


@machine_check("gpus.visible")
def visible_devices(machine: Machine) -> Findings:
    installed = len(gpus_of(machine))
    value = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        yield passed("CUDA_VISIBLE_DEVICES is not set: all GPUs are visible")
        return
    unset = "unset CUDA_VISIBLE_DEVICES"
    entries = [each.strip() for each in value.split(",") if each.strip()]
    uuids = [gpu.uuid or "" for gpu in machine.accelerators]
    for position, entry in enumerate(entries):
        exists = (
            int(entry) < installed
            if entry.isdecimal()
            else entry.startswith("MIG-") or any(each.startswith(entry) for each in uuids)
        )
        if not exists:
            observed = f"CUDA_VISIBLE_DEVICES={value}: GPU {entry} does not exist"
            expected = f"0 to {installed - 1}; CUDA uses only the {position} entries before it"
            yield fail("machine", observed, expected, unset)
            return
    for entry, times in Counter(entries).items():
        if times > 1:
            observed = f"CUDA_VISIBLE_DEVICES={value}: GPU {entry} is listed {times} times"
            yield fail("machine", observed, "each GPU once", unset)
            return
    if not entries:
        observed = f"CUDA_VISIBLE_DEVICES={value!r} hides all {installed} GPUs"
        yield warn("machine", observed, "not set", unset)
    else:
        yield passed(f"CUDA_VISIBLE_DEVICES={value}")


@cluster_check("gpus.alike")
def same_model(cluster: Cluster) -> Findings:
    models = Counter(gpu.name for machine in cluster.machines for gpu in machine.accelerators)
    if not models:
        raise Skip("no GPU")
    usual, number = models.most_common(1)[0]
    if len(models) == 1:
        yield passed(f"{number} × {usual}", "world")
    for machine in cluster.machines:
        for gpu in machine.accelerators:
            if gpu.name != usual:
                expected = f"{usual}, like {number} others"
                yield warn(f"gpu:{gpu.index}", gpu.name, expected, host=machine.host)


@machine_check("gpus.ecc")
def ecc_errors(machine: Machine) -> Findings:
    counts = read_gpus(machine, "ecc.volatile_uncorrected", lambda g: g.ecc.volatile_uncorrected)
    for gpu, errors in counts:
        if errors:
            observed = f"{errors} uncorrectable memory errors since the driver was loaded"
            yield fail(f"gpu:{gpu.index}", observed, "0", _reset(gpu.index))
    if {gpu.ecc.enabled for gpu, _ in counts} == {True, False}:
        off = [str(gpu.index) for gpu, _ in counts if not gpu.ecc.enabled]
        observed = f"ECC is disabled on GPU {', '.join(off)} and enabled on the others"
        command = f"sudo nvidia-smi -i {','.join(off)} -e 1"
        cure = "enable ECC and reset these GPUs"
        yield warn("machine", observed, "enabled on all", command, cure=cure)


@machine_check("gpus.remap")
def row_remapping(machine: Machine) -> Findings:
    pending = read_gpus(
        machine,
        "ecc.remap_pending",
        lambda g: (
            None
            if g.ecc.remap_pending is None and g.ecc.retired_pages_pending is None
            else bool(g.ecc.remap_pending or g.ecc.retired_pages_pending)
        ),
    )
    for gpu, is_pending in pending:
        scope = f"gpu:{gpu.index}"
        if gpu.ecc.remap_failed:
            observed = "a bad memory row could not be remapped"
            yield fail(scope, observed, "no failed remapping", cure="replace the GPU")
        elif is_pending:
            observed = "a bad memory row will be remapped at the next reset"
            yield warn(scope, observed, "no pending remapping", _reset(gpu.index))


@machine_check("gpus.recovery")
def recovery_action(machine: Machine) -> Findings:
    for gpu, action in read_gpus(machine, "recovery_action", lambda g: g.recovery_action):
        if action != "none":
            command = "sudo reboot" if action == "node_reboot" else _reset(gpu.index)
            cure = KNOWN_ERRORS["recovery_action"].get(action, "")
            observed = f"the driver requests {action}"
            yield fail(f"gpu:{gpu.index}", observed, "none", command, cure=cure)


@machine_check("gpus.mode")
def compute_mode(machine: Machine) -> Findings:
    for gpu in gpus_of(machine):
        scope, command = f"gpu:{gpu.index}", f"sudo nvidia-smi -i {gpu.index}"
        if gpu.compute_mode == "prohibited":
            observed = "compute mode prohibited: no process can use it"
            yield fail(scope, observed, "default", f"{command} -c DEFAULT")
        elif gpu.compute_mode == "exclusive_process":
            observed = "compute mode exclusive_process: one process at a time"
            yield warn(scope, observed, "default", f"{command} -c DEFAULT")
        if gpu.mig and len(machine.accelerators) > 1:
            observed = "MIG is enabled: its slices cannot access other GPUs"
            yield warn(scope, observed, "disabled for jobs on several GPUs", f"{command} -mig 0")


@machine_check("gpus.persistence")
def persistence_mode(machine: Machine) -> Findings:
    modes = read_gpus(machine, "persistence", lambda g: g.persistence)
    off = [str(gpu.index) for gpu, on in modes if not on]
    if off and not is_virtual(machine):
        observed = f"persistence mode is disabled on GPU {', '.join(off)}"
        yield warn("machine", observed, "enabled", "sudo nvidia-smi -pm 1")


@machine_check("gpus.processes")
def other_processes(machine: Machine) -> Findings:
    for gpu, number in read_gpus(machine, "processes", lambda g: g.processes):
        scope, used = f"gpu:{gpu.index}", gpu.used_bytes or 0
        if number:
            processes = f"{number} process{'es' * (number > 1)}"
            command = "nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory --format=csv"
            yield warn(scope, f"{processes}, {format_bytes(used)} used", "no process", command)
        elif gpu.memory_bytes and used > 0.1 * gpu.memory_bytes:
            observed = f"{format_bytes(used)} are used, but no process owns them"
            expected = f"less than 10 % of {format_bytes(gpu.memory_bytes)} used"
            cure = "the context of a dead job is left: reset the GPU"
            yield warn(scope, observed, expected, _reset(gpu.index), cure=cure)


_XIDS_THAT_WARN = (63, 92, 94)
_RECENT_S = 24 * 3600


@machine_check("gpus.xid")
def xid_errors(machine: Machine) -> Findings:
    errors = known(machine, "xids", machine.xids)
    index = {gpu.pci_address: gpu.index for gpu in machine.accelerators}
    recent = {(x.pci_address, x.code) for x in errors if x.age_s is None or x.age_s < _RECENT_S}
    for (address, code), times in Counter((x.pci_address, x.code) for x in errors).items():
        if str(code) in KNOWN_ERRORS["xid"] and (address, code) in recent:
            scope = f"gpu:{index[address]}" if address in index else "machine"
            observed = f"Xid {code} × {times} at {address}: {KNOWN_ERRORS['xid'][str(code)]}"
            say = warn if code in _XIDS_THAT_WARN else fail
            yield say(scope, observed, "none in the last 24 h", "sudo dmesg | grep -i xid")
