"""What accelerators and links can do: catalogue.toml beside this file, each figure with its source.

What the catalogue does not have is unknown, and None here: a guess would make every verdict and
every figure derived from it wrong.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("catalogue.toml")
_LARGE = "64M"  # where the source of a figure only says that messages were large
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Accelerator:
    """One kind of device. Peaks are dense, in TFLOP/s; bandwidths are one way, in GB/s."""

    name: str  # a part of the name that the driver gives
    source: str
    bf16: float  # also fp16
    fp32: float
    tf32: float | None = None
    memory_tbs: float | None = None
    scale_up: str | None = None  # what joins the devices of a node
    scale_up_gbs: float | None = None
    host_link: str | None = None
    without: tuple[str, ...] = ()

    def fits(self, device_name: str) -> bool:
        """Whether a device of this name is of this kind."""
        return self.name in device_name and not any(part in device_name for part in self.without)


@dataclass(frozen=True)
class Link:
    """One kind of link, one way: what its specification allows, and what programs reached."""

    name: str
    gbs: float
    source: str
    achieved_gbs: float | None = None


@dataclass(frozen=True)
class Figure:
    """What somebody measured and published."""

    devices: tuple[str, ...]  # names of accelerators
    op: str
    bytes: int
    gbs: float
    source: str
    ranks: int | None = None
    timing: str = "back-to-back"


@dataclass(frozen=True)
class Catalogue:
    """The whole file."""

    accelerators: tuple[Accelerator, ...]
    links: tuple[Link, ...]
    figures: tuple[Figure, ...]


@cache
def catalogue() -> Catalogue:
    """Read the file; a mistake in it is an error here, not a silent gap."""
    content = tomllib.loads(_FILE.read_text())
    return Catalogue(
        accelerators=tuple(
            Accelerator(**{**each, "without": tuple(each.get("without", ()))})
            for each in content["accelerator"]
        ),
        links=tuple(Link(**each) for each in content["link"]),
        figures=tuple(
            Figure(
                **{
                    **each,
                    "devices": tuple(each["devices"]),
                    "bytes": _bytes(each.get("bytes", _LARGE)),
                }
            )
            for each in content["figure"]
        ),
    )


def accelerator(device_name: str) -> Accelerator | None:
    """What is known of a device, by the name that the driver gives it."""
    fitting = (each for each in catalogue().accelerators if each.fits(device_name))
    return next(fitting, None)


def link(name: str | None) -> Link | None:
    """What is known of a link, such as `PCIe5 x16`."""
    return next((each for each in catalogue().links if each.name == name), None)


def figure(
    device_name: str,
    op: str,
    size: int,
    ranks: int | None = None,
    timing: str = "back-to-back",
) -> Figure | None:
    """The published figure to hold a measured one against.

    It is that of the same size, or of the next smaller one: larger messages are no slower.
    """
    known = accelerator(device_name)
    fitting = [
        each
        for each in catalogue().figures
        if known is not None
        and known.name in each.devices
        and (each.op, each.ranks, each.timing) == (op, ranks, timing)
        and each.bytes <= size
    ]
    return max(fitting, key=lambda each: each.bytes, default=None)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> tuple[float, str] | None:
    """FLOP/s that a device can do at best, and where the figure is from; None if it is unknown."""
    known = accelerator(device_name)
    if known is None:
        return None
    if precision in ("bf16", "fp16"):
        peak, what = known.bf16, f"{precision} dense"
    elif precision == "float32" and tf32 and known.tf32 is not None:
        peak, what = known.tf32, "tf32 dense"
    elif precision == "float32":
        peak, what = known.fp32, "fp32"
    else:
        return None
    return peak * 1e12, f"{known.name} data sheet, {what}, {peak:g} TFLOP/s"


def _bytes(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1]]
