"""GPUs: how many there are, whether they are alike, healthy and ours."""

from collections import Counter
from collections.abc import Iterator

from tutti.machine.checks.check import Check, on_machine, on_world
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gibibytes, gpus, of_gpus
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

_NVIDIA = "0x10de"


def _count(machine: Machine) -> Iterator[Verdict]:
    on_bus = [each for each in machine.pci if each.kind == "gpu" and each.vendor == _NVIDIA]
    driven = {each.pci_address for each in machine.accelerators}
    if not on_bus:
        raise Skip(machine.why("pci") or "no GPU")
    for device in on_bus:
        if device.address in driven or not machine.accelerators:
            continue
        yield fail(
            "machine",
            f"the GPU at {device.address} is on the bus, and the driver does not know it",
            f"{len(on_bus)} GPUs",
            "it fell off the bus: look for Xid 79, reset it or reboot, then check its power",
            f"sudo dmesg | grep -i -e xid -e {device.address.rpartition(':')[0]}",
            "sudo reboot",
        )
    if not machine.accelerators:
        yield fail(
            "machine",
            f"{len(on_bus)} NVIDIA GPUs on the bus and none by the driver",
            f"{len(on_bus)} GPUs",
            "install or load NVIDIA's driver; in a container pass the GPUs in",
            "nvidia-smi",
            "docker run --gpus all …",
        )
    elif len(driven) == len(on_bus):
        yield fine(f"{len(on_bus)} GPUs")


def _visible(machine: Machine) -> Iterator[Verdict]:
    count = len(gpus(machine))
    said = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        yield fine("CUDA_VISIBLE_DEVICES is not set: all are visible")
        return
    names = [each.strip() for each in said.split(",") if each.strip()]
    ids = [gpu.uuid or "" for gpu in machine.accelerators]
    for place, name in enumerate(names):
        good = (
            int(name) < count
            if name.isdecimal()
            else name.startswith("MIG-") or any(each.startswith(name) for each in ids)
        )
        if not good:
            observed = f"CUDA_VISIBLE_DEVICES={said}: there is no {name}"
            expected = f"0 to {count - 1}; CUDA shows only the {place} before it"
            command = "unset CUDA_VISIBLE_DEVICES"
            yield fail("machine", observed, expected, "", command)
            return
    for name, times in Counter(names).items():
        if times > 1:
            observed = f"CUDA_VISIBLE_DEVICES={said}: {name} comes {times} times"
            yield fail("machine", observed, "each GPU once", "")
            return
    if not names:
        observed = f"CUDA_VISIBLE_DEVICES={said!r} hides all {count} GPUs"
        yield warn("machine", observed, "not set", "", "unset CUDA_VISIBLE_DEVICES")
    else:
        yield fine(f"CUDA_VISIBLE_DEVICES={said}")


def _alike(patient: Patient) -> Iterator[Verdict]:
    """All GPUs of all hosts: a job is as fast as its slowest, and as large as its smallest."""
    kinds = Counter(gpu.name for machine in patient.machines for gpu in machine.accelerators)
    if not kinds:
        raise Skip("no GPU")
    if len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        for machine in patient.machines:
            for gpu in machine.accelerators:
                if gpu.name != usual:
                    expected = f"{usual}, as most are"
                    yield warn(f"gpu:{gpu.index}", gpu.name, expected, host=machine.host)
    else:
        name, count = kinds.most_common(1)[0]
        yield fine(f"{count} × {name}", "world")


def _ecc(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "ecc.volatile_uncorrected", lambda gpu: gpu.ecc.volatile_uncorrected)
    for gpu, errors in told:
        scope = f"gpu:{gpu.index}"
        if errors:
            observed = f"{errors} uncorrectable memory errors since the driver was loaded"
            command = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            yield fail(scope, observed, "0", "drain the host and reset the GPU", command)
    settings = {gpu.ecc.enabled for gpu, _ in told}
    if settings == {True, False}:
        off = [str(gpu.index) for gpu, _ in told if not gpu.ecc.enabled]
        command = f"sudo nvidia-smi -i {','.join(off)} -e 1"
        yield warn("machine", f"ECC is off on GPU {', '.join(off)} only", "the same", "", command)


def _remap(machine: Machine) -> Iterator[Verdict]:
    for gpu, ecc in of_gpus(
        machine,
        "ecc.remap_pending",
        lambda gpu: (
            gpu.ecc
            if (gpu.ecc.remap_pending, gpu.ecc.retired_pages_pending) != (None,) * 2
            else None
        ),
    ):
        scope, reset = f"gpu:{gpu.index}", f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
        if ecc.remap_failed:
            yield fail(
                scope, "a memory row could not be remapped", "no failure", "have the GPU replaced"
            )
        elif ecc.remap_pending or ecc.retired_pages_pending:
            observed = "a bad memory row waits to be replaced by a spare"
            yield warn(scope, observed, "nothing pending", "reset the GPU when it is idle", reset)


def _recovery(machine: Machine) -> Iterator[Verdict]:
    cures = {
        "gpu_reset": "reset the GPU",
        "node_reboot": "reboot the host",
        "drain_p2p": "end the jobs that use peer access, then reset",
        "drain_and_reset": "end its jobs, then reset the GPU",
    }
    for gpu, action in of_gpus(machine, "recovery_action", lambda gpu: gpu.recovery_action):
        if action != "none":
            cure = cures.get(action, f"the driver asks for: {action}")
            reboot = action == "node_reboot"
            reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            command = "sudo reboot" if reboot else reset
            yield fail(f"gpu:{gpu.index}", f"the driver asks for {action}", "none", cure, command)


def _mode(machine: Machine) -> Iterator[Verdict]:
    for gpu in gpus(machine):
        scope = f"gpu:{gpu.index}"
        if gpu.compute_mode == "prohibited":
            command = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
            yield fail(scope, "compute mode prohibited", "default", "", command)
        elif gpu.compute_mode == "exclusive_process":
            command = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
            observed = "compute mode exclusive: one process at a time"
            yield warn(scope, observed, "default", "", command)
        if gpu.mig and len(machine.accelerators) > 1:
            command = f"sudo nvidia-smi -i {gpu.index} -mig 0"
            observed = "MIG is on: its slices cannot reach other GPUs"
            yield warn(scope, observed, "off for jobs on several GPUs", "", command)


def _persistence(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "persistence", lambda gpu: gpu.persistence)
    off = [str(gpu.index) for gpu, on in told if not on]
    if off and machine.virtualisation in (None, "none"):
        observed = f"persistence mode is off on GPU {', '.join(off)}"
        yield warn("machine", observed, "on", "", "sudo nvidia-smi -pm 1")


def _processes(machine: Machine) -> Iterator[Verdict]:
    for gpu, count in of_gpus(machine, "processes", lambda gpu: gpu.processes):
        scope, used = f"gpu:{gpu.index}", gpu.used_bytes or 0
        if count:
            observed = f"{count} process{'es' * (count > 1)} compute on it, {gibibytes(used)} used"
            command = "nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory --format=csv"
            yield warn(scope, observed, "nobody else", "", command)
        elif gpu.memory_bytes and used > 0.1 * gpu.memory_bytes:
            observed = f"{gibibytes(used)} are used and no process owns them"
            cure = "a dead job's context is left: reset the GPU"
            command = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            yield warn(scope, observed, "free memory", cure, command)


# Application faults (13, 31, 43, 45) say nothing of the hardware; those below do.
_XIDS = {
    48: "an uncorrectable memory error",
    61: "the microcontroller stopped",
    62: "the microcontroller halted",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "it fell off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the system processor did not answer",
    120: "the system processor failed",
    140: "an unrecovered memory error",
    143: "it could not be initialised",
}
_MILD = (63, 92, 94)
_RECENT_S = 24 * 3600


def _xids(machine: Machine) -> Iterator[Verdict]:
    if machine.xids is None:
        raise Skip(machine.why("xids") or "the kernel's log may not be read")
    index = {gpu.pci_address: gpu.index for gpu in machine.accelerators}
    for (address, code), times in Counter((x.pci_address, x.code) for x in machine.xids).items():
        recent = [
            x.age_s is None or x.age_s < _RECENT_S
            for x in machine.xids
            if (x.pci_address, x.code) == (address, code)
        ]
        if (code not in _XIDS and not 144 <= code <= 150) or not any(recent):
            continue
        what = _XIDS.get(code, "an NVLink error")
        scope = f"gpu:{index[address]}" if address in index else "machine"
        observed = f"Xid {code} × {times} at {address}: {what}"
        say = warn if code in _MILD else fail
        cure = "drain the host and reset the GPU; if it comes again, have it replaced"
        yield say(scope, observed, "none in the last day", cure, "sudo dmesg | grep -i xid")


CHECKS = (
    Check(
        "gpus.count",
        "GPUs on the PCI bus against GPUs of the driver",
        "a GPU that fell off the bus is missing without a word",
        "reset or reboot; check power and seating",
        on_machine(_count),
    ),
    Check(
        "gpus.visible",
        "CUDA_VISIBLE_DEVICES against the GPUs there are",
        "CUDA stops reading at the first that does not exist",
        "correct the list, or unset it",
        on_machine(_visible),
    ),
    Check(
        "gpus.alike",
        "whether all GPUs of all hosts are of one kind",
        "a job is as fast as its slowest GPU and as large as its smallest",
        "leave the odd ones out (CUDA_VISIBLE_DEVICES, a Slurm constraint)",
        on_world(_alike),
        "world",
    ),
    Check(
        "gpus.ecc",
        "uncorrectable memory errors, and whether ECC is on alike",
        "wrong bits become wrong gradients",
        "drain the host and reset the GPU; if they come again, have it replaced",
        on_machine(_ecc),
    ),
    Check(
        "gpus.remap",
        "memory rows that wait for a spare, or found none",
        "until the reset the bad row is in use",
        "reset the GPU",
        on_machine(_remap),
    ),
    Check(
        "gpus.recovery",
        "what the driver asks for after an error",
        "the GPU may work on, slower or wrong, until then",
        "do what it asks for",
        on_machine(_recovery),
    ),
    Check(
        "gpus.mode",
        "compute mode and MIG",
        "an exclusive GPU refuses the second process, a slice has no peers",
        "set the mode to default and MIG off",
        on_machine(_mode),
    ),
    Check(
        "gpus.persistence",
        "persistence mode (not in virtual machines)",
        "without it the driver unloads between jobs, and every start takes seconds",
        "switch it on",
        on_machine(_persistence),
    ),
    Check(
        "gpus.processes",
        "other processes, and memory that nobody owns",
        "they take memory and time from the job",
        "end them, or ask their owner",
        on_machine(_processes),
    ),
    Check(
        "gpus.xid",
        "errors that the driver wrote to the kernel's log in the last day",
        "hardware announces its end there",
        "drain the host and reset the GPU",
        on_machine(_xids),
    ),
)
