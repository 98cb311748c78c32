"""Environment variables: misspelt, renamed, left over from debugging, or with odd values."""

from collections.abc import Iterator, Mapping

from tutti.machine.checks.check import Check, on_machine
from tutti.machine.checks.finding import Verdict, fail, fine, warn
from tutti.machine.checks.patient import Patient
from tutti.machine.checks.variables import RENAMED, nearest
from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.observation import Machine

Variables = Mapping[str, str]


def settings(machine: Machine) -> dict[str, str]:
    """Variables as NCCL sees them: its files first, the environment over them."""
    from_files = {k: v for each in machine.nccl_conf.values() for k, v in each.items()}
    return {**from_files, **machine.variables}


def shares_gpus(variables: Variables) -> bool:
    """Whether ranks share a GPU: then tutti itself sets variables that are wrong elsewhere."""
    return variables.get("TUTTI_RANKS_PER_GPU", "1") != "1" or "NCCL_HOSTID" in variables


def _misspelt(machine: Machine) -> Iterator[Verdict]:
    for name, value in sorted(settings(machine).items()):
        if meant := nearest(name):
            cure = f"rename it to {meant}, or unset it"
            commands = (f"unset {name}", f"export {meant}={value}")
            observed = f"{name} is set, which nothing reads"
            yield warn("machine", observed, f"perhaps {meant} was meant", cure, *commands)


def _renamed(machine: Machine) -> Iterator[Verdict]:
    for name, value in sorted(settings(machine).items()):
        if name not in RENAMED:
            continue
        new = RENAMED[name]
        if new is None:
            yield warn(
                "machine", f"{name}={value}", "it has no effect any more", "", f"unset {name}"
            )
        else:
            commands = (f"unset {name}", f"export {new}={value}")
            yield warn("machine", f"{name}={value}", f"it is {new} now", "", *commands)


# What each of these takes away when it is left on after a hunt for a fault.
_SWITCHES = (
    ("NCCL_P2P_DISABLE", "1", "GPUs of a host reach each other through host memory"),
    ("NCCL_SHM_DISABLE", "1", "GPUs without peer access use the network inside a host"),
    ("NCCL_IB_DISABLE", "1", "InfiniBand and RoCE are not used, TCP is"),
    ("NCCL_NVLS_ENABLE", "0", "NVSwitch does not reduce; all_reduce loses up to a quarter"),
    ("NCCL_CUMEM_ENABLE", "0", "no symmetric windows, no NVLS registration"),
    ("NCCL_NET_GDR_LEVEL", "LOC", "NICs do not reach GPU memory directly"),
    ("NCCL_P2P_LEVEL", "LOC", "GPUs of a host reach each other through host memory"),
    ("NCCL_RAS_ENABLE", "0", "a stuck job cannot be asked what it waits for"),
)


# What ranks that share a GPU need: `tutti run --ranks-per-gpu` sets the first by itself.
_FOR_SHARED_GPUS = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def _switched_off(machine: Machine) -> Iterator[Verdict]:
    variables = settings(machine)
    for name, off, effect in _SWITCHES:
        if variables.get(name, "").upper() != off:
            continue
        if name in _FOR_SHARED_GPUS and shares_gpus(variables):
            continue
        where = " (in nccl.conf)" if name not in machine.variables else ""
        yield warn("machine", f"{name}={off}{where}: {effect}", "not set", "", f"unset {name}")


_PINNED = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS"),
    *("NCCL_BUFFSIZE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
)


def _pinned(machine: Machine) -> Iterator[Verdict]:
    variables = settings(machine)
    for name in _PINNED:
        if name not in variables:
            continue
        value = variables[name]
        if name == "NCCL_PROTO" and "LL128" in value.upper() and not value.startswith("^"):
            observed = f"NCCL_PROTO={value} forces LL128, which corrupts data on some machines"
            yield fail("machine", observed, "not set: NCCL uses LL128 where it is safe", "")
        else:
            expected = "not set: NCCL chooses by size and topology"
            yield warn("machine", f"{name}={value} for every size", expected, "", f"unset {name}")


# Left over from debugging: what the value costs.
_COSTLY = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "kernels no longer overlap with anything"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked against all ranks first"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1", "TRUE"), "every collective blocks the host"),
    ("TORCH_NCCL_NAN_CHECK", ("1", "TRUE"), "every collective's input is scanned for NaN"),
    ("TORCH_NCCL_DESYNC_DEBUG", ("1", "TRUE"), "every collective is told to the store"),
    ("NCCL_CHECK_POINTERS", ("1",), "every pointer is checked at every call"),
    ("NCCL_CHECKS_DISABLE", ("1",), "a wrong argument crashes or hangs instead of being told"),
)


def _debugging(machine: Machine) -> Iterator[Verdict]:
    variables = settings(machine)
    for name, values, effect in _COSTLY:
        if variables.get(name, "").upper() in values:
            observed = f"{name}={variables[name]}: {effect}"
            yield warn("machine", observed, "not set in production", "", f"unset {name}")
    level = variables.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in variables:
        yield warn(
            "machine",
            f"NCCL_DEBUG={level} without NCCL_DEBUG_FILE: every rank writes to the same output",
            "WARN, or a file for each process",
            "set NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE=nccl.%h.%p.log",
            "export NCCL_DEBUG=WARN",
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),
    "CUDA_DEVICE_ORDER": ("FASTEST_FIRST", "PCI_BUS_ID"),
    "NCCL_SOCKET_FAMILY": ("AF_INET", "AF_INET6"),
    "NCCL_LAUNCH_MODE": ("PARALLEL", "GROUP"),
    "GLOO_DEVICE_TRANSPORT": ("TCP", "TCP_TLS", "UV", "IBVERBS"),
}
_NUMBERS = (
    "_DISABLE",
    "_ENABLE",
    "_TIMEOUT",
    "_RETRY_CNT",
    "_GID_INDEX",
    "_NCHANNELS",
    "_NTHREADS",
)


def _odd_values(machine: Machine) -> Iterator[Verdict]:
    variables = settings(machine)
    for name, value in sorted(variables.items()):
        allowed = _CHOICES.get(name)
        if allowed and value.upper() not in allowed:
            yield warn("machine", f"{name}={value}", f"one of {', '.join(allowed)}", "")
        # NCCL reads the leading digits: `true` is 0, the very opposite of what was meant.
        is_number = name.startswith("NCCL_") and name.endswith(_NUMBERS)
        if is_number and not value.lstrip("-").isdecimal():
            cure = "use a number: 1 for yes, 0 for no"
            yield fail("machine", f"{name}={value} is read as 0", "a number", cure)
        if value != value.strip() or value[:1] in ("'", '"'):
            cure = "take the quotes and blanks out"
            yield warn("machine", f"{name}={value!r}: quotes or blanks are part of it", "", cure)
    timeout = variables.get("NCCL_IB_TIMEOUT", "20")
    if timeout.isdecimal() and not 14 <= int(timeout) <= 22:
        wait = 4.096e-6 * 2 ** min(int(timeout), 31)
        observed = f"NCCL_IB_TIMEOUT={timeout}: a packet is given up after {wait:.3g} s"
        yield warn("machine", observed, "14 to 22; NCCL's default is 20", "")
    retries = variables.get("NCCL_IB_RETRY_CNT", "7")
    if retries.isdecimal() and int(retries) < 7:
        yield warn("machine", f"NCCL_IB_RETRY_CNT={retries}", "7, the default", "")


def _threads(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    variables, ranks = machine.variables, max(1, patient.ranks_on(host))
    own, cpus = len(parse_cpu_list(machine.cpus.allowed)), patient.cpus_on(host)
    if isinstance(machine.limits.cgroup_cpus, int | float):
        cpus = min(cpus, max(1, round(machine.limits.cgroup_cpus)))
    said = variables.get("OMP_NUM_THREADS", "")
    if said and not said.split(",")[0].isdecimal():
        yield warn("machine", f"OMP_NUM_THREADS={said}", "a number", "")
    elif not said and ranks > 1 and len(machine.accelerators) > 1 and ranks * own > cpus:
        observed = f"OMP_NUM_THREADS is not set: {ranks} ranks start {own} threads each"
        good = max(1, cpus // ranks)
        command = f"export OMP_NUM_THREADS={good}"
        yield warn("machine", observed, f"{good}: {cpus} CPUs for {ranks} ranks", "", command)
    elif said and int(said.split(",")[0]) * ranks > 2 * cpus:
        good = max(1, cpus // ranks)
        observed = f"OMP_NUM_THREADS={said} × {ranks} rank{'s' * (ranks > 1)} on {cpus} CPUs"
        command = f"export OMP_NUM_THREADS={good}"
        yield warn("machine", observed, f"at most {good}", "", command)
    else:
        yield fine(f"OMP_NUM_THREADS={said or '(not set)'}, {cpus} CPUs")


def _allocator(machine: Machine) -> Iterator[Verdict]:
    variables = settings(machine)
    conf = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    expandable = "expandable_segments:true" in conf.lower().replace(" ", "")
    hook = variables.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0").upper()
    if expandable and hook in ("1", "TRUE"):
        yield warn(
            "machine",
            "expandable_segments:True beside TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
            "one of the two: segments that grow cannot stay registered with NCCL",
            "",
            "unset TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        )


def _devices(machine: Machine) -> Iterator[Verdict]:
    variables = settings(machine)
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warn(
            "machine",
            "CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue for compute and communication",
            "not set, unless tensor parallelism before Blackwell asks for it: it slows sharding",
            "",
            "unset CUDA_DEVICE_MAX_CONNECTIONS",
        )
    models = {each.name for each in machine.accelerators}
    if len(models) > 1 and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield warn(
            "machine",
            f"{len(models)} kinds of GPU and CUDA_DEVICE_ORDER is not PCI_BUS_ID",
            "CUDA numbers GPUs as nvidia-smi does",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _files(machine: Machine) -> Iterator[Verdict]:
    for path, said in sorted(machine.nccl_conf.items()):
        overruled = [name for name in said if machine.variables.get(name, said[name]) != said[name]]
        for name in sorted(overruled):
            observed = f"{path} says {name}={said[name]}, the environment {machine.variables[name]}"
            yield warn("machine", observed, "one place for each setting (the environment wins)")
        if not overruled:
            yield fine(f"{path} sets {', '.join(f'{k}={v}' for k, v in sorted(said.items()))}")


CHECKS = (
    Check(
        "env.misspelt",
        "variables one or two letters away from one that NCCL, torch, gloo or OpenMP knows",
        "a misspelt variable is ignored without a word",
        "rename it, or unset it",
        on_machine(_misspelt),
    ),
    Check(
        "env.renamed",
        "variables that were renamed or have lost their effect",
        "the old name warns, is ignored, or will be",
        "use the new name, or unset it",
        on_machine(_renamed),
    ),
    Check(
        "env.switched_off",
        "transports and features that a variable switches off",
        "left over from a hunt for a fault, they cost most of the bandwidth",
        "unset it, and measure again with tutti bench collectives",
        on_machine(_switched_off),
    ),
    Check(
        "env.pinned",
        "algorithm, protocol, channels, threads or buffers that are fixed for every size",
        "NCCL's own choice differs by size and machine; LL128 where it is unsafe corrupts data",
        "unset it, unless a measurement on this very machine says otherwise",
        on_machine(_pinned),
    ),
    Check(
        "env.debugging",
        "variables that make every step slower to find faults",
        "they are easily forgotten",
        "unset it in production",
        on_machine(_debugging),
    ),
    Check(
        "env.values",
        "values that are out of range or not of the kind that is read",
        "NCCL reads NCCL_P2P_DISABLE=true as 0",
        "use a value that is read",
        on_machine(_odd_values),
    ),
    Check(
        "env.threads",
        "OMP_NUM_THREADS against CPUs and ranks",
        "by default every rank starts a thread for each CPU, and they push each other aside",
        "set it to CPUs divided by ranks (torchrun sets 1, tutti run the quotient)",
        _threads,
    ),
    Check(
        "env.allocator",
        "expandable segments together with NCCL's registration of tensors",
        "a segment that grows cannot stay registered",
        "choose one of the two",
        on_machine(_allocator),
    ),
    Check(
        "env.devices",
        "CUDA_DEVICE_MAX_CONNECTIONS and CUDA_DEVICE_ORDER",
        "one queue serialises what should overlap; unequal GPUs are numbered by speed",
        "unset the first; set the second to PCI_BUS_ID where GPUs differ",
        on_machine(_devices),
    ),
    Check(
        "env.files",
        "/etc/nccl.conf and ~/.nccl.conf against the environment",
        "they apply without a word",
        "keep each setting in one place",
        on_machine(_files),
    ),
)
