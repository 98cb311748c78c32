"""Flags from dataclasses: help, defaults and code never disagree. Mistakes are one line."""

import contextlib
import dataclasses
import difflib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

import tyro

from tutti.world.errors import UsageError

Flags = TypeVar("Flags")


def parse(
    kind: type[Flags], program: str, arguments: Sequence[str], default: Flags | None = None
) -> Flags:
    """Read flags into a dataclass; a mistake raises UsageError with the nearest name.

    With a `default`, flags change it; the flags of its parts need no prefix then.
    """
    complaints, help_text = io.StringIO(), _Page()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(help_text):
            if default is None:
                return tyro.cli(kind, prog=program, args=list(arguments))
            flat = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
            return tyro.cli(kind, prog=program, args=list(arguments), default=default, config=flat)
    except SystemExit as stop:
        if not stop.code:
            print(_readable(help_text.getvalue(), shutil.get_terminal_size().columns), end="")
            raise
    names = _names(default if default is not None else kind)
    raise UsageError(_one_line(complaints.getvalue(), program, names))


def split_at_command(kind: type[object], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `-n 4 --show all train.py --lr 1` into our flags and the command with its own."""
    hints = get_type_hints(kind)
    switches = {field.name for field in dataclasses.fields(kind) if hints[field.name] is bool}  # type: ignore[arg-type]
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if argument == "-m" or not argument.startswith("-"):
            break
        if re.fullmatch(r"-n\d+", argument):  # as make and mpirun take it: -n2
            position += 1
            continue
        name = argument.lstrip("-").removeprefix("no-").replace("-", "_")
        takes_value = "=" not in argument and name not in {*switches, "h", "help"}
        position += 2 if takes_value else 1
    return list(arguments[:position]), list(arguments[position:])


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `--nodes 2 -- python train.py` into our flags and the command."""
    if "--" not in arguments:
        return list(arguments), []
    position = list(arguments).index("--")
    return list(arguments[:position]), list(arguments[position + 1 :])


class _Page(io.StringIO):
    """Text that tyro may draw boxes into where the terminal can show them."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.__stdout__, "encoding", None) or "utf-8"


def _readable(text: str, width: int) -> str:
    """tyro's help, with what stands above the box wrapped, and without the None of flags that may
    be left out: what happens then is said in words. The box keeps its width."""
    above, edge, box = text.partition("╭")
    if not edge:  # drawn in ASCII: there are no edges to keep
        return text
    above = "\n".join(textwrap.fill(line, max(40, width - 1)) for line in above.split("\n"))
    box = re.sub(r"\(default:(\s*│\n│\s*| )None\)", _blanked, box)
    box = re.sub(r"\n│ *│(?=\n)", "", box)
    box = re.sub(r"(?m)^│.*\{None\}\|.*$", _without_none, box)
    return above + edge + box


def _blanked(found: re.Match[str]) -> str:
    return re.sub(r"[^│\n]", " ", found[0])


def _without_none(line: re.Match[str]) -> str:
    count, shorter = line[0].count("{None}|"), line[0].replace("{None}|", "")
    # The text beside a flag, or the edge, stays where it was.
    return re.sub(r" {2,}(?=\S)", lambda gap: gap[0] + " " * (7 * count), shorter, count=1)


def _names(flags: Any) -> list[str]:
    """The flags of a dataclass and of its parts."""
    names = []
    for field in dataclasses.fields(flags):
        part = getattr(flags, field.name, None)
        if dataclasses.is_dataclass(part):
            names += _names(part)
        else:
            names.append(f"--{field.name.rstrip('_').replace('_', '-')}")
    return names


def _one_line(box: str, program: str, names: Sequence[str]) -> str:
    """tyro explains in a box of several lines; keep what is wrong and what was meant."""
    _, *lines = (line.strip("│╭╮╰╯ ") for line in box.splitlines())
    if lines and set(lines[0]) == {"-"}:  # drawn in ASCII, there is a rule under the title, too
        lines = ["─" if set(line) == {"-"} else line for line in lines[1:]]
    rule = next((number for number, line in enumerate(lines) if set(line) == {"─"}), len(lines))
    said = " ".join(line for line in lines[:rule] if line.strip("─"))
    unknown = re.match(r"Unrecognized options: (.*)", said)
    if unknown is None:
        said = re.sub(
            r"^Error parsing (\S+): invalid literal .*: (\S+)$", r"\1 \2 is no number", said
        )
        # An optional number: tyro tells the types it tried, one by one.
        said = re.sub(
            r"^Error parsing (\S+): no type matching \{None\}\|.*?(INT|FLOAT).* from "
            r"\[(.*?)\]\. Got.*$",
            r"\1 \3 is no number",
            said,
        )
        if said.startswith("Missing from"):
            missing = re.findall(r"(?:: |\(required\) )([A-Z]{2,}|-\S+) ", said)
            said = f"{' and '.join(missing)} must be given" if missing else said
        return f"{said.rstrip('.')}: see {program} --help"
    flag = unknown[1].split(",")[0].strip()
    if not flag.startswith("-"):
        return f"{flag!r} is not expected here: see {program} --help"
    near = difflib.get_close_matches(flag.partition("=")[0], names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"see {program} --help"
    return f"no flag {flag}: {hint}"
