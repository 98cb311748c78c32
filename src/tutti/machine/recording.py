"""Machine: hardware, software and settings of one host, and files with recorded machines.

`observe()` reads this host. `--record FILE` writes machines to a file with `format_machines()`, and
`--from FILE` reads them with `read_machines()`.
"""

import dataclasses
import json
import platform
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tutti.machine import cpu_numa, environment
from tutti.machine.cpu_numa import Cpus, Limits, Memory, NumaNode
from tutti.machine.environment import Xid
from tutti.machine.gpus import Accelerator, PeerAccess, read_accelerators
from tutti.machine.nics import Nic, RdmaPort, read_nics, read_rdma
from tutti.machine.pci import PciDevice, read_pci
from tutti.machine.sysfs import SysFiles

SCHEMA = "tutti.machine/1"

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """One host. A field whose value is None is unknown, and `unknown` contains the reason.

    The keys of `unknown` are paths such as `accelerators[0].ecc.enabled`. The reason for a path
    also applies to all fields below that path.
    """

    host: str
    observed_at: str | None
    """The UTC time of the observation, in ISO 8601 format."""
    name_resolution: str | None
    """The kind of address to which the hostname resolves: "loopback", "outside" (any other address)
    or "nothing" (the name cannot be resolved)."""
    system: str | None
    kernel: str | None
    architecture: str | None
    product: str | None
    virtualisation: str | None
    """The hypervisor ("kvm", "microsoft", "xen", "vmware", …), or "none"."""
    container: str | None
    """The kind of container ("docker", "podman", "kubernetes", …), or "none"."""
    cpus: Cpus
    numa: tuple[NumaNode, ...]
    memory: Memory
    accelerators: tuple[Accelerator, ...]
    peers: tuple[PeerAccess, ...]
    pci: tuple[PciDevice, ...]
    nics: tuple[Nic, ...]
    rdma: tuple[RdmaPort, ...]
    limits: Limits
    iommu_groups: int | None
    kernel_parameters: tuple[str, ...] | None
    """Kernel parameters that concern IOMMU, PCI, NUMA, huge pages and isolated CPUs."""
    kernel_modules: tuple[str, ...] | None
    """Loaded kernel modules for GPUs and RDMA NICs, such as nvidia_peermem."""
    sysctls: dict[str, str]
    nccl_conf: dict[str, dict[str, str]]
    """The settings in /etc/nccl.conf and ~/.nccl.conf, keyed by file."""
    variables: dict[str, str]
    """The environment variables that recorded_names.toml allows."""
    versions: dict[str, str]
    """Versions of "python", "torch", "nccl", "driver" and others. "cuda" is the CUDA version for
    which torch is built, and "cuda_driver" is the newest CUDA version that the driver supports."""
    xids: tuple[Xid, ...] | None
    """The Xid errors in the kernel log, or None if the kernel log cannot be read."""
    unknown: dict[str, str] = field(default_factory=dict)

    def reason_unknown(self, path: str) -> str | None:
        """Return the reason why a field, or one of the fields that contain it, is unknown.

        Return None if no reason is recorded.
        """
        while path:
            if path in self.unknown:
                return self.unknown[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None

    def pci_device(self, address: str | None) -> PciDevice | None:
        """Return the PCI device at an address, or None if /sys does not contain the device."""
        return next((device for device in self.pci if device.address == address), None)

    @property
    def has_rdma(self) -> bool:
        """Whether any RDMA port is active."""
        return any(port.state == "ACTIVE" for port in self.rdma)

    @property
    def is_virtual(self) -> bool:
        """Whether the machine is known to be a virtual machine."""
        return self.virtualisation not in (None, "none")

    @classmethod
    def from_json(cls, values: Any) -> "Machine":
        """Return the Machine for `values`, which dataclasses.asdict() has returned.

        A missing field becomes unknown. A wrong key or type raises ValueError.
        """
        missing: dict[str, str] = {}
        machine = _from_json(cls, values, "", missing)
        machine.unknown.update(missing)
        return machine


def observe(root: Path = Path("/")) -> Machine:
    """Return this host as described by /sys, /proc and the GPU driver.

    A value that cannot be read is recorded as unknown and does not raise an exception. Tests set
    `root` to a directory that contains copies of sys and proc.
    """
    unknown: dict[str, str] = {}
    files = SysFiles(unknown, root)
    pci = read_pci(files)
    versions = environment.read_versions(files)
    accelerators, peers = read_accelerators(files, pci, versions)
    return Machine(
        host=platform.node(),
        observed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        name_resolution=environment.read_name_resolution(),
        system=files.search(r'^PRETTY_NAME="?([^"\n]*)', "/etc/os-release", "system"),
        kernel=platform.release(),
        architecture=platform.machine(),
        product=environment.read_product(files),
        virtualisation=environment.read_virtualisation(files),
        container=environment.read_container(files),
        cpus=cpu_numa.read_cpus(files),
        numa=cpu_numa.read_numa(files),
        memory=cpu_numa.read_memory(files),
        accelerators=accelerators,
        peers=peers,
        pci=pci,
        nics=read_nics(files),
        rdma=read_rdma(files),
        limits=cpu_numa.read_limits(files),
        iommu_groups=environment.read_iommu_groups(files),
        kernel_parameters=environment.read_kernel_parameters(files),
        kernel_modules=environment.read_kernel_modules(files),
        sysctls=environment.read_sysctls(files),
        nccl_conf=environment.read_nccl_conf(files),
        variables=environment.read_variables(),
        versions=versions,
        xids=environment.read_xids(files),
        unknown=unknown,
    )


# --- recorded files ------------------------------------------------------------------------------


def format_machines(machines: Sequence[Machine], command: Sequence[str], note: str) -> str:
    """Return the content of a machine file: one machine per host, and a note on their origin."""
    content = {
        "schema": SCHEMA,
        "note": note,
        "command": command,
        "machines": [dataclasses.asdict(machine) for machine in machines],
    }
    return _format(content) + "\n"


def _format(value: Any, depth: int = 0) -> str:
    """Return indented JSON. A list or object that fits into 200 characters is on one line."""
    text = json.dumps(value)
    if len(text) + depth <= 200 or not isinstance(value, dict | list | tuple):
        return text
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_format(item, depth + 1)}" for key, item in value.items()]
    else:
        items = [_format(item, depth + 1) for item in value]
    lines = f",\n{' ' * (depth + 1)}".join(items)
    return f"{text[0]}\n{' ' * (depth + 1)}{lines}\n{' ' * depth}{text[-1]}"


def read_machines(path: Path) -> list[Machine]:
    """Return the machines in a machine file. Raises ValueError if the file is invalid."""
    try:
        content = json.loads(path.read_text())
    except UnicodeDecodeError:
        raise ValueError("not a text file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        found = "missing" if schema is None else _shorten(schema)
        raise ValueError(f'the schema is {found}, not "{SCHEMA}"')
    recorded = content.get("machines")
    if not isinstance(recorded, list) or not recorded:
        raise ValueError("the file contains no machines")
    machines = []
    for number, values in enumerate(recorded):
        try:
            machines.append(Machine.from_json(values))
        except ValueError as error:
            raise ValueError(f"machine {number}: {error}") from None
    return machines


# --- dataclasses from JSON -----------------------------------------------------------------------


def _from_json(kind: type[T], value: Any, path: str, missing: dict[str, str]) -> T:
    """Check the types of the values in a dict, and return an instance of the dataclass `kind`.

    If a field is absent and may be None, it becomes None and its path is added to `missing`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'the machine'} is {_shorten(value)}, not an object")
    prefix = f"{path}." if path else ""
    hints = get_type_hints(kind)
    if unexpected := sorted(set(value) - set(hints)):
        raise ValueError(f"{prefix}{unexpected[0]} is not a field of {kind.__name__}")
    fields = {}
    for member in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, hint = f"{prefix}{member.name}", hints[member.name]
        if member.name in value:
            fields[member.name] = _convert(hint, value[member.name], name, missing)
        elif types.NoneType in get_args(hint):
            fields[member.name] = None
            missing[name] = "not in the recorded file"
        elif member.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**fields)


def _convert(hint: Any, value: Any, path: str, missing: dict[str, str]) -> Any:
    if dataclasses.is_dataclass(hint):
        return _from_json(hint, value, path, missing)  # type: ignore[arg-type]
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        errors = []
        for option in arguments:
            try:
                return _convert(option, value, path, missing)
            except ValueError as error:
                errors.append(error)
        raise errors[0]
    if kind is tuple and isinstance(value, list | tuple):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
        return tuple(_convert(arguments[0], item, name, missing) for name, item in items)
    if kind is dict and isinstance(value, dict):
        return {k: _convert(arguments[1], v, f"{path}.{k}", missing) for k, v in value.items()}
    if kind is Literal:
        valid, name = value in arguments, " or ".join(map(repr, arguments))
    else:  # bool is a subclass of int, but is not accepted as a number
        valid = isinstance(value, (int, float) if kind is float else kind)
        valid = valid and (kind is bool or not isinstance(value, bool))
        name = kind.__name__
    if not valid:
        raise ValueError(f"{path} is {_shorten(value)}, not {name}")
    return value


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:37]}..."
