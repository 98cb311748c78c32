"""Peak speeds of accelerators and links, and published measurements: hardware_catalogue.toml.

Every figure has a source. A value that is not in the catalogue is None, because a guess would
falsify all figures that are derived from it.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tutti.measure.units import parse_size

_FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class AcceleratorSpec:
    """One accelerator model.

    Peaks are in TFLOP/s without sparsity. Link bandwidths are in GB/s in one direction.
    """

    name: str  # a part of the name that the driver reports
    source: str
    bf16: float  # also fp16
    fp32: float
    tf32: float | None = None
    memory_tbs: float | None = None
    scale_up: str | None = None  # the links between the devices of a node
    scale_up_gbs: float | None = None
    host_link: str | None = None
    without: tuple[str, ...] = ()

    def matches(self, device_name: str) -> bool:
        """Whether a device with this driver name is of this model."""
        return self.name in device_name and not any(part in device_name for part in self.without)


@dataclass(frozen=True)
class LinkSpec:
    """One kind of link: its specified speed and the speed that programs reach, in GB/s."""

    name: str
    gbs: float
    source: str
    achieved_gbs: float | None = None


@dataclass(frozen=True)
class Figure:
    """A published measurement."""

    devices: tuple[str, ...]  # names of accelerators
    op: str
    bytes: int
    gbs: float
    source: str
    ranks: int | None = None
    timing: str = "back-to-back"


@dataclass(frozen=True)
class Catalogue:
    """The content of the file."""

    accelerators: tuple[AcceleratorSpec, ...]
    links: tuple[LinkSpec, ...]
    figures: tuple[Figure, ...]


@cache
def catalogue() -> Catalogue:
    """The content of hardware_catalogue.toml. Raises an error if the file contains a mistake."""
    content = tomllib.loads(_FILE.read_text())
    for each in content["accelerator"]:
        each["without"] = tuple(each.get("without", ()))
    for each in content["figure"]:
        each["devices"] = tuple(each["devices"])
        each["bytes"] = parse_size(each.get("bytes", "64M"))  # the source says "large messages"
    return Catalogue(
        accelerators=tuple(AcceleratorSpec(**each) for each in content["accelerator"]),
        links=tuple(LinkSpec(**each) for each in content["link"]),
        figures=tuple(Figure(**each) for each in content["figure"]),
    )


def accelerator(device_name: str) -> AcceleratorSpec | None:
    """The specification of a device, found by the name that the driver reports; None if unknown."""
    return next((a for a in catalogue().accelerators if a.matches(device_name)), None)


def link(name: str | None) -> LinkSpec | None:
    """The specification of a link, such as `PCIe5 x16`; None if it is unknown."""
    return next((each for each in catalogue().links if each.name == name), None)


def figure(
    device_name: str,
    op: str,
    size: int,
    ranks: int | None = None,
    timing: str = "back-to-back",
) -> Figure | None:
    """The published figure for this message size or for the next smaller size.

    The figure for a smaller size is a valid lower bound, because larger messages are no slower.
    """
    spec = accelerator(device_name)
    matching = [
        each
        for each in catalogue().figures
        if spec is not None
        and spec.name in each.devices
        and (each.op, each.ranks, each.timing) == (op, ranks, timing)
        and each.bytes <= size
    ]
    return max(matching, key=lambda each: each.bytes, default=None)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> tuple[float, str] | None:
    """The peak FLOP/s of a device and the source of the figure; None if it is unknown."""
    spec = accelerator(device_name)
    if spec is None:
        return None
    if precision in ("bf16", "fp16"):
        peak, kind = spec.bf16, f"{precision} dense"
    elif precision == "float32" and tf32 and spec.tf32 is not None:
        peak, kind = spec.tf32, "tf32 dense"
    elif precision == "float32":
        peak, kind = spec.fp32, "fp32"
    else:
        return None
    return peak * 1e12, f"{spec.name} data sheet, {kind}, {peak:g} TFLOP/s"
