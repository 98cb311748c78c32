"""Parses the flags of a command into a dataclass, and prints help texts and one-line errors."""

import ast
import contextlib
import dataclasses
import errno
import inspect
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from tutti.measure.files import check_input, check_output_file, check_output_folder
from tutti.world.errors import UsageError, checked_seconds, closest_name

Flags = TypeVar("Flags")
_MAX_HELP_WIDTH = 100
_HELP_COLUMN = 26
_TITLES = {"settings": "training"}  # titles of help sections that differ from the field name
_PLACEHOLDERS = {bool: "", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class _PathCheck:
    """An annotation of a flag whose value is a path. `parse` then checks the path."""

    check: Callable[[Path], None]  # raises OSError
    cure: str


OutputFile = Annotated[Path, _PathCheck(check_output_file, "Choose another file.")]
OutputFolder = Annotated[Path, _PathCheck(check_output_folder, "Choose another directory.")]
InputFile = Annotated[Path, _PathCheck(partial(check_input, kind="file"), "Name a file.")]
InputFolder = Annotated[
    Path, _PathCheck(partial(check_input, kind="directory"), "Name a directory.")
]
InputPath = Annotated[Path, _PathCheck(partial(check_input, kind="any"), "Check the path.")]


def parse(
    kind: type[Flags], program: str, arguments: Sequence[str], default: Flags | None = None
) -> Flags:
    """Parse the arguments into a dataclass. Raise UsageError for an unknown flag or a wrong value.

    A flag that is not in `arguments` has its value in `default`. If `default` is given, flags of
    nested dataclasses need no prefix: --lr instead of --settings.optimization.lr.
    """
    if {"-h", "--help"} & set(arguments):
        text = "\n".join(_help_lines(kind, program, default))
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))
        raise SystemExit(0)
    flags = [flag for _, section in flag_sections(kind, default) for flag in section]
    optional_switches = {flag.name for flag in flags if flag.hint == bool | None}
    switches = optional_switches | {flag.name for flag in flags if flag.hint is bool}
    tyro_arguments: list[str] = []
    for argument in arguments:
        # tyro needs a value after a flag of type `bool | None`, so `--reshard` is changed to
        # `--reshard True`, and `--no-reshard` to `--reshard False`.
        name = re.sub("^--no-", "--", argument)
        if "=" in name and name.partition("=")[0] in switches:
            flag, _, value = argument.partition("=")
            raise UsageError(f"{flag} takes no value, got {value!r}. Use {flag} alone.")
        is_switch = name in optional_switches
        tyro_arguments += [name, str(name == argument)] if is_switch else [argument]
    options: dict[str, Any] = {"prog": program, "args": tyro_arguments}
    if default is not None:
        config = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
        options |= {"default": default, "config": config}
    errors = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(errors):
        parsed: Flags = tyro.cli(kind, **options)
        _check_shared_flags(parsed)
        return parsed
    raise UsageError(_one_line(errors.getvalue(), program, flags, tyro_arguments))


def _check_shared_flags(options: object) -> None:
    """Check flags that have the same meaning in all commands, even if this run ignores them."""
    names = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    counts = [name for name in ("ranks", "ranks_per_gpu") if name in names]
    check_at_least(1, options, *(n for n in counts if not isinstance(getattr(options, n), str)))
    for name in names:
        values = getattr(options, name)
        for value in values if isinstance(values, tuple) else [values]:
            if isinstance(value, int) and not 0 <= value < 1 << 63:
                limit = "not be negative" if value < 0 else f"be at most {(1 << 63) - 1}"
                raise UsageError(f"--{name.replace('_', '-')} must {limit}, got {value}")
    for name in {"start_timeout", "timeout", "hang_after"}.intersection(names):
        if (value := getattr(options, name)) is not None:
            checked_seconds(f"--{name.replace('_', '-')}", value)
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        if _path_check(hint) is not None:
            value = getattr(options, name)
            for path in value if isinstance(value, tuple) else [value] * (value is not None):
                check_path(_flag(name, hint, None, "").name, path, hint)


def _path_check(hint: Any) -> _PathCheck | None:
    """Return the _PathCheck in a type such as OutputFile | None, or None if there is none."""
    if isinstance(hint, _PathCheck):
        return hint
    return next((found for part in get_args(hint) if (found := _path_check(part))), None)


def check_path(flag: str, path: Path, hint: Any) -> None:
    """Raise UsageError if a path fails the check of `hint`, a type such as OutputFile."""
    path_check = _path_check(hint)
    assert path_check is not None
    try:
        path_check.check(path)
    except OSError as error:
        missing = error.errno == errno.ENOENT and error.filename is not None
        reason = " does not exist" if missing else f": {error.strerror}"
        named = f"{flag} {path}" if flag.startswith("-") else str(path)
        raise UsageError(f"{named}{reason}. {path_check.cure}") from None


def flag_value(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of one flag without parsing the others, or None if it is missing."""
    value = None
    for argument, following in pairwise([*arguments, None]):
        assert argument is not None
        if argument == flag and following is not None:
            value = following
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def check_at_least(minimum: int, options: object, *names: str) -> None:
    """Raise UsageError if one of these options is set and less than `minimum`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < minimum:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} must be at least {minimum}, got {value}")


def split_at_command(kind: type[Any], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the flags of `kind` and the command that follows them.

    The command begins at the first argument that is a script, `-m`, or follows `--`.
    """
    flags = [flag for _, section in flag_sections(kind) for flag in section]
    switches = {flag.name for flag in flags if flag.hint is bool}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if argument == "-m" or not argument.startswith("-"):
            break
        name = re.sub("^--no-", "--", argument)
        # -n2 means -n 2, as in mpirun.
        has_value = "=" in argument or re.fullmatch(r"-n\d+", argument)
        position += 1 if has_value or name in {*switches, "-h", "--help"} else 2
    return list(arguments[:position]), list(arguments[position:])


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (flags, command): the arguments before and after the first `--`."""
    position = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:position]), list(arguments[position + 1 :])


def split_own_flags(kind: type[Any], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags that the dataclass `kind` defines, and all other arguments."""
    flags = [flag for _, section in flag_sections(kind) for flag in section]
    switches = {flag.name for flag in flags if flag.hint is bool}
    switches |= {"-h", "--help", *(name.replace("--", "--no-", 1) for name in switches)}
    names = switches | {
        name for flag in flags for name in re.findall(r"--?[a-z][\w-]*", flag.usage)
    }
    own: list[str] = []
    others: list[str] = []
    expects_value = False  # whether the next argument is the value of a flag of `kind`
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        (own if name in names or expects_value else others).append(argument)
        expects_value = name in names and "=" not in argument and name not in switches
    return own, others


def without_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the arguments without these flags and their values."""
    remaining: list[str] = []
    skip_value = False
    for argument in arguments:
        # `--lr_sweep=1` also matches the flag `--lr-sweep`.
        flag, equals, _ = argument.partition("=")
        if skip_value:
            skip_value = False
        elif flag.replace("_", "-") in flags:
            skip_value = not equals
        else:
            remaining.append(argument)
    return remaining


# -- help ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """A flag or a positional argument, as shown in the help."""

    name: str  # such as --ranks, or OLD for a positional argument
    usage: str  # aliases, name and placeholder of the value, such as "-n, --ranks INT"
    hint: Any
    default: str  # the default value, "required", or "" if the help text explains the default
    help: str


def flag_sections(
    kind: type[Any], default: Any = None, title: str = "flags"
) -> Iterator[tuple[str, list[Flag]]]:
    """Yield (title, flags) of a dataclass, then of the dataclasses nested in `default`."""
    hints, own_fields = get_type_hints(kind, include_extras=True), inspect.get_annotations(kind)
    help_texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        help_texts |= _help_texts(base.__module__).get(base.__name__, {})
    flags, nested = [], []
    # The flags of this class come before the flags of its base classes.
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name not in own_fields):
        value = getattr(default, field.name, field.default)
        if dataclasses.is_dataclass(value):
            nested.append((type(value), value, _TITLES.get(field.name, field.name)))
        else:
            help_text = help_texts.get(field.name, "")
            flags.append(_flag(field.name, hints[field.name], value, help_text))
    if flags:
        yield title, flags
    for arguments in nested:
        yield from flag_sections(*arguments)


def _flag(field: str, hint: Any, value: Any, help_text: str) -> Flag:
    markers: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *markers = get_args(hint)
    config = next((marker for marker in markers if hasattr(marker, "aliases")), None)
    name = getattr(config, "name", None) or field.replace("_", "-")
    default = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    for special, text in ((None, ""), (False, ""), (True, "on"), (dataclasses.MISSING, "required")):
        default = text if value is special else default
    if tyro.conf.Positional in markers:
        name = getattr(config, "metavar", None) or name.upper()
        usage = f"{name} ..." if get_origin(hint) is tuple else name
        return Flag(name, usage, hint, default, help_text)
    names = [*(getattr(config, "aliases", None) or ()), f"--{name}"]
    if hint == bool | None or (hint is bool and value):
        names.append(f"--no-{name}")
    repeats = tyro.conf.UseAppendAction in markers
    placeholder = _placeholder(get_args(hint)[0] if repeats else hint)
    return Flag(f"--{name}", f"{', '.join(names)} {placeholder}".rstrip(), hint, default, help_text)


def _placeholder(hint: Any) -> str:
    """Return the placeholder of a value, such as INT or {auto,cpu,cuda}, or "" for a switch."""
    arguments = [argument for argument in get_args(hint) if argument is not NoneType]
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if Ellipsis in arguments:
        return f"[{_placeholder(arguments[0])} ...]"
    if get_origin(hint) is tuple:
        return " ".join(map(_placeholder, arguments))
    return _placeholder(arguments[0]) if arguments else _PLACEHOLDERS[hint]


@cache
def _help_texts(module: str) -> dict[str, dict[str, str]]:
    """Return {class: {field: help text}}. A help text is the string below a field in the source."""
    texts_by_class: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(definition, ast.ClassDef):
            texts = texts_by_class[definition.name] = {}
            for field, below in zip(definition.body, definition.body[1:], strict=False):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        texts[name] = " ".join(text.split())
    return texts_by_class


def _help_lines(kind: type[Any], program: str, default: Any) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, _MAX_HELP_WIDTH)
    sections = list(flag_sections(kind, default))
    sections[0][1].append(Flag("-h", "-h, --help", bool, "", "Show this help and exit."))
    positional = [flag.usage for flag in sections[0][1] if not flag.name.startswith("-")]
    usage = [f"usage: {program}", *positional, "[flags]", getattr(kind, "USAGE_END", "")]
    yield " ".join(usage).rstrip()
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        yield ""
        is_example = paragraph.startswith("    ")
        yield from [paragraph] if is_example else textwrap.wrap(paragraph, width)
    for title, flags in sections:
        yield f"\n{title}:"
        for flag in flags:
            text = flag.help
            if flag.default:
                text += (
                    " (required)" if flag.default == "required" else f" (default: {flag.default})"
                )
            usage = textwrap.wrap(f"  {flag.usage}", width, subsequent_indent="    ")
            lines = textwrap.wrap(text, width - _HELP_COLUMN, break_on_hyphens=False)
            if len(usage[-1]) < _HELP_COLUMN - 1:
                usage[-1] = usage[-1].ljust(_HELP_COLUMN) + lines.pop(0)
            yield from usage
            yield from (" " * _HELP_COLUMN + line for line in lines)


# -- errors ----------------------------------------------------------------------------------------


def _one_line(box: str, program: str, flags: Sequence[Flag], arguments: Sequence[str]) -> str:
    """Return tyro's error message as one line. For an unknown flag, suggest the closest flag.

    tyro prints its error message as a box of several lines.
    """
    _, *lines = (line.strip("│╭╮╰╯ ") for line in box.splitlines())
    if lines and set(lines[0]) == {"-"}:  # in an ASCII terminal, tyro underlines the title
        lines = ["─" if set(line) == {"-"} else line for line in lines[1:]]
    rule = next((number for number, line in enumerate(lines) if set(line) == {"─"}), len(lines))
    text = " ".join(line for line in lines[:rule] if line.strip("─"))
    unknown = re.match(r"Unrecognized options: (.*)", text)
    if unknown is None:
        # If the dataclass of a section raised the error, the message begins with the section name.
        text = re.sub(r"^Error parsing settings\.\w+: ", "", text)
        text = re.sub(r"^Error parsing (?:\w+\.)+(?=\w)", "Error parsing --", text)
        not_a_number = (
            r"^Error parsing (\S+): (?:invalid literal|could not convert) .*: (\S+)$",
            # For an optional number, the message lists the types that tyro has tried.
            r"^Error parsing (\S+): no type matching \{None\}\|.*?(?:INT|FLOAT).* from "
            r"\[(.*?)\]\. Got.*$",
        )
        for pattern in not_a_number:
            text = re.sub(pattern, r"\1 \2 is not a number", text)
        choice = re.match(r"invalid choice '(.*?)' for argument '(.*?)'.*one of \((.*)\)", text)
        if choice is not None:
            names_of_choices = sorted(set(re.findall(r"'(.*?)'", choice[3])) - {"None"})
            text = f"{choice[2]} must be one of {', '.join(names_of_choices)}, got {choice[1]!r}"
        if text.startswith("Missing from"):
            missing = re.findall(r"(?:: |\(required\) )([A-Z]{2,}|-\S+) ", text)
            text = f"{' and '.join(missing)} must be given" if missing else text
        return f"{text.rstrip('.')}. See {program} --help."
    flag = unknown[1].split(",")[0].strip()
    if not flag.startswith("-"):
        # In `--layouts dp2 tp2`, the word after the value of a text flag belongs to a list.
        texts = [flag.name for flag in flags if flag.usage.endswith(" TEXT")]
        words = " ".join(arguments).replace("=", " ").split()
        before = words[: words.index(flag)] if flag in words else []
        hint = ""
        if before[-2:-1] and before[-2] in texts:
            hint = f": write a list with commas, as in {before[-2]} {before[-1]},{flag}"
        return f"{flag!r} is not expected here{hint}. See {program} --help."
    # Compare names without leading dashes, because common dashes make any two flags similar.
    bare = {each.name.lstrip("-"): each.name for each in flags}
    bare_flag = re.sub("^no-", "", flag.partition("=")[0].lstrip("-"))
    close = closest_name(bare_flag, bare)
    if close is None:  # find a flag that contains the word: --lr-sweep for --sweep
        close = next((name for name in bare if bare_flag in name.split("-")), None)
    cure = f"see {program} --help" if close is None else f"did you mean {bare[close]}?"
    return f"there is no flag {flag}: {cure}"
