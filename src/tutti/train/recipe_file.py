"""Recipes as TOML: read with the nearest name for every unknown key, written so they read back."""

import dataclasses
import difflib
import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tutti.train.recipe import RECIPES, Recipe
from tutti.world.errors import UsageError, did_you_mean

_NONE = "none"  # TOML has no word for what is left open


def read_recipe(name: str) -> Recipe:
    """A recipe by its name, or from a TOML file; `base = "gpt"` there says what it changes."""
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if path.suffix != ".toml":
        hint = did_you_mean(name, RECIPES)
        raise UsageError(f"no recipe {name!r}: {hint} (or a file that ends in .toml)")
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--recipe {path}: {error.strerror}: check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--recipe {path}: {error}") from None
    base = content.pop("base", None)
    if base not in RECIPES:
        known = ", ".join(f'"{each}"' for each in RECIPES)
        raise UsageError(f'--recipe {path}: base = {base!r}: write base = "NAME", one of {known}')
    recipe: Recipe = _apply(RECIPES[base], content, str(path), "")
    return recipe


def write_recipe(recipe: Recipe, base: str) -> str:
    """The whole recipe as TOML."""
    lines = [f"base = {_value(base)}"]
    sections = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if dataclasses.is_dataclass(value):
            rows = [
                f"{part.name} = {_value(getattr(value, part.name))}"
                for part in dataclasses.fields(value)
            ]
            sections.append("\n".join([f"[{field.name}]", *rows]))
        else:
            lines.append(f"{field.name} = {_value(value)}")
    return "\n\n".join(["\n".join(lines), *sections]) + "\n"


def _apply(target: Any, values: dict[str, Any], where: str, prefix: str) -> Any:
    hints = get_type_hints(type(target))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
            raise UsageError(f"{where}: no key {prefix}{key}: did you mean {prefix}{near[0]}?")
        current = getattr(target, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: {prefix}{key} is a section: write [{prefix}{key}]")
            changes[key] = _apply(current, value, where, f"{prefix}{key}.")
        else:
            changes[key] = _checked(value, hints[key], f"{where}: {prefix}{key}")
    try:
        return dataclasses.replace(target, **changes)
    except ValueError as error:  # the part's own check of its values
        raise UsageError(f"{where}: {error}") from None


def _checked(value: Any, kind: Any, what: str) -> Any:
    """A TOML value as the field's type; TOML knows whole numbers, which are fine as floats."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        if len(kinds) < len(get_args(kind)) and value == _NONE:
            return None
        return _checked(value, kinds[0], what)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{what} = {value!r}: use one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_checked(each, get_args(kind)[0], what) for each in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise UsageError(f"{what} = {value!r}: expected {getattr(kind, '__name__', kind)}")
    return value


def _value(value: Any) -> str:
    if value is None:
        value = _NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_value(each) for each in value)}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
