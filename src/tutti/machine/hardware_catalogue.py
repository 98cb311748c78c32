"""Peak speeds of accelerators and links, and published measurements, from hardware_catalogue.toml.

Every figure has a source. A value that is not in the catalogue is None. It is not estimated,
because a wrong estimate would falsify all results that are derived from it.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tutti.measure.units import parse_size


@dataclass(frozen=True)
class AcceleratorSpec:
    """One accelerator model.

    Peak speeds are in TFLOP/s without sparsity. Link bandwidths are in GB/s in one direction.
    """

    name: str  # a part of the device name that the driver reports
    source: str
    bf16: float  # the peak speed of bf16 and of fp16
    fp32: float
    tf32: float | None = None
    memory_tbs: float | None = None
    scale_up: str | None = None  # the links between the devices of a node
    scale_up_gbs: float | None = None
    host_link: str | None = None
    without: tuple[str, ...] = ()  # a device name that contains one of these is another model


@dataclass(frozen=True)
class LinkSpec:
    """One kind of link, with its specified speed and the speed that programs reach, in GB/s."""

    name: str
    gbs: float
    source: str
    achieved_gbs: float | None = None


@dataclass(frozen=True)
class Figure:
    """A published measurement."""

    devices: tuple[str, ...]  # names of accelerators in the catalogue
    op: str
    bytes: int
    gbs: float
    source: str
    ranks: int | None = None
    timing: str = "back-to-back"


@dataclass(frozen=True)
class Catalogue:
    """The content of hardware_catalogue.toml."""

    accelerators: tuple[AcceleratorSpec, ...]
    links: tuple[LinkSpec, ...]
    figures: tuple[Figure, ...]


@cache
def catalogue() -> Catalogue:
    """Return the content of hardware_catalogue.toml. Raises an exception if the file is invalid."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for row in content["accelerator"]:
        row["without"] = tuple(row.get("without", ()))
    for row in content["figure"]:
        row["devices"] = tuple(row["devices"])
        # A row has no `bytes` if its source says that messages were large, but not how large.
        row["bytes"] = parse_size(row.get("bytes", "64M"))
    return Catalogue(
        accelerators=tuple(AcceleratorSpec(**row) for row in content["accelerator"]),
        links=tuple(LinkSpec(**row) for row in content["link"]),
        figures=tuple(Figure(**row) for row in content["figure"]),
    )


def accelerator(device_name: str) -> AcceleratorSpec | None:
    """Return the specification of an accelerator, or None if the catalogue does not contain it.

    `device_name` is the name that the driver reports.
    """
    for spec in catalogue().accelerators:
        if spec.name in device_name and not any(part in device_name for part in spec.without):
            return spec
    return None


def link(name: str | None) -> LinkSpec | None:
    """Return the specification of a link such as "PCIe5 x16", or None if it is unknown."""
    return next((spec for spec in catalogue().links if spec.name == name), None)


def figure(
    device_name: str, op: str, size: int, ranks: int | None = None, timing: str = "back-to-back"
) -> Figure | None:
    """Return the published figure for this message size, or else for the next smaller size.

    The figure for a smaller size is a lower bound, because the bandwidth of a larger message is at
    least as high. Return None if the catalogue has no such figure.
    """
    spec = accelerator(device_name)
    matching = [
        published
        for published in catalogue().figures
        if spec is not None
        and spec.name in published.devices
        and (published.op, published.ranks, published.timing) == (op, ranks, timing)
        and published.bytes <= size
    ]
    return max(matching, key=lambda published: published.bytes, default=None)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> tuple[float, str] | None:
    """Return (peak FLOP/s of a device, source of the figure), or None if the peak is unknown."""
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
