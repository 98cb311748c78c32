"""mkdocs hook: pages generated from the code: one per command, and the checks of the doctor."""

import inspect
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

import tutti.cli.flags
from tutti.cli import COMMANDS, SUBCOMMANDS, run_cli
from tutti.cli.flags import Flag, flag_sections

_HEAD = ["| flag | default | meaning |", "| --- | --- | --- |"]


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
        run_cli([*words, "--help"] if words[0] != "submit" else [*words, "--", "train.py"])
    except _Parsed as parsed:
        kind, default = parsed.args
    else:
        raise RuntimeError(f"tutti {' '.join(words)} does not parse its flags from a dataclass")
    summary, _, text = inspect.cleandoc(kind.__doc__ or "").partition("\n")
    about, _, example = summary.rstrip(".").partition(": tutti ")
    lines = [f"# tutti {' '.join(words)}", "", f"{about}.", ""]
    if example:
        lines += ["```", f"tutti {example}", "```", ""]
    lines += [text.strip("\n"), ""]
    sections = list(flag_sections(kind, default))
    if words == ["train"]:
        sections += _architectures()
    for title, flags in sections:
        lines += [f"## {title.capitalize()}", "", *_HEAD]
        lines += [flag_row(flag) for flag in flags]
        lines += [""]
    return "\n".join(lines), about


def _architectures() -> Iterator[tuple[str, list[Flag]]]:
    """The flags of each recipe's model; the default recipe's are on the page already."""
    from tutti.train.recipe import RECIPES

    for name, recipe in RECIPES.items():
        if name != "lenet":
            model = recipe.architecture
            yield from flag_sections(type(model), model, f"Architecture with --recipe {name}")


def flag_row(flag: Flag) -> str:
    """The row of a flag in the table of its command."""
    default = flag.default if flag.default in ("", "required") else f"`{flag.default}`"
    text = flag.help.replace("|", "\\|")
    return f"| `{flag.usage}` | {default} | {text} |"
