"""What everything was measured on, as the files say; equal environments are shown once."""

from collections.abc import Iterator
from typing import Any

from tutti.report.collect import Material
from tutti.report.figure import Figure, Table

_GIB = 1 << 30
# These differ from rank to rank of one host, or from run to run; they tell machines apart badly.
_OF_A_PROCESS = ("cpus", "variables")


def figures(material: Material) -> Iterator[Figure]:
    """One table for each machine, one of the variables and commands of each source."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    commands = []
    for each in material.sources:
        if each.command is not None:
            commands.append((each.name, each.command))
        environment = each.environment
        if environment is None:
            continue
        machine = {key: value for key, value in environment.items() if key not in _OF_A_PROCESS}
        known = next((names for seen, names in groups if seen == machine), None)
        if known is None:
            groups.append((machine, [each.name]))
        else:
            known.append(each.name)
    for machine, names in groups:
        yield Figure(
            f"Machine: {machine.get('host', 'unnamed')}",
            f"Of {', '.join(names)}.",
            Table(["what", "value"], list(_rows(machine))),
        )
    variables = [
        (each.name, name, value)
        for each in material.sources
        for name, value in ((each.environment or {}).get("variables") or {}).items()
    ]
    if commands:
        yield Figure("Commands", "", Table(["source", "command"], commands))
    if variables:
        yield Figure(
            "Variables",
            "Those that steer torch, its backends and launchers; no others are recorded.",
            Table(["source", "variable", "value"], variables),
        )


def _rows(machine: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in machine.items():
        name = key.replace("_", " ")
        if key == "memory_bytes":
            yield "memory GiB", value / _GIB
        elif key == "gpus":
            for number, gpu in enumerate(value):
                memory = f"{gpu['memory_bytes'] / _GIB:.0f} GiB"
                yield f"GPU {number}", f"{gpu['name']}, {memory}, driver {gpu['driver']}"
            if not value:
                yield "GPUs", "none"
        elif isinstance(value, dict):
            for inner, each in value.items():
                yield (f"{name} {inner}" if key != "versions" else str(inner)), each
        elif value is not None:
            yield name, value
