"""Recorded machines: the file of `--record` and `--from`, and JSON conversion of dataclasses."""

import dataclasses
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from tutti.machine.observation import Machine

SCHEMA = "tutti.machine/1"

Kind = TypeVar("Kind")


def format_machines(machines: Sequence["Machine"], command: Sequence[str], note: str) -> str:
    """The content of a recorded file: one machine per host, and a note about their origin."""
    content = {
        "schema": SCHEMA,
        "note": note,
        "command": command,
        "machines": [dataclasses.asdict(machine) for machine in machines],
    }
    return _format(content) + "\n"


def _format(value: Any, depth: int = 0) -> str:
    """Indented JSON in which every value that fits into 200 characters is on one line."""
    text = json.dumps(value)
    if len(text) + depth <= 200 or not isinstance(value, dict | list | tuple):
        return text
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_format(item, depth + 1)}" for key, item in value.items()]
    else:
        items = [_format(item, depth + 1) for item in value]
    lines = f",\n{' ' * (depth + 1)}".join(items)
    return f"{text[0]}\n{' ' * (depth + 1)}{lines}\n{' ' * depth}{text[-1]}"


def read_machines(path: Path) -> list["Machine"]:
    """The machines in a recorded file. Raises ValueError with the place and kind of a mistake."""
    from tutti.machine.observation import Machine

    try:
        content = json.loads(path.read_text())
    except UnicodeDecodeError:
        raise ValueError("not a text file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, line {error.lineno}: {error.msg}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"its schema is {schema!r}, not {SCHEMA!r}: use a file that --record wrote"
        )
    recorded = content.get("machines")
    if not isinstance(recorded, list) or not recorded:
        raise ValueError("it contains no machines")
    machines = []
    for number, values in enumerate(recorded):
        try:
            machines.append(Machine.from_json(values))
        except ValueError as error:
            raise ValueError(f"machine {number}: {error}") from None
    return machines


# --- dataclasses from JSON -----------------------------------------------------------------------


def from_json(kind: type[Kind], value: Any, path: str, missing: dict[str, str]) -> Kind:
    """Build a dataclass from a dict and check all types.

    An absent field that may be None becomes None, and its path is added to `missing`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'the machine'} is {_shorten(value)}, not an object")
    prefix = f"{path}." if path else ""
    hints = get_type_hints(kind)
    if unexpected := sorted(set(value) - set(hints)):
        raise ValueError(f"{prefix}{unexpected[0]} is not a field of {kind.__name__}")
    fields = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if field.name in value:
            fields[field.name] = _convert(hint, value[field.name], name, missing)
        elif types.NoneType in get_args(hint):
            fields[field.name] = None
            missing[name] = "not in the recorded file"
        elif field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**fields)


def _convert(hint: Any, value: Any, path: str, missing: dict[str, str]) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not types.NoneType]
        if value is None and len(options) < len(get_args(hint)):
            return None
        # A union such as int | "unlimited": the type of the value selects the option.
        fitting = [option for option in options if _fits(option, value)]
        return _convert(fitting[0] if fitting else options[0], value, path, missing)
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value, path, missing)  # type: ignore[arg-type]
    if not _fits(hint, value):
        name = getattr(hint, "__name__", str(hint))
        if get_origin(hint) is Literal:
            name = " or ".join(map(repr, get_args(hint)))
        raise ValueError(f"{path} is {_shorten(value)}, not {name}")
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        items = enumerate(value)
        return tuple(_convert(inner, item, f"{path}[{n}]", missing) for n, item in items)
    if get_origin(hint) is dict:
        inner = get_args(hint)[1]
        return {key: _convert(inner, item, f"{path}.{key}", missing) for key, item in value.items()}
    return value


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple)
    if hint in (int, float):  # bool is a subclass of int, but not a number here
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:37]}..."
