"""Checks versions.*: versions of torch, CUDA, driver and NCCL, and whether they fit together."""

from tutti.machine.checks.cluster import Skip, gpus_of, parse_version
from tutti.machine.checks.finding import Findings, fail, machine_check, passed, warn
from tutti.machine.observation import Machine

_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 15)
_FIRST_NCCL_WITH_RAS = (2, 24)


def _version(machine: Machine, name: str) -> str:
    text = machine.versions.get(name, "")
    if not parse_version(text):
        raise Skip(machine.why(f"versions.{name}") or f"the version of {name} is unknown")
    return text


@machine_check("versions.torch")
def torch_version(machine: Machine) -> Findings:
    text = _version(machine, "torch")
    version = parse_version(text)[:2]
    if version < _OLDEST_TORCH:
        yield fail("machine", f"torch {text}", "2.11 or newer", "pip install 'torch>=2.11'")
    elif version > _NEWEST_TORCH:
        cure = "install torch 2.15, or report what does not work"
        yield warn("machine", f"torch {text}", "2.11 to 2.15, which are tested", cure=cure)
    else:
        yield passed(f"torch {text}")


@machine_check("versions.cuda")
def cuda_build(machine: Machine) -> Findings:
    gpus_of(machine)
    _version(machine, "torch")
    if machine.versions.get("cuda") in (None, "", "none", "not installed"):
        if reason := machine.why("versions.cuda"):
            raise Skip(reason)
        count = len(machine.accelerators)
        yield fail(
            "machine",
            f"{count} GPU{'s' * (count > 1)}, but torch is built without CUDA",
            "a CUDA build of torch",
            cure="install torch from the index for this driver's CUDA (pytorch.org, Get Started)",
        )


@machine_check("versions.driver")
def driver_version(machine: Machine) -> Findings:
    gpus_of(machine)
    cuda, supported = _version(machine, "cuda"), _version(machine, "cuda_driver")
    driver = machine.versions.get("driver", "unknown")
    # A driver also runs newer CUDA versions with the same major version.
    if parse_version(supported)[0] < parse_version(cuda)[0]:
        observed = f"driver {driver} supports CUDA {supported}; torch is built for CUDA {cuda}"
        yield fail("machine", observed, f"a driver for CUDA {cuda}")
    else:
        yield passed(f"driver {driver}, CUDA {supported}; torch's CUDA {cuda}")


@machine_check("versions.nccl")
def nccl_version(machine: Machine) -> Findings:
    gpus_of(machine)
    text = _version(machine, "nccl")
    if parse_version(text)[:2] < _FIRST_NCCL_WITH_RAS:
        observed = f"NCCL {text} has no RAS service, which reports what a stuck job waits for"
        yield warn("machine", observed, "2.24 or newer")
    else:
        yield passed(f"NCCL {text}")
