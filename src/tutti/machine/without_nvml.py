"""Accelerators where NVML is missing: torch may see a GPU all the same."""

import sys
from typing import Any

from tutti.machine.accelerator import Accelerator, Clocks, Ecc
from tutti.machine.files import Files
from tutti.machine.gpus import why_no_nvml


def accelerators_without_nvml(files: Files) -> tuple[Accelerator, ...]:
    """What torch can tell of GPUs; none, and why, where it sees none either."""
    reason = why_no_nvml() or "NVML came and went"
    files.unknown["accelerators"] = reason
    # torch takes seconds to import: only where something suggests that it would see a GPU.
    signs = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    if not any(map(files.exists, signs)) and "torch" not in sys.modules:
        return ()
    try:
        import torch

        count = torch.cuda.device_count()
        found = [torch.cuda.get_device_properties(index) for index in range(count)]
    except (ImportError, RuntimeError, AssertionError) as error:
        files.unknown["accelerators"] = f"{reason}; torch: {error}"
        return ()
    if found:
        files.unknown["accelerators"] = f"{reason}; seen by torch only"
    return tuple(_from_torch(index, properties) for index, properties in enumerate(found))


def _from_torch(index: int, properties: Any) -> Accelerator:
    """A GPU of which torch knows little; the rest is unknown."""
    values: dict[str, Any] = dict.fromkeys(Accelerator.__dataclass_fields__)
    if hasattr(properties, "pci_bus_id"):
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        values["pci_address"] = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    uuid = getattr(properties, "uuid", None)
    values |= {
        "index": index,
        "name": properties.name,
        "uuid": None if uuid is None else f"GPU-{uuid}",
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "clocks": Clocks(**dict.fromkeys(Clocks.__dataclass_fields__)),
        "ecc": Ecc(**dict.fromkeys(Ecc.__dataclass_fields__)),
    }
    return Accelerator(**values)
