"""Lists of sizes as people type them: `4,1K,64K`, `1K:64M:x4`, `1K:16K:+1K`. K, M, G are binary."""

import re

from tutti.world.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Read `64K` as 65,536 bytes; a B at the end is allowed: `64KB`, `8B`."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise UsageError(f"--sizes: {text!r} is no size: write 4, 64K, 1M or 1G (binary units)")
    return int(match[1]) * _UNITS[match[2]]


def parse_sizes(text: str) -> list[int]:
    """Read a list of sizes and ranges, each once, in ascending order.

    A range is FIRST:LAST, then how to go on: `:x4` multiplies (`:x2` unless given), `:+1K` adds.
    """
    sizes: set[int] = set()
    for item in text.split(","):
        sizes.update(_range(item, text) if ":" in item else [parse_size(item)])
    if min(sizes) < 1:
        raise UsageError(f"--sizes {text}: a message has at least one byte")
    return sorted(sizes)


def format_size(size: int) -> str:
    """Write 65,536 as `64K`, and what is no whole number of units in bytes."""
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_bytes(size: float) -> str:
    """What was measured, in three digits: 517,552 bytes are `505 KB`; binary as above."""
    for unit in ("B", "KB", "MB"):
        if size < 1023.5:
            return f"{size:.0f} {unit}" if size >= 99.95 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.0f} GB" if size >= 99.95 else f"{size:.3g} GB"


def _range(item: str, text: str) -> list[int]:
    first_text, last_text, *step = item.split(":")
    first, last = parse_size(first_text), parse_size(last_text)
    match = re.fullmatch(r"([xX*+])?(\w+)", step[0].strip()) if step else re.match("(x)(2)", "x2")
    if len(step) > 1 or match is None:
        raise UsageError(f"--sizes {text}: write a range as 1K:64M:x4 or 1K:16K:+1K")
    if not 0 < first <= last:
        raise UsageError(f"--sizes {text}: {item} must rise from 1 byte or more")
    adds, step_size = match[1] == "+", parse_size(match[2])
    if step_size < (1 if adds else 2):
        raise UsageError(f"--sizes {text}: with the step {step[0]} the range never ends")
    if adds and (last - first) // step_size > 10_000:
        raise UsageError(f"--sizes {text}: more than 10,000 sizes: use a larger step")
    sizes = [first]
    while (following := sizes[-1] + step_size if adds else sizes[-1] * step_size) <= last:
        sizes.append(following)
    return sizes
