"""Sizes, times and rates: parsing of arguments, formatting of measured values.

On the command line K, M and G are binary (64K = 65,536 bytes), as in nccl-tests. Rates are decimal:
1 GB/s = 1e9 bytes per second.
"""

import re

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return 65,536 for `64K`, `64KB` and `64KiB`. Raises ValueError."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 4, 64K, 1M or 1G (binary units)")
    return int(match[1]) * _FACTORS[match[2]]


def parse_sizes(text: str) -> list[int]:
    """Return the sizes in a list of sizes and ranges (`4,1K,64K:1M:x4`), ascending and distinct.

    A range is FIRST:LAST:STEP. The step `x4` multiplies by 4, and `+1K` adds 1,024. The default
    step is `x2`. Raises ValueError.
    """
    sizes: set[int] = set()
    for item in text.split(","):
        sizes.update(_parse_range(item) if ":" in item else [parse_size(item)])
    if min(sizes) < 1:
        raise ValueError(f"{text}: a message must have at least one byte")
    return sorted(sizes)


def _parse_range(item: str) -> list[int]:
    first_text, last_text, *steps = item.split(":")
    first, last = parse_size(first_text), parse_size(last_text)
    match = re.fullmatch(r"([xX*+])?(\w+)", steps[0].strip() if steps else "x2")
    if len(steps) > 1 or match is None:
        raise ValueError(f"{item}: write a range as 1K:64M:x4 or 1K:16K:+1K")
    if not 0 < first <= last:
        raise ValueError(f"{item}: the first size must be >= 1 byte and <= the last size")
    adds, step = match[1] == "+", parse_size(match[2])
    if step < (1 if adds else 2):
        raise ValueError(f"{item}: with the step {steps[0]} the range never ends")
    if adds and (last - first) // step > 10_000:
        raise ValueError(f"{item} has more than 10,000 sizes: use a larger step")
    sizes = [first]
    while (following := sizes[-1] + step if adds else sizes[-1] * step) <= last:
        sizes.append(following)
    return sizes


def format_size(size: int) -> str:
    """Return `64K` for 65,536. A size that is not a whole number of units is given in bytes."""
    for unit, factor in reversed(_FACTORS.items()):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_bytes(size: float) -> str:
    """Return a measured size with three digits: 517,552 bytes are `505 KiB`."""
    unit = "B"
    for larger_unit in ("KiB", "MiB", "GiB", "TiB"):
        if size >= 1023.5:
            size, unit = size / 1024, larger_unit
    return f"{three_digits(size)} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits: `1.25 s`, `35.1 ms`, `820 µs`, `90 ns`."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 0.9995:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def format_rate(bytes_per_second: float) -> str:
    """Return a rate with three digits in decimal units: `12.5 GB/s`, `940 MB/s`."""
    factor, unit = (1e9, "GB/s") if bytes_per_second >= 0.9995e9 else (1e6, "MB/s")
    return f"{three_digits(bytes_per_second / factor)} {unit}"


def three_digits(value: float) -> str:
    """Return a value with three significant digits and no exponent: 0.0246, 3.21, 396, 3072."""
    return f"{value:.3g}" if abs(value) < 99.95 else f"{value:.0f}"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun, such as `1 rank` or `2 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def ordinal(number: int) -> str:
    """Return a number as 2nd, 3rd, 5th, 11th or 22nd."""
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else last}"
