"""mkdocs hook: pages generated from the code: one per command, and the checks of the doctor."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

import tutti.cli.flags
from tutti.cli import COMMANDS
from tutti.cli import run as run_command
from tutti.cli.completion import SUBCOMMANDS


class _Parsed(Exception):
    """Carries what a command gave to `parse`, before any flag is read."""


def _stop_at_parse(kind: type, program: str, arguments: Any, default: Any = None) -> None:
    raise _Parsed(kind, default)


# Command modules import `parse` by name when they are first used, so this must come before.
tutti.cli.flags.parse = _stop_at_parse


def on_files(files: Files, config: Any) -> Files:
    """Add commands/NAME.md for every command, commands/index.md and reference/checks.md."""
    rows = []
    for words in commands():
        page, about = command_page(words)
        name = "-".join(word.strip("-") for word in words)
        files.append(File.generated(config, f"commands/{name}.md", content=page))
        rows.append(f"| [`tutti {' '.join(words)}`]({name}.md) | {about} |")
    index = "\n".join(["# Commands", "", "| command | what it does |", "| --- | --- |", *rows, ""])
    files.append(File.generated(config, "commands/index.md", content=index))
    files.append(File.generated(config, "reference/checks.md", content=checks_page()))
    return files


def commands() -> list[list[str]]:
    """The words of every command: ["train"], ["bench", "pairs"], …"""
    found = [["parity", "--show-schedule"]]  # has flags of its own
    for name in COMMANDS:
        found += [[name, sub] for sub in SUBCOMMANDS[name]] if name in SUBCOMMANDS else [[name]]
    return sorted(found)


def checks_page() -> str:
    """The table of all checks of `tutti doctor`."""
    from tutti.machine.checks.checklist import CHECKS

    rows = [f"| `{each.id}` | {each.about} | {each.why} | {each.cure} |" for each in CHECKS]
    head = ["# Checks of the doctor", "", f"`tutti doctor` has {len(CHECKS)} checks.", ""]
    head += ["| id | what it checks | why | cure |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])


def command_page(words: list[str]) -> tuple[str, str]:
    """The Markdown page of a command and the first line of its description."""
    try:
        run_command([*words, "--help"] if words[0] != "submit" else [*words, "--", "train.py"])
    except _Parsed as parsed:
        kind, default = parsed.args
    else:
        raise RuntimeError(f"tutti {' '.join(words)} does not parse its flags from a dataclass")
    summary, _, text = inspect.cleandoc(kind.__doc__ or "").partition("\n")
    about, _, example = summary.partition(": tutti ")
    lines = [f"# tutti {' '.join(words)}", "", f"{about}.", ""]
    if example:
        lines += ["```", f"tutti {example}", "```", ""]
    lines += [text.strip(), ""]
    sections = list(_sections(kind, default, "Flags"))
    if words == ["train"]:
        sections += _architectures()
    for title, rows in sections:
        lines += [f"## {title}", "", "| flag | default | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{flag}` | {value} | {_cell(help_)} |" for flag, value, help_ in rows]
        lines += [""]
    return "\n".join(lines), about


def _architectures() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """The flags of each recipe's model; the default recipe's are on the page already."""
    from tutti.train.recipe import RECIPES

    for name, recipe in RECIPES.items():
        if name != "lenet":
            yield from _sections(
                type(recipe.architecture), recipe.architecture, f"Architecture with --recipe {name}"
            )


def _sections(kind: type, default: Any, title: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """(title, rows of flag, default and help) of a dataclass, then of the dataclasses in it."""
    rows, nested = [], []
    docs = _field_docs(kind)
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name, field.default)
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if dataclasses.is_dataclass(value):
            nested.append((type(value), value, field.name.replace("_", " ").capitalize()))
            continue
        name = field.name.rstrip("_").replace("_", "-")
        if "Positional" in str(field.type):
            flag = name.upper()
        else:
            flag = f"--{name}, --no-{name}" if value is True else f"--{name}"
        rows.append((flag, _default_text(value), docs.get(field.name, "")))
    if rows:
        yield title, rows
    for inner, value, name in nested:
        yield from _sections(inner, value, name)


def _default_text(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value is False:
        return ""
    if isinstance(value, (list, tuple)):
        return f"`{','.join(map(str, value))}`" if value else ""
    return f"`{value}`"


def _field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, by field name, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[field.target.id] = inspect.cleandoc(str(below.value.value))
    return docs


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
