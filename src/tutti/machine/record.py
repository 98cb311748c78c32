"""Recorded machines: dataclasses to JSON and back, and the file that holds one per host."""

import dataclasses
import json
import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from tutti.machine.machine import Machine

SCHEMA = "tutti.machine/1"
_MISSING = "not in the recorded file"

Kind = TypeVar("Kind")


def write_machines(
    path: Path,
    machines: Sequence["Machine"],
    command: Sequence[str],
    note: str,
) -> None:
    """Record machines, one per host; a reader sees the old file or the whole new one.

    `note` says how they came to be known.
    """
    content = {
        "schema": SCHEMA,
        "note": note,
        "command": list(command),
        "machines": [each.to_json() for each in machines],
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(_lay_out(content) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _lay_out(value: Any, depth: int = 0) -> str:
    """JSON for people: what fits a line is on one line."""
    text = json.dumps(value)
    if len(text) + depth <= 200 or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        begin, end = "{}"
        items = [f"{json.dumps(key)}: {_lay_out(each, depth + 1)}" for key, each in value.items()]
    else:
        begin, end = "[]"
        items = [_lay_out(each, depth + 1) for each in value]
    lines = f",\n{' ' * (depth + 1)}".join(items)
    return f"{begin}\n{' ' * (depth + 1)}{lines}\n{' ' * depth}{end}"


def read_machines(path: Path) -> list["Machine"]:
    """The machines of a recorded file. What is wrong with it is a ValueError that says where."""
    from tutti.machine.machine import Machine

    try:
        content = json.loads(path.read_text())
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON, line {error.lineno}: {error.msg}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r}, not {SCHEMA!r}: was it made by --record?")
    recorded = content.get("machines")
    if not isinstance(recorded, list) or not recorded:
        raise ValueError("it holds no machines")
    machines = []
    for number, each in enumerate(recorded):
        try:
            machines.append(Machine.from_json(each))
        except ValueError as error:
            raise ValueError(f"machine {number}: {error}") from None
    return machines


def encode(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists."""
    if dataclasses.is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {key: encode(each) for key, each in value.items()}
    return value


def decode(kind: type[Kind], value: Any, path: str, missing: dict[str, str]) -> Kind:
    """Make a dataclass of a dict. `missing` collects the fields that may be unknown and are."""
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'it'} is {_show(value)}, not an object")
    hints = get_type_hints(kind)
    if strange := sorted(set(value) - set(hints)):
        raise ValueError(f"{_join(path, strange[0])} is not a field of {kind.__name__}")
    fields = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, hint = _join(path, field.name), hints[field.name]
        if field.name in value:
            fields[field.name] = _decode_value(hint, value[field.name], name, missing)
        elif types.NoneType in get_args(hint):
            fields[field.name] = None
            missing[name] = _MISSING
        elif field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**fields)


def _decode_value(hint: Any, value: Any, path: str, missing: dict[str, str]) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        options = [each for each in get_args(hint) if each is not types.NoneType]
        if value is None and len(options) < len(get_args(hint)):
            return None
        # Where several types are allowed (a number or "unlimited"), the value's own decides.
        fitting = [each for each in options if _fits(each, value)]
        return _decode_value(fitting[0] if fitting else options[0], value, path, missing)
    if dataclasses.is_dataclass(hint):
        return decode(hint, value, path, missing)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list):
        inner = get_args(hint)[0]
        return tuple(
            _decode_value(inner, each, f"{path}[{number}]", missing)
            for number, each in enumerate(value)
        )
    if get_origin(hint) is dict and isinstance(value, dict):
        inner = get_args(hint)[1]
        return {
            key: _decode_value(inner, each, f"{path}.{key}", missing) for key, each in value.items()
        }
    if not _fits(hint, value):
        raise ValueError(f"{path} is {_show(value)}, not {_name(hint)}")
    return value


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) is tuple:
        return isinstance(value, list)
    if hint in (int, float):  # True is an int to Python, not to us
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(
            value, bool
        )
    return isinstance(value, hint)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def _name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return getattr(hint, "__name__", str(hint))
