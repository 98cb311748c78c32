"""Reading a machine in checks: what is unknown is a reason to skip, never a fault."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tutti.machine.checks.finding import Skip
from tutti.machine.observation import Machine

if TYPE_CHECKING:
    from tutti.machine.gpus import Accelerator

Value = TypeVar("Value")


def known(machine: Machine, path: str, value: Value | None) -> Value:
    """The value, or a skip with the reason that was recorded for not knowing it."""
    if value is None:
        raise Skip(machine.why(path) or f"{path} is unknown")
    return value


def gpus(machine: Machine) -> "tuple[Accelerator, ...]":
    """The accelerators, or a skip."""
    if not machine.accelerators:
        on_bus = any(each.kind == "gpu" for each in machine.pci)
        raise Skip("the driver shows no GPU" if on_bus else "no GPU")
    return machine.accelerators


def of_gpus(
    machine: Machine, path: str, read: "Callable[[Accelerator], Value | None]"
) -> "list[tuple[Accelerator, Value]]":
    """A value of each GPU that tells it; a skip where none does."""
    each = gpus(machine)
    told = [(gpu, value) for gpu in each if (value := read(gpu)) is not None]
    if not told:
        raise Skip(machine.why(f"accelerators[0].{path}") or f"the driver does not tell {path}")
    return told


def gibibytes(size: float) -> str:
    """A size as people say it."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1024:.3g} KiB"


def parse_version(text: str) -> tuple[int, ...]:
    """2.13.0+cu130 → (2, 13, 0)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = "".join(c for c in part if c.isdecimal())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
