"""Figures of parity, topology, checks and environments, and tables of all other results."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tutti.machine.device_topology import Topology
from tutti.machine.recording import Machine
from tutti.machine.topology_svg import draw
from tutti.report import plot
from tutti.report.plot import Figure, Table
from tutti.report.sources import ReportSources, Result, flatten, recorded

_SMALLEST_ERROR = 1e-17  # an error of 0 has no logarithm and is drawn at this value
_STATUS_COLOURS = {
    "fail": plot.VERMILION,
    "warn": plot.ORANGE,
    "pass": plot.GREEN,
    "skip": plot.GREY,
}
_GIB = 1 << 30
# Keys that differ between ranks of one host or between runs, so they do not identify a machine.
_PROCESS_KEYS = ("cpus", "variables")
_NOT_RESULTS = ("environment", "command", "schema", "world", "places")


def parity(result: Result) -> Iterator[Figure]:
    """Yield the errors of loss and gradient of each layout, relative to a run on one device."""
    content = result.content
    rows = [row for row in content["rows"] if not row.get("not_applicable")]
    failed = sum(not row["ok"] for row in rows)
    verdict = f"{failed} of {len(rows)} layouts fail" if failed else "all layouts agree"
    limit = (content.get("tolerance") or {}).get("gradient")
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [row["layout"] for row in rows],
            "y": [None if row[key] is None else max(_SMALLEST_ERROR, row[key]) for row in rows],
            "marker": {"color": colour, "symbol": symbol, "size": 9},
            "hovertemplate": "%{x}: %{y:.2g}<extra>%{fullData.name}</extra>",
        }
        for name, key, colour, symbol in (
            ("loss", "loss_rel_err", plot.GREEN, "diamond"),
            ("gradient", "grad_rel_err", plot.BLUE, "circle"),
        )
    ]
    findings = [
        {"finding": row.get("not_applicable") or row.get("diagnosis"), **row}
        for row in content["rows"]
    ]
    layout = {
        "xaxis": {"type": "category", "tickangle": -45},
        "yaxis": plot.axis("relative error", type="log", exponentformat="power", dtick=1),
        "height": 400,
        "showlegend": True,
        "shapes": [plot.dotted_line(plot.VERMILION, y=limit)] if limit else [],
    }
    words: dict[str, Any] = {"precision": content.get("precision", ""), "verdict": verdict}
    yield plot.figure("parity", findings, traces if rows else (), layout, **words)


def topology(result: Result) -> Iterator[Figure]:
    """Yield the picture of `tutti topo`, with a table of all links.

    The picture shows the machines in the file, not the machine that creates the page.
    """
    machines = [Machine.from_json(machine) for machine in result.content.get("machines") or []]
    topologies = [Topology(machine) for machine in machines]
    # JSON has lists in place of tuples.
    tables = [json.loads(json.dumps(graph.to_json())) for graph in topologies]
    for key in ("devices", "links", "nics", "numa"):
        derived = [row for table in tables for row in table.get(key) or []]
        _check_rows(key, result.content.get(key), derived)
    rows = result.content.get("links")
    if rows is None:
        rows = [link for table in tables for link in table["links"]]
    if not topologies:
        yield plot.figure("links", rows)
        return
    pictures = draw(topologies, "light"), draw(topologies, "dark")
    hosts = ", ".join(machine.host for machine in machines)
    yield plot.figure("topology", rows, pictures=pictures, hosts=hosts)


def _check_rows(key: str, rows: Any, derived: Sequence[dict[str, Any]]) -> None:
    """Raise TypeError if a table is not a list of rows, or if a value has a wrong type.

    The expected types are the types in `derived`, a table that is computed from the recorded
    machines.
    """
    if rows is None:
        return
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TypeError(f"{key} is not a list of objects")
    for number, (row, expected) in enumerate(zip(rows, derived, strict=False)):
        for name, value in row.items():
            if not _same_type(value, right := expected.get(name)):
                raise TypeError(
                    f"{key}[{number}].{name} is {value!r}, expected a value such as {right!r}"
                )


def _same_type(value: Any, right: Any) -> bool:
    if isinstance(value, list) and isinstance(right, list) and right:
        return all(_same_type(each, right[0]) for each in value)
    unknown = value is None or right is None
    return unknown or type(value) is type(right) or {type(value), type(right)} <= {int, float}


def checks(result: Result) -> Iterator[Figure]:
    """Yield the checks of `tutti doctor` with their cures. Failures come first."""
    rows = result.content["checks"]
    count = Counter(row["status"] for row in rows)
    order = [name for name in _STATUS_COLOURS if name in count]
    order += sorted(set(count) - set(order))
    bars = [
        plot.bar(name, ["checks"], [count[name]], _STATUS_COLOURS.get(name, plot.GREY), name)
        for name in order
    ]
    layout = {
        "barmode": "stack",
        "height": 150,
        "xaxis": {"showgrid": False},
        "yaxis": {"visible": False},
        "showlegend": True,
    }
    failures_first = sorted(rows, key=lambda row: order.index(row["status"]))
    counts = ", ".join(f"{count[name]} {name}" for name in order)
    yield plot.figure("checks", failures_first, bars, layout, counts=counts)


def result_tables(result: Result) -> Iterator[Figure]:
    """Yield tables for a result without plots: one table per list, and one for all other values."""
    content = {key: value for key, value in result.content.items() if key not in _NOT_RESULTS}
    for key, value in content.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            flat = [flatten(row) for row in value]
            head = list(dict.fromkeys(name for row in flat for name in row))
            rows = [[row.get(name) for name in head] for row in flat]
            yield Figure(key.replace("_", " "), "", Table(head, rows))
    values = [
        (key, value)
        for key, value in content.items()
        if not isinstance(value, dict | list) and value is not None
    ]
    if values:
        yield Figure("Values", "", Table(["name", "value"], values))


def environments(sources: ReportSources) -> Iterator[Figure]:
    """Yield one table per machine, then tables of the commands and variables of all sources."""
    machines: list[tuple[dict[str, Any], list[str]]] = []
    commands, variables = [], []
    for source in sources.all:
        if command := recorded(source, "command"):
            commands.append((source.name, " ".join(map(str, command))))
        environment = recorded(source, "environment") or {}
        for name, value in (environment.get("variables") or {}).items():
            variables.append((source.name, name, value))
        machine = {key: value for key, value in environment.items() if key not in _PROCESS_KEYS}
        names = next((names for other, names in machines if other == machine), None)
        if names is not None:
            names.append(source.name)
        elif machine:
            machines.append((machine, [source.name]))
    for machine, names in machines:
        yield Figure(
            f"Machine: {machine.get('host', 'unnamed')}",
            f"This is the machine of {', '.join(names)}.",
            Table(["what", "value"], list(_machine_rows(machine))),
        )
    if commands:
        yield Figure("Commands", "", Table(["source", "command"], commands))
    if variables:
        yield Figure(
            "Variables",
            "Only variables that control torch, its backends and launchers are recorded.",
            Table(["source", "variable", "value"], variables),
        )


def _machine_rows(machine: dict[str, Any]) -> Iterator[tuple[str, Any]]:
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
            prefix = "" if key == "versions" else f"{name} "
            for inner, inner_value in value.items():
                yield f"{prefix}{inner}", inner_value
        elif value is not None:
            yield name, value
