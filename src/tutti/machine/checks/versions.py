"""Versions: of torch, driver, CUDA and NCCL, and whether they fit each other."""

from collections.abc import Iterator

from tutti.machine.checks.check import Check, on_machine
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gpus, parse_version
from tutti.machine.observation import Machine

_OLDEST, _NEWEST = (2, 11), (2, 15)
_RAS = (2, 24)


def _version(machine: Machine, name: str) -> str:
    text = machine.versions.get(name, "")
    if not parse_version(text):
        raise Skip(machine.why(f"versions.{name}") or f"the version of {name} is unknown")
    return text


def _torch(machine: Machine) -> Iterator[Verdict]:
    text = _version(machine, "torch")
    version = parse_version(text)[:2]
    if version < _OLDEST:
        command = "pip install 'torch>=2.11'"
        yield fail("machine", f"torch {text}", "2.11 or newer", "", command)
    elif version > _NEWEST:
        yield warn(
            "machine", f"torch {text}", "2.11 to 2.15 are known to work", "expect small surprises"
        )
    else:
        yield fine(f"torch {text}")


def _driver(machine: Machine) -> Iterator[Verdict]:
    gpus(machine)
    cuda, served = _version(machine, "cuda"), _version(machine, "cuda_driver")
    driver = machine.versions.get("driver", "unknown")
    # Within a major version a driver serves newer runtimes, too.
    if parse_version(served)[0] < parse_version(cuda)[0]:
        observed = f"driver {driver} serves CUDA {served}; torch was built for {cuda}"
        cure = "update the driver, or install a torch for the driver's CUDA"
        yield fail("machine", observed, f"a driver for CUDA {cuda}", cure)
    else:
        yield fine(f"driver {driver}, CUDA {served}, torch's {cuda}")


def _built_for(machine: Machine) -> Iterator[Verdict]:
    gpus(machine)
    _version(machine, "torch")
    if machine.versions.get("cuda") in (None, "", "none", "not installed"):
        if why := machine.why("versions.cuda"):
            raise Skip(why)
        count = len(machine.accelerators)
        yield fail(
            "machine",
            f"{count} GPU{'s' * (count > 1)}, and a torch without CUDA",
            "a torch that was built for CUDA",
            "install torch from the index for this driver's CUDA (pytorch.org, Get Started)",
        )


def _nccl(machine: Machine) -> Iterator[Verdict]:
    gpus(machine)
    text = _version(machine, "nccl")
    if parse_version(text)[:2] < _RAS:
        observed = f"NCCL {text}: a stuck job cannot be asked what it waits for"
        yield warn("machine", observed, "2.24 or newer, which has the RAS service", "")
    else:
        yield fine(f"NCCL {text}")


CHECKS = (
    Check(
        "versions.torch",
        "the version of torch",
        "tutti uses what torch has had since 2.11",
        "install a torch from 2.11 to 2.15",
        on_machine(_torch),
    ),
    Check(
        "versions.cuda",
        "whether torch was built for CUDA where there are GPUs",
        "a CPU-only torch trains on the CPU without a word",
        "install a torch with CUDA",
        on_machine(_built_for),
    ),
    Check(
        "versions.driver",
        "whether the driver serves the CUDA that torch was built for",
        "an older driver refuses every kernel",
        "update the driver, or install a torch for its CUDA",
        on_machine(_driver),
    ),
    Check(
        "versions.nccl",
        "the version of NCCL",
        "since 2.24 a running job can be asked which rank is late (RAS, port 28028)",
        "install a newer torch, or its NCCL",
        on_machine(_nccl),
    ),
)
