"""Checks gpus.* and clocks.*: number, models, errors, modes, processes, heat and clocks of GPUs."""

from collections import Counter

from tutti.machine.checks.cluster import (
    KNOWN_ERRORS,
    Cluster,
    Skip,
    read_gpus,
    require_gpus,
    require_known,
)
from tutti.machine.checks.finding import Findings, cluster_check, fail, machine_check, passed, warn
from tutti.machine.recording import Machine
from tutti.measure.units import format_bytes, format_seconds

_NVIDIA = "0x10de"


@machine_check("gpus.count")
def count(machine: Machine) -> Findings:
    on_bus = [d for d in machine.pci if d.kind == "gpu" and d.vendor == _NVIDIA]
    reported = {gpu.pci_address for gpu in machine.accelerators}
    if not on_bus:
        raise Skip(machine.reason_unknown("pci") or "no GPU")
    expected = f"{len(on_bus)} GPUs"
    if not reported:
        observed = f"{len(on_bus)} NVIDIA GPUs on the PCI bus, but the driver reports none"
        cure = "install or load the NVIDIA driver; start the container with --gpus all"
        commands = ("nvidia-smi", "docker run --gpus all …")
        yield fail("machine", observed, expected, *commands, cure=cure)
    for device in on_bus if reported else ():
        if device.address not in reported:
            yield fail(
                "machine",
                f"the GPU at {device.address} is on the PCI bus, but the driver does not report it",
                expected,
                f"sudo dmesg | grep -i -e xid -e {device.address.rpartition(':')[0]}",
                "sudo reboot",
                cure="look for Xid 79 (fallen off the bus), reset the GPU or reboot, check power",
            )
    yield passed(expected)


@machine_check("gpus.visible")
def visible_devices(machine: Machine) -> Findings:
    installed = len(require_gpus(machine))
    value = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        yield passed("CUDA_VISIBLE_DEVICES is not set: all GPUs are visible")
        return
    unset = "unset CUDA_VISIBLE_DEVICES"
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    uuids = [gpu.uuid or "" for gpu in machine.accelerators]
    for entry in entries:
        if entry.isdecimal():
            exists = int(entry) < installed
        else:
            exists = entry.startswith("MIG-") or any(uuid.startswith(entry) for uuid in uuids)
        if not exists:
            observed = f"CUDA_VISIBLE_DEVICES={value}: GPU {entry} does not exist"
            expected = f"0 to {installed - 1}; CUDA ignores {entry} and later entries"
            yield fail("machine", observed, expected, unset)
            return
    for entry, times in Counter(entries).items():
        if times > 1:
            observed = f"CUDA_VISIBLE_DEVICES={value}: GPU {entry} is listed {times} times"
            yield fail("machine", observed, "each GPU once", unset)
    if not entries:
        observed = f"CUDA_VISIBLE_DEVICES={value!r} hides all {installed} GPUs"
        yield warn("machine", observed, "not set", unset)
    yield passed(f"CUDA_VISIBLE_DEVICES={value}")


@cluster_check("gpus.alike")
def same_model(cluster: Cluster) -> Findings:
    models = Counter(gpu.name for machine in cluster.machines for gpu in machine.accelerators)
    if not models:
        raise Skip("no GPU")
    usual, number = models.most_common(1)[0]
    for machine in cluster.machines:
        for gpu in machine.accelerators:
            if gpu.name != usual:
                expected = f"{usual}, the model of {number} other GPUs"
                yield warn(f"gpu:{gpu.index}", gpu.name, expected, host=machine.host)
    yield passed(f"{number} × {usual}", "world")


@machine_check("gpus.ecc")
def ecc_errors(machine: Machine) -> Findings:
    counts = read_gpus(machine, "ecc.volatile_uncorrected")
    for gpu, errors in counts:
        if errors:
            observed = f"{errors} uncorrectable memory errors since the driver was loaded"
            yield fail(f"gpu:{gpu.index}", observed)
    if {gpu.ecc.enabled for gpu, _ in counts} == {True, False}:
        off = [str(gpu.index) for gpu, _ in counts if not gpu.ecc.enabled]
        observed = f"ECC is disabled on GPU {', '.join(off)} and enabled on the other GPUs"
        command = f"sudo nvidia-smi -i {','.join(off)} -e 1"
        cure = "enable ECC and reset these GPUs"
        yield warn("machine", observed, "enabled on all GPUs", command, cure=cure)


@machine_check("gpus.remap")
def row_remapping(machine: Machine) -> Findings:
    fields = [
        (gpu.ecc.remap_pending, gpu.ecc.retired_pages_pending) for gpu in require_gpus(machine)
    ]
    if all(field == (None, None) for field in fields):
        read_gpus(machine, "ecc.remap_pending")  # raises Skip with the reason
    for gpu, pending in zip(machine.accelerators, fields, strict=True):
        scope = f"gpu:{gpu.index}"
        if gpu.ecc.remap_failed:
            command = f"nvidia-smi -q -d ROW_REMAPPER -i {gpu.index}"
            observed = "a bad memory row could not be remapped"
            yield fail(scope, observed, "no failed remapping", command, cure="replace the GPU")
        elif any(pending):
            yield warn(scope, "a bad memory row will be remapped at the next reset")


@machine_check("gpus.recovery")
def recovery_action(machine: Machine) -> Findings:
    for gpu, action in read_gpus(machine, "recovery_action"):
        if action != "none":
            reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            command = "sudo reboot" if action == "node_reboot" else reset
            cure = KNOWN_ERRORS["recovery_action"].get(action, "")
            observed = f"the driver requests {action}"
            yield fail(f"gpu:{gpu.index}", observed, "none", command, cure=cure)


@machine_check("gpus.mode")
def compute_mode(machine: Machine) -> Findings:
    for gpu in require_gpus(machine):
        scope = f"gpu:{gpu.index}"
        if gpu.compute_mode == "prohibited":
            yield fail(scope, "compute mode prohibited (no process can use the GPU)")
        elif gpu.compute_mode == "exclusive_process":
            yield warn(scope, "compute mode exclusive_process (one process at a time)")
        if gpu.mig and len(machine.accelerators) > 1:
            observed = "MIG is enabled: MIG slices cannot access other GPUs"
            command = f"sudo nvidia-smi -i {gpu.index} -mig 0"
            yield warn(scope, observed, "disabled for jobs on several GPUs", command)


@machine_check("gpus.persistence")
def persistence_mode(machine: Machine) -> Findings:
    off = [str(gpu.index) for gpu, on in read_gpus(machine, "persistence") if not on]
    if off and not machine.is_virtual:
        yield warn("machine", f"persistence mode is disabled on GPU {', '.join(off)}")


@machine_check("gpus.processes")
def other_processes(machine: Machine) -> Findings:
    for gpu, number in read_gpus(machine, "processes"):
        scope, used = f"gpu:{gpu.index}", gpu.used_bytes or 0
        if number:
            yield warn(scope, f"{number} process{'es' * (number > 1)}, {format_bytes(used)} used")
        elif gpu.memory_bytes and used > 0.1 * gpu.memory_bytes:
            observed = f"{format_bytes(used)} are used, but no process owns this memory"
            expected = f"less than 10 % of {format_bytes(gpu.memory_bytes)} used"
            command = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            cure = "reset the GPU, because a dead job probably left its context on the GPU"
            yield warn(scope, observed, expected, command, cure=cure)


_XIDS_THAT_WARN = (63, 92, 94)
_RECENT_S = 24 * 3600


@machine_check("gpus.xid")
def xid_errors(machine: Machine) -> Findings:
    errors = require_known(machine, "xids", machine.xids)
    index = {gpu.pci_address: gpu.index for gpu in machine.accelerators}
    recent = {(x.pci_address, x.code) for x in errors if x.age_s is None or x.age_s < _RECENT_S}
    for (address, code), times in Counter((x.pci_address, x.code) for x in errors).items():
        if str(code) in KNOWN_ERRORS["xid"] and (address, code) in recent:
            problem = warn if code in _XIDS_THAT_WARN else fail
            scope = f"gpu:{index[address]}" if address in index else "machine"
            meaning = KNOWN_ERRORS["xid"][str(code)]
            yield problem(scope, f"Xid {code} × {times} at {address}: {meaning}")


@machine_check("clocks.throttle")
def throttling(machine: Machine) -> Findings:
    meanings = KNOWN_ERRORS["hardware_slowdown"]
    for gpu, reasons in read_gpus(machine, "clocks.throttle"):
        scope = f"gpu:{gpu.index}"
        heat = f", {gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
        # The driver reports hw_slowdown in addition to the specific reason. Report hw_slowdown only
        # if the driver gives no specific reason.
        causes = [reason for reason in reasons if reason in meanings and reason != "hw_slowdown"]
        for reason in causes or sorted({"hw_slowdown"} & set(reasons)):
            cure = "check power supply and cables" if "power" in reason else "check cooling"
            yield fail(scope, f"{reason}: {meanings[reason]}{heat}", cure=cure)
        if "sw_thermal" in reasons and not causes:
            observed = f"sw_thermal: the driver reduces the clocks because of heat{heat}"
            yield warn(scope, observed, cure="check cooling")


@machine_check("clocks.heat")
def temperature(machine: Machine) -> Findings:
    temperatures = read_gpus(machine, "temperature_c")
    for gpu, heat in temperatures:
        if gpu.slowdown_c is not None and heat >= gpu.slowdown_c - 3:
            observed = f"{heat} °C; the GPU slows down at {gpu.slowdown_c} °C"
            yield warn(f"gpu:{gpu.index}", observed, f"below {gpu.slowdown_c - 3} °C")
    values = [heat for _, heat in temperatures]
    yield passed(f"{min(values)} to {max(values)} °C")


@machine_check("clocks.power")
def power_limit(machine: Machine) -> Findings:
    for gpu, limit in read_gpus(machine, "power_limit_w"):
        default = gpu.default_power_limit_w
        if default is not None and limit < 0.99 * default:
            observed, expected = f"power limit {limit:.0f} W", f"{default:.0f} W, the default"
            command = f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}"
            yield warn(f"gpu:{gpu.index}", observed, expected, command)


@machine_check("clocks.locked")
def locked_clocks(machine: Machine) -> Findings:
    reasons = read_gpus(machine, "clocks.throttle")
    locked = [gpu.index for gpu, names in reasons if "application_clocks" in names]
    if len(locked) < len(reasons):
        for index in locked:
            observed = "the clocks of this GPU are locked, but the clocks of other GPUs are not"
            yield warn(f"gpu:{index}", observed)
    same_model = len({gpu.name for gpu, _ in reasons}) == 1
    fastest = max(gpu.clocks.max_sm_mhz or 0 for gpu, _ in reasons)
    for gpu, _ in reasons:
        if same_model and gpu.clocks.max_sm_mhz and gpu.clocks.max_sm_mhz < fastest:
            observed = f"the maximum SM clock is {gpu.clocks.max_sm_mhz} MHz"
            yield warn(f"gpu:{gpu.index}", observed, f"{fastest} MHz, as on other GPUs")


@cluster_check("clocks.skew")
def clock_skew(cluster: Cluster) -> Findings:
    offsets = cluster.probes.require("clock_offsets", cluster.probes.clock_offsets)
    for offset in offsets:
        certain = max(0.0, abs(offset.seconds) - offset.round_trip / 2)
        if certain > 1e-3:
            host, first = (cluster.machines[i].host for i in (offset.host, 0))
            direction = "ahead of" if offset.seconds > 0 else "behind"
            affected = "traces, logs and certificates" if certain > 5 else "traces"
            size = format_seconds(abs(offset.seconds))
            observed = f"{host} is {size} {direction} {first}, which affects {affected}"
            commands = (f"chronyc tracking  # on {host}", f"sudo chronyc makestep  # on {host}")
            yield warn("world", observed, "within 1 ms", *commands)
    if offsets:
        largest = max(abs(offset.seconds) for offset in offsets)
        yield passed(f"offset at most {format_seconds(largest)}", "world")
