"""Checks env.* and versions.*: variables of NCCL, torch and OpenMP; versions of torch and CUDA."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tutti.machine.checks.cluster import Cluster, Skip, parse_version, require_gpus
from tutti.machine.checks.finding import Findings, fail, host_check, machine_check, passed, warn
from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.recording import Machine


def settings(machine: Machine) -> dict[str, str]:
    """Return the effective variables. The environment overrides the nccl.conf files."""
    from_files = {k: v for values in machine.nccl_conf.values() for k, v in values.items()}
    return {**from_files, **machine.variables}


def shares_gpus(variables: Mapping[str, str]) -> bool:
    """Return whether ranks share a GPU.

    If ranks share a GPU, NCCL needs some variables that are mistakes in all other cases.
    """
    return variables.get("TUTTI_RANKS_PER_GPU", "1") != "1" or "NCCL_HOSTID" in variables


_TABLES = tomllib.loads(Path(__file__).with_name("known_variables.toml").read_text())
# Variables that NCCL, torch, gloo and OpenMP read.
KNOWN = {prefix + name for prefix, names in _TABLES["known"].items() for name in names.split()}
# {old name: new name, or "" if the variable no longer has any effect}
RENAMED: dict[str, str] = _TABLES["renamed"]
LISTS = {name: tuple(names.split()) for name, names in _TABLES["lists"].items()}


def closest_known(name: str) -> str | None:
    """Return the known variable whose name `name` probably misspells.

    Return None if `name` is spelt correctly, or if no known variable has a similar name.
    """
    if name in KNOWN or name in RENAMED or name.startswith(LISTS["plugins"]):
        return None
    if name.upper() in KNOWN:
        return name.upper()
    close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.88)
    return close[0] if close else None


@machine_check("env.misspelt")
def misspelt(machine: Machine) -> Findings:
    for name, value in sorted(settings(machine).items()):
        if correct := closest_known(name):
            observed, expected = f"{name} is set, but no library reads it", f"probably {correct}"
            commands = (f"unset {name}", f"export {correct}={value}")
            cure = f"rename the variable to {correct}, or unset it"
            yield warn("machine", observed, expected, *commands, cure=cure)


@machine_check("env.renamed")
def renamed(machine: Machine) -> Findings:
    for name, value in sorted(settings(machine).items()):
        if new := RENAMED.get(name):
            commands = (f"unset {name}", f"export {new}={value}")
            yield warn("machine", f"{name}={value}", f"the new name {new}", *commands)
        elif name in RENAMED:
            expected = "not set: the variable no longer has any effect"
            yield warn("machine", f"{name}={value}", expected, f"unset {name}")


# Variables that may be set if ranks share a GPU. On a single host, `tutti run --ranks-per-gpu` sets
# NCCL_IB_DISABLE.
_FOR_SHARED_GPUS = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


@machine_check("env.switched_off")
def switched_off(machine: Machine) -> Findings:
    variables = settings(machine)
    for name, (off, effect) in _TABLES["switched_off"].items():
        needed = name in _FOR_SHARED_GPUS and shares_gpus(variables)
        if variables.get(name, "").upper() == off and not needed:
            source = " (in nccl.conf)" if name not in machine.variables else ""
            yield warn("machine", f"{name}={off}{source}: {effect}", "not set", f"unset {name}")


@machine_check("env.pinned")
def pinned(machine: Machine) -> Findings:
    variables = settings(machine)
    for name in sorted(set(LISTS["pinned"]) & set(variables)):
        value, problem = variables[name], warn
        observed = f"{name}={value} for all message sizes"
        expected = "not set: NCCL chooses by message size and topology"
        if name == "NCCL_PROTO" and "LL128" in value.upper() and not value.startswith("^"):
            problem = fail
            observed = f"NCCL_PROTO={value} forces LL128, which corrupts data on some machines"
            expected = "not set: NCCL uses LL128 only where it is safe"
        yield problem("machine", observed, expected, f"unset {name}")


@machine_check("env.debugging")
def debugging(machine: Machine) -> Findings:
    variables = settings(machine)
    for name, (values, cost) in _TABLES["costly"].items():
        if variables.get(name, "").upper() in values.split():
            observed = f"{name}={variables[name]}: {cost}"
            yield warn("machine", observed, "not set in production", f"unset {name}")
    level = variables.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in variables:
        observed = f"NCCL_DEBUG={level} without NCCL_DEBUG_FILE: all ranks write to one output"
        expected = "NCCL_DEBUG=WARN, or one log file per process"
        cure = "set NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE=nccl.%h.%p.log"
        yield warn("machine", observed, expected, "export NCCL_DEBUG=WARN", cure=cure)


@machine_check("env.values")
def invalid_values(machine: Machine) -> Findings:
    variables = settings(machine)
    for name, value in sorted(variables.items()):
        allowed = _TABLES["choices"].get(name)
        if allowed and value.upper() not in allowed:
            yield warn("machine", f"{name}={value}", f"one of {', '.join(allowed)}")
        # NCCL parses only leading digits, so it reads `true` as 0, which means the opposite.
        is_number = name.startswith("NCCL_") and name.endswith(LISTS["number_suffixes"])
        if is_number and not value.lstrip("-").isdecimal():
            cure = "use a number: 1 for yes, 0 for no"
            yield fail("machine", f"{name}={value} is read as 0", "a number", cure=cure)
        if value != value.strip() or value[:1] in ("'", '"'):
            observed = f"{name}={value!r} contains quotes or spaces"
            cure = "remove quotes and spaces from the value"
            yield warn("machine", observed, "a value without quotes and spaces", cure=cure)
    timeout = variables.get("NCCL_IB_TIMEOUT", "20")
    if timeout.isdecimal() and not 14 <= int(timeout) <= 22:
        seconds = 4.096e-6 * 2 ** min(int(timeout), 31)
        wait = f"the NIC waits {seconds:.3g} s for the acknowledgement of a packet"
        observed = f"with NCCL_IB_TIMEOUT={timeout}, {wait}"
        yield warn("machine", observed, "14 to 22 (default 20)", "export NCCL_IB_TIMEOUT=20")
    retries = variables.get("NCCL_IB_RETRY_CNT", "7")
    if retries.isdecimal() and int(retries) < 7:
        observed = f"NCCL_IB_RETRY_CNT={retries}"
        yield warn("machine", observed, "7, the default", "unset NCCL_IB_RETRY_CNT")


@host_check("env.threads")
def omp_threads(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    ranks = max(1, cluster.ranks_on(host))
    own_cpus, cpus = len(parse_cpu_list(machine.cpus.allowed)), cluster.cpus_on(host)
    if isinstance(machine.limits.cgroup_cpus, int | float):
        cpus = min(cpus, max(1, round(machine.limits.cgroup_cpus)))
    value = machine.variables.get("OMP_NUM_THREADS", "")
    threads = value.split(",")[0]
    share = max(1, cpus // ranks)
    command = f"export OMP_NUM_THREADS={share}"
    if value and not threads.isdecimal():
        yield warn("machine", f"OMP_NUM_THREADS={value}", "a number", command)
    elif not value and ranks > 1 and len(machine.accelerators) > 1 and ranks * own_cpus > cpus:
        observed = f"OMP_NUM_THREADS is not set: {ranks} ranks start {own_cpus} threads each"
        yield warn("machine", observed, f"{share}: {cpus} CPUs / {ranks} ranks", command)
    elif value and int(threads) * ranks > 2 * cpus:
        observed = f"OMP_NUM_THREADS={value} × {ranks} rank{'s' * (ranks > 1)} on {cpus} CPUs"
        yield warn("machine", observed, f"at most {share}", command)
    yield passed(f"OMP_NUM_THREADS={value or '(not set)'}, {cpus} CPUs")


@machine_check("env.allocator")
def allocator(machine: Machine) -> Findings:
    variables, hook = settings(machine), "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    conf = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    expandable = "expandable_segments:true" in conf.lower().replace(" ", "")
    if expandable and variables.get(hook, "0").upper() in ("1", "TRUE"):
        observed = f"expandable_segments:True and {hook}=1"
        expected = "only one of the two: a segment that grows cannot stay registered"
        yield warn("machine", observed, expected, f"unset {hook}")


@machine_check("env.devices")
def cuda_devices(machine: Machine) -> Findings:
    variables = settings(machine)
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warn(
            "machine",
            "CUDA_DEVICE_MAX_CONNECTIONS=1: compute and communication share one hardware queue",
            "not set: 1 slows FSDP, and only tensor parallelism on GPUs before Blackwell needs it",
            "unset CUDA_DEVICE_MAX_CONNECTIONS",
        )
    models = {gpu.name for gpu in machine.accelerators}
    if len(models) > 1 and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        observed = f"{len(models)} GPU models, and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
        command, cure = "export CUDA_DEVICE_ORDER=PCI_BUS_ID", "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        yield warn("machine", observed, "CUDA numbers GPUs as nvidia-smi does", command, cure=cure)


@machine_check("env.files")
def nccl_conf_files(machine: Machine) -> Findings:
    for path, values in sorted(machine.nccl_conf.items()):
        for name, value in sorted(values.items()):
            if (actual := machine.variables.get(name, value)) != value:
                observed = f"{path} has {name}={value}, but the environment has {actual}"
                yield warn("machine", observed, "the same value (the environment takes precedence)")
        yield passed(f"{path} sets {', '.join(f'{k}={v}' for k, v in sorted(values.items()))}")


_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 15)
_FIRST_NCCL_WITH_RAS = (2, 24)


def _version(machine: Machine, name: str) -> str:
    text = machine.versions.get(name, "")
    if not parse_version(text):
        reason = machine.reason_unknown(f"versions.{name}")
        raise Skip(reason or f"the version of {name} is unknown")
    return text


@machine_check("versions.torch")
def torch_version(machine: Machine) -> Findings:
    text = _version(machine, "torch")
    version = parse_version(text)[:2]
    if version < _OLDEST_TORCH:
        yield fail("machine", f"torch {text}", "2.11 or newer", "pip install 'torch>=2.11'")
    elif version > _NEWEST_TORCH:
        cure = "install torch 2.15, or report the functions that do not work"
        yield warn("machine", f"torch {text}", "2.11 to 2.15, which are tested", cure=cure)
    yield passed(f"torch {text}")


@machine_check("versions.cuda")
def cuda_build(machine: Machine) -> Findings:
    count = len(require_gpus(machine))
    _version(machine, "torch")
    if machine.versions.get("cuda") in (None, "", "none", "not installed"):
        if reason := machine.reason_unknown("versions.cuda"):
            raise Skip(reason)
        observed = f"{count} GPU{'s' * (count > 1)}, but torch is built without CUDA"
        cure = "install the torch build for this driver's CUDA version (pytorch.org, Get Started)"
        yield fail("machine", observed, "a CUDA build of torch", cure=cure)


@machine_check("versions.driver")
def driver_version(machine: Machine) -> Findings:
    require_gpus(machine)
    cuda, supported = _version(machine, "cuda"), _version(machine, "cuda_driver")
    driver = machine.versions.get("driver", "unknown")
    observed = f"driver {driver} supports CUDA {supported}; torch is built for CUDA {cuda}"
    # A driver also supports newer minor versions of the same CUDA major version.
    if parse_version(supported)[0] < parse_version(cuda)[0]:
        yield fail("machine", observed, f"a driver for CUDA {cuda}")
    yield passed(observed)


@machine_check("versions.nccl")
def nccl_version(machine: Machine) -> Findings:
    require_gpus(machine)
    text = _version(machine, "nccl")
    if parse_version(text)[:2] < _FIRST_NCCL_WITH_RAS:
        yield warn("machine", f"NCCL {text} has no RAS service, which reports late ranks")
    yield passed(f"NCCL {text}")
