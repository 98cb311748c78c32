"""Flags are defined by dataclasses, so that help, defaults and code agree. Errors are one line."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_type_hints

import tyro

from tutti.world.errors import UsageError

Flags = TypeVar("Flags")
_WIDEST = 110  # columns of the help


def parse(
    kind: type[Flags], program: str, arguments: Sequence[str], default: Flags | None = None
) -> Flags:
    """Read flags into a dataclass. A wrong flag raises UsageError with the closest name.

    If `default` is given, flags change its values, and flags of nested dataclasses need no prefix.
    """
    names = dict(_fields(default if default is not None else kind))
    optional_switches = {name for name, hint in names.items() if hint == bool | None}
    words = [word for each in arguments for word in _with_value(each, optional_switches)]
    errors, help_text = io.StringIO(), _TerminalText()
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    options: dict[str, Any] = {"prog": program, "args": words}
    if default is not None:
        config = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
        options |= {"default": default, "config": config}
    try:
        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(help_text),
            _tyro_layout(width),
        ):
            flags: Flags = tyro.cli(kind, **options)
            return flags
    except SystemExit as stop:
        if not stop.code:
            print(_readable_help(help_text.getvalue(), width, optional_switches), end="")
            raise
    raise UsageError(_one_line(errors.getvalue(), program, list(names)))


def flag_value(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of one flag without parsing the others, or None if the flag is not given."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == flag and following is not None:
            value = following
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def split_at_command(kind: type[object], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `-n 4 --show all train.py --lr 1` into tutti's flags and the command with its flags."""
    switches = {name for name, hint in _fields(kind) if hint is bool}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if argument == "-m" or not argument.startswith("-"):
            break
        if re.fullmatch(r"-n\d+", argument):  # -n2, as for make and mpirun
            position += 1
            continue
        name = re.sub("^--no-", "--", argument)
        takes_value = "=" not in argument and name not in {*switches, "-h", "--help"}
        position += 2 if takes_value else 1
    return list(arguments[:position]), list(arguments[position:])


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `--nodes 2 -- python train.py` into tutti's flags and the command."""
    position = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:position]), list(arguments[position + 1 :])


def _fields(flags: Any) -> Iterator[tuple[str, Any]]:
    """Yield (--name, type) of each flag of a dataclass.

    If `flags` is an instance, the flags of its nested dataclasses are included.
    """
    hints = get_type_hints(flags if isinstance(flags, type) else type(flags))
    for field in dataclasses.fields(flags):
        nested = getattr(flags, field.name, None)
        if dataclasses.is_dataclass(nested):
            yield from _fields(nested)
        else:
            yield f"--{field.name.rstrip('_').replace('_', '-')}", hints[field.name]


def _with_value(word: str, optional_switches: set[str]) -> list[str]:
    """Add the value to a `bool | None` flag, which tyro requires: --reshard → --reshard True."""
    if word in optional_switches:
        return [word, "True"]
    if re.sub("^--no-", "--", word) in optional_switches:
        return [re.sub("^--no-", "--", word), "False"]
    return [word]


# -- help ------------------------------------------------------------------------------------------


class _TerminalText(io.StringIO):
    """A text buffer with the encoding of the terminal; tyro draws boxes in this encoding."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.__stdout__, "encoding", None) or "utf-8"


@contextlib.contextmanager
def _tyro_layout(width: int) -> Iterator[None]:
    """Make tyro print one column of sections, `width` characters wide, with wrapped paragraphs.

    Without this, tyro 1.0 prints sections side by side in wide terminals, and starts a new
    paragraph at every indented line of a docstring.
    """
    strings: Any = tyro._strings
    original, columns = strings.remove_single_line_breaks, os.environ.get("COLUMNS")
    strings.remove_single_line_breaks = lambda text: original(inspect.cleandoc(text))
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        strings.remove_single_line_breaks = original
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _readable_help(text: str, width: int, optional_switches: set[str]) -> str:
    """Edit tyro's help: wrap the description, simplify section titles, and remove None.

    None is the default of optional flags; the description of such a flag explains the default.
    """
    above, edge, box = text.partition("╭")
    if not edge:  # drawn in ASCII: nothing to align
        return text
    above = "\n".join(textwrap.fill(line, max(40, width - 1)) for line in above.split("\n"))
    box = re.sub(r"\(default:(\s*│\n│\s*| )None\)", _blanks, box)
    box = re.sub(r"\n│ *│(?=\n)", "", box)
    box = re.sub(r"(?m)^(│ (?:-\w .*?, )?)(--[\w-]+) \{None,True,False\}", _as_switch, box)
    box = re.sub(r"(?m)^│.*\{None[},].*$", _without_none, box)
    return above + edge + re.sub(r"─ (?:\w+\.)*(\w+) options ─+", _plain_title, box)


def _blanks(found: re.Match[str]) -> str:
    return re.sub(r"[^│\n]", " ", found[0])


def _as_switch(found: re.Match[str]) -> str:
    name = found[2].removeprefix("--")
    return f"{found[1]}--{name}, --no-{name}".ljust(len(found[0]))


def _without_none(line: re.Match[str]) -> str:
    shorter = line[0].replace("{None}|", "").replace("{None,", "{")
    removed = len(line[0]) - len(shorter)
    # Add spaces, so that the description or the edge of the box remains in its column.
    return re.sub(r" {2,}(?=\S)", lambda gap: gap[0] + " " * removed, shorter, count=1)


def _plain_title(found: re.Match[str]) -> str:
    return f"─ {found[1].replace('_', ' ')} ".ljust(len(found[0]), "─")


# -- errors ----------------------------------------------------------------------------------------


def _one_line(box: str, program: str, names: Sequence[str]) -> str:
    """Shorten tyro's error, a box of several lines, to the error itself and the closest flag."""
    _, *lines = (line.strip("│╭╮╰╯ ") for line in box.splitlines())
    if lines and set(lines[0]) == {"-"}:  # in ASCII there is a line under the title, too
        lines = ["─" if set(line) == {"-"} else line for line in lines[1:]]
    rule = next((number for number, line in enumerate(lines) if set(line) == {"─"}), len(lines))
    text = " ".join(line for line in lines[:rule] if line.strip("─"))
    unknown = re.match(r"Unrecognized options: (.*)", text)
    if unknown is None:
        text = re.sub(r"^Error parsing (?:\w+\.)+(?=\w)", "Error parsing --", text)
        text = re.sub(
            r"^Error parsing (\S+): (?:invalid literal|could not convert) .*: (\S+)$",
            r"\1 \2 is not a number",
            text,
        )
        # For an optional number, tyro lists the types that it tried.
        text = re.sub(
            r"^Error parsing (\S+): no type matching \{None\}\|.*?(INT|FLOAT).* from "
            r"\[(.*?)\]\. Got.*$",
            r"\1 \3 is not a number",
            text,
        )
        if text.startswith("Missing from"):
            missing = re.findall(r"(?:: |\(required\) )([A-Z]{2,}|-\S+) ", text)
            text = f"{' and '.join(missing)} must be given" if missing else text
        return f"{text.rstrip('.')}: see {program} --help"
    flag = unknown[1].split(",")[0].strip()
    if not flag.startswith("-"):
        return f"{flag!r} is not expected here: see {program} --help"
    # Compare names without dashes, because all flags have them, which makes any two names similar.
    bare = {name.lstrip("-"): name for name in names}
    word = re.sub("^no-", "", flag.partition("=")[0].lstrip("-"))
    close = difflib.get_close_matches(word, bare, n=1, cutoff=0.6)
    if not close:  # for example --sweep, a part of --lr-sweep
        close = [name for name in bare if word in name.split("-")][:1]
    cure = f"did you mean {bare[close[0]]}?" if close else f"see {program} --help"
    return f"no flag {flag}: {cure}"
