"""What connects the devices: the picture that `tutti topo` draws, and every link in a table.

Only recorded machines are drawn. The machine that makes the page is never looked at: it need not
be the one that the figures are from.
"""

from collections.abc import Iterator

from tutti.machine.device_topology import Topology
from tutti.machine.observation import Machine
from tutti.machine.topology_svg import draw
from tutti.report.collect import Result
from tutti.report.figure import Figure, Table


def figures(result: Result) -> Iterator[Figure]:
    """Of `tutti topo --json` or `--record`."""
    machines = [Machine.from_json(each) for each in result.content.get("machines") or []]
    topologies = [Topology(machine) for machine in machines]
    rows = result.content.get("links")
    if rows is None:
        rows = [link for each in topologies for link in each.to_json()["links"]]
    table = Table(
        ["host", "from", "to", "class", "NVLinks", "NVLink GB/s", "why"],
        [
            (
                *(row["host"], row["a"], row["b"], row["class"], row.get("nvlinks")),
                *(row.get("nvlink_gbs"), row.get("reason")),
            )
            for row in rows
        ],
    )
    hosts = ", ".join(each.machine.host for each in topologies)
    if not topologies:
        about = (
            "The file is an older one, which has no picture: `tutti topo --json` now records what "
            "it takes to draw one."
        )
        yield Figure("Links", about, table)
        return
    yield Figure(
        f"Topology of {hosts}",
        "Green are GPUs and NVLinks, blue NICs, red what counts errors or has lost links.",
        table,
        pictures=(draw(topologies, "light"), draw(topologies, "dark")),
    )
