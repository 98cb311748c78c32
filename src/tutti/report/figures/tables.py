"""Results that have no figure of their own: their lists of rows, as tables."""

from collections.abc import Iterator
from typing import Any

from tutti.report.collect import Result
from tutti.report.figure import Figure, Table

_NOT_RESULTS = ("environment", "command", "schema", "world", "places")


def figures(result: Result) -> Iterator[Figure]:
    """A table for each list of objects, and one for single values."""
    single = []
    for key, value in result.content.items():
        if key in _NOT_RESULTS:
            continue
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            flat = [_flat(row) for row in value]
            head = list(dict.fromkeys(name for row in flat for name in row))
            yield Figure(
                key.replace("_", " "),
                "",
                Table(head, [[row.get(name) for name in head] for row in flat]),
            )
        elif not isinstance(value, dict | list):
            single.append((key, value))
    values: list[tuple[str, Any]] = [each for each in single if each[1] is not None]
    if values:
        yield Figure("Values", "", Table(["name", "value"], values))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """`time_us.p50` for what is one level down."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and value:
            found |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            found[key] = value
    return found
