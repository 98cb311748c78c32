"""Slurm's compressed lists, read without calling scontrol (containers often lack it)."""

import re
from itertools import product

from tutti.world.errors import UsageError


def expand_hosts(text: str, variable: str = "the node list") -> list[str]:
    """Expand `rack1n[01-03,7],login` to its host names, in order, zero padding kept."""
    hosts: list[str] = []
    for item in _split_outside_brackets(text, variable):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # literal, ranges, literal, ranges, …
        choices = [
            _expand_ranges(part, text, variable) if position % 2 else [part]
            for position, part in enumerate(parts)
        ]
        hosts.extend("".join(choice) for choice in product(*choices))
    return hosts


def expand_tasks_per_node(text: str, variable: str = "tasks per node") -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]: how many tasks each node of a step runs."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UsageError(f"{variable}={text!r} does not parse at {item!r}: expected 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _split_outside_brackets(text: str, variable: str) -> list[str]:
    items, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if depth not in (0, 1):
            raise _unparsable(text, variable, position)
        if sign == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth != 0:
        raise _unparsable(text, variable, len(text))
    items.append(text[start:])
    if not all(item and not re.search(r"\s", item) for item in items):
        raise _unparsable(text, variable, start)
    return items


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    expanded: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _unparsable(text, variable, text.find(item))
        first, last = match[1], match[2] or match[1]
        width = len(first) if first.startswith("0") else 0
        expanded.extend(str(n).zfill(width) for n in range(int(first), int(last) + 1))
    return expanded


def _unparsable(text: str, variable: str, position: int) -> UsageError:
    return UsageError(
        f"{variable}={text!r} does not parse at character {position + 1}: expected a list such as "
        "n[1-4,07],login1; correct it or set MASTER_ADDR and MASTER_PORT"
    )
