"""Recorded machines: the file of `--record` and `--from`, and JSON conversion of dataclasses."""

import dataclasses
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tutti.measure.files import write_atomically

if TYPE_CHECKING:
    from tutti.machine.observation import Machine

SCHEMA = "tutti.machine/1"

Kind = TypeVar("Kind")


def write_machines(
    path: Path, machines: Sequence["Machine"], command: Sequence[str], note: str
) -> None:
    """Write machines, one per host, to a file. `note` describes the origin of the machines."""
    content = {
        "schema": SCHEMA,
        "note": note,
        "command": list(command),
        "machines": [each.to_json() for each in machines],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _format(content) + "\n")


def _format(value: Any, depth: int = 0) -> str:
    """Indented JSON in which every value that fits into 200 characters is on one line."""
    text = json.dumps(value)
    if len(text) + depth <= 200 or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        begin, end = "{}"
        items = [f"{json.dumps(key)}: {_format(each, depth + 1)}" for key, each in value.items()]
    else:
        begin, end = "[]"
        items = [_format(each, depth + 1) for each in value]
    lines = f",\n{' ' * (depth + 1)}".join(items)
    return f"{begin}\n{' ' * (depth + 1)}{lines}\n{' ' * depth}{end}"


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
    for number, each in enumerate(recorded):
        try:
            machines.append(Machine.from_json(each))
        except ValueError as error:
            raise ValueError(f"machine {number}: {error}") from None
    return machines


# --- dataclasses to JSON and back ----------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Convert dataclasses to dicts and tuples to lists, recursively."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_json(each) for each in value]
    if isinstance(value, dict):
        return {key: to_json(each) for key, each in value.items()}
    return value


def from_json(kind: type[Kind], value: Any, path: str, missing: dict[str, str]) -> Kind:
    """Build a dataclass from a dict and check all types.

    An absent field that may be None becomes None, and its path is added to `missing`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'the machine'} is {_shorten(value)}, not an object")
    hints = get_type_hints(kind)
    if unexpected := sorted(set(value) - set(hints)):
        raise ValueError(f"{_join(path, unexpected[0])} is not a field of {kind.__name__}")
    fields = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, hint = _join(path, field.name), hints[field.name]
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
        options = [each for each in get_args(hint) if each is not types.NoneType]
        if value is None and len(options) < len(get_args(hint)):
            return None
        # A union such as int | "unlimited": the type of the value selects the option.
        fitting = [each for each in options if _fits(each, value)]
        return _convert(fitting[0] if fitting else options[0], value, path, missing)
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value, path, missing)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list):
        inner = get_args(hint)[0]
        return tuple(
            _convert(inner, each, f"{path}[{number}]", missing) for number, each in enumerate(value)
        )
    if get_origin(hint) is dict and isinstance(value, dict):
        inner = get_args(hint)[1]
        return {key: _convert(inner, each, f"{path}.{key}", missing) for key, each in value.items()}
    if not _fits(hint, value):
        raise ValueError(f"{path} is {_shorten(value)}, not {_type_name(hint)}")
    return value


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) is tuple:
        return isinstance(value, list)
    if hint in (int, float):  # bool is a subclass of int, but not a number here
        accepted = int if hint is int else (int, float)
        return isinstance(value, accepted) and not isinstance(value, bool)
    return isinstance(value, hint)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return getattr(hint, "__name__", str(hint))
