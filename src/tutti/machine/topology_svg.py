"""draw(): an SVG image of the NUMA nodes, GPUs, NICs, PCIe switches and NVLinks of hosts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from tutti.machine.device_topology import Interface, Topology, pci_location
from tutti.machine.gpus import Accelerator

# Sizes in pixels. _SLOT is the width of a device's box plus the space around the box.
_SLOT, _BOX, _NIC_HEIGHT, _GPU_HEIGHT = 120, 112, 46, 60
_PAD, _GAP, _HEAD, _TITLE = 12, 56, 76, 64
_NUMA_WIDTH = 216  # minimum width of a NUMA node, which has two lines of text
_MARGIN = 24


def draw(topologies: Sequence[Topology], page: Literal["light", "dark", "any"] = "any") -> str:
    """Return an SVG image of one or more hosts, one below the other.

    With `page="any"`, the `prefers-color-scheme` of the viewer selects light or dark colours.
    """
    # CSS variables are not used, because many SVG viewers do not support them.
    light, dark = (
        "\n" + Path(__file__).with_name(f"topology_{name}.css").read_text()
        for name in ("light", "dark")
    )
    if page != "dark":
        dark = "" if page == "light" else f"@media (prefers-color-scheme: dark) {{{dark}}}"
    panels = [_Panel(topology) for topology in topologies]
    width = max(panel.width for panel in panels)
    parts, top = [], 0
    for panel in panels:
        parts += [f'<g transform="translate(0 {top})">', *panel.draw(), "</g>"]
        top += panel.height
    label = escape(f"Topology of {', '.join(topology.machine.host for topology in topologies)}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            f'viewBox="0 0 {width} {top}" role="img" aria-label="{label}">',
            f"<style>{light}{dark}</style>",
            f'<rect class="page" width="{width}" height="{top}"/>',
            *parts,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True)
class _SwitchGroup:
    """The devices below one PCIe switch, or a single device. NICs are drawn above GPUs."""

    root: str
    nics: tuple[Interface, ...]
    gpus: tuple[Accelerator, ...]

    @property
    def width(self) -> int:
        return max(len(self.nics), len(self.gpus)) * _SLOT

    @property
    def is_switch(self) -> bool:
        """Whether the group has several PCI devices and is therefore drawn as a PCIe switch.

        The ports of one card count as one PCI device.
        """
        devices: list[Interface | Accelerator] = [*self.nics, *self.gpus]
        addresses = {(device.pci_address or "").rpartition(".")[0] for device in devices}
        return len(addresses) > 1


class _Panel:
    """The drawing of one host."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nodes = {node.id: node for node in topology.machine.numa}
        self.columns: list[tuple[int | None, list[_SwitchGroup]]] = []
        self.nodes_without_devices: list[int] = []
        for node in (*self.nodes, None):
            # If the machine has only one node, devices with an unknown NUMA node belong to it.
            single = len(self.nodes) == 1
            members = {node, None} if single and node is not None else {node}
            groups = [] if node is None and single else self._switch_groups(members)
            # A node without devices is drawn only if there are at most two nodes.
            drawn_if_empty = len(self.nodes) <= 2 if node is not None else not self.nodes
            if groups or drawn_if_empty:
                self.columns.append((node, groups))
            elif node is not None:
                self.nodes_without_devices.append(node)
        self.centers: dict[int, float] = {}  # {GPU index: x coordinate of the centre of its box}
        widths = [self._node_width(groups) for _, groups in self.columns]
        self.width = max(2 * _MARGIN + sum(widths) + _GAP * (len(widths) - 1), 640)
        has_nics = any(group.nics for _, groups in self.columns for group in groups)
        self.gpu_top = _TITLE + _HEAD + 2 * _PAD + (_NIC_HEIGHT + 10) * has_nics
        self.gpu_bottom = self.gpu_top + (_GPU_HEIGHT if topology.gpus else -10)
        self.node_bottom = self.gpu_bottom + 2 * _PAD
        self.nvswitches = {
            link.peer_pci
            for gpu in topology.gpus
            for link in gpu.nvlinks or ()
            if link.peer_kind == "switch"
        }
        self.pairs = [link for link in topology.links if link.nvlinks and not self.nvswitches]
        wires_height = 76 if self.nvswitches else 0
        if self.pairs:  # the deepest arc connects the first GPU and the last GPU
            wires_height = 22 * len(topology.gpus)
        self.wires_bottom = self.node_bottom + wires_height
        self.height = self.wires_bottom + 30 + 16 * bool(self.nodes_without_devices) + _MARGIN

    def _switch_groups(self, numa_nodes: set[int | None]) -> list[_SwitchGroup]:
        """Return the devices of these NUMA nodes in PCI order, grouped by PCIe switch."""
        topology = self.topology
        paths = {
            name: pci_location(topology.machine, device).path
            for name, device in topology.devices.items()
            if device.numa_node in numa_nodes
        }
        below_one_switch = [{link.a, link.b} for link in topology.links if link.pci_class == "PIX"]
        rest = sorted(paths, key=lambda name: (paths[name], name))
        groups = []
        while rest:
            first = rest[0]
            same = [n for n in rest if n == first or {first, n} in below_one_switch]
            rest = [name for name in rest if name not in same]
            devices = [topology.devices[name] for name in same]
            nics = tuple(device for device in devices if isinstance(device, Interface))
            gpus = tuple(device for device in devices if isinstance(device, Accelerator))
            groups.append(_SwitchGroup(paths[first][0] if paths[first] else "", nics, gpus))
        return groups

    @staticmethod
    def _node_width(groups: Sequence[_SwitchGroup]) -> int:
        return max(_NUMA_WIDTH, sum(group.width + _PAD for group in groups) + _PAD)

    def draw(self) -> Iterator[str]:
        machine = self.topology.machine
        yield _text(_MARGIN, 34, machine.host, "title")
        count = f"{machine.cpus.packages} × " if (machine.cpus.packages or 1) > 1 else ""
        product = f"{machine.product}, " if machine.product else ""
        subtitle = f"{product}{count}{machine.cpus.model}"
        yield _text(_MARGIN, 53, subtitle.replace("(R)", ""), "soft")
        left, previous = _MARGIN, None
        for node, groups in self.columns:
            if previous is not None and node is not None:
                yield from self._draw_distance(left - _GAP, previous, node)
            yield from self._draw_node(left, node, groups)
            left += self._node_width(groups) + _GAP
            previous = node
        if self.nvswitches:
            yield from self._draw_nvswitches()
        yield from self._draw_pairs()
        y = self.wires_bottom + 24
        if self.nodes_without_devices:
            nodes = ", ".join(map(str, self.nodes_without_devices))
            yield _text(_MARGIN, y, f"NUMA {nodes}: no GPU and no NIC", "soft")
            y += 16
        legend = "dashed: PCIe root complex; grey: PCIe switch (PIX); number between nodes:"
        if any(group.root for _, groups in self.columns for group in groups):
            yield _text(_MARGIN, y, f"{legend} NUMA distance", "soft")
        elif reason := machine.reason_unknown("pci"):
            yield _text(_MARGIN, y, f"PCI paths unknown: {reason}", "soft")

    def _draw_node(
        self, left: float, node: int | None, groups: Sequence[_SwitchGroup]
    ) -> Iterator[str]:
        height = self.node_bottom - _TITLE
        yield _box(left, _TITLE, self._node_width(groups), height, "node", 10)
        machine = self.topology.machine
        name, cpus, memory = "NUMA unknown", machine.cpus.allowed, machine.memory.total_bytes
        if node is not None:
            name, cpus = f"NUMA {node}", self.nodes[node].cpus or "none"
            memory = self.nodes[node].memory_bytes
        yield _text(left + _PAD, _TITLE + 22, name, "name")
        size = "" if memory is None else f", {memory / (1 << 30):.0f} GiB"
        yield _text(left + _PAD, _TITLE + 40, f"CPUs {cpus}{size}", "soft")
        x, root = left + _PAD, ""
        for group in groups:
            if group.root and group.root != root:
                same = [other for other in groups if other.root == group.root]
                width = sum(other.width + _PAD for other in same) - _PAD
                top = _TITLE + _HEAD - 4
                yield _box(x - 5, top, width + 10, self.node_bottom - top - 6, "root", 8)
                yield _text(x, top - 4, group.root, "soft")
            yield from self._draw_group(x, group)
            x, root = x + group.width + _PAD, group.root

    def _draw_group(self, left: float, group: _SwitchGroup) -> Iterator[str]:
        top = _TITLE + _HEAD + _PAD
        if group.is_switch:
            height = self.node_bottom - top - _PAD + 2
            yield _box(left, top - 8, group.width, height, "switch", 6)
        for number, nic in enumerate(group.nics):
            on = nic.state in ("ACTIVE", "up")
            style = (
                "nic bad" if nic.errors or (nic.ports and not on) else "nic" if on else "nic off"
            )
            rate = "rate unknown" if nic.rate_gbps is None else f"{nic.rate_gbps:g} Gb/s"
            status = (rate if on else nic.state) + (", errors" if nic.errors else "")
            errors = ", ".join(f"{name} {count}" for name, count in nic.errors.items())
            lines, tooltip = [f"{nic.id} {nic.name}", status], f"{nic.pci_address} {errors}"
            yield from _device(left + number * _SLOT + 4, top, _NIC_HEIGHT, style, lines, tooltip)
        for number, gpu in enumerate(group.gpus):
            x = left + number * _SLOT + 4
            self.centers[gpu.index] = x + _BOX / 2
            links = gpu.nvlinks or ()
            down = len(links) - len(gpu.active_nvlinks)
            some_down = 0 < down < len(links)
            name = gpu.name.removeprefix("NVIDIA ")
            name = name if len(name) < 17 else f"{name[:15]}…"
            status = gpu.pci_address or "PCI unknown"
            if some_down:
                status = f"{down} NVLink{'s' * (down > 1)} down"
            lines = [f"GPU{gpu.index}", name, status]
            style = "gpu bad" if some_down or any(link.errors for link in links) else "gpu"
            yield from _device(x, self.gpu_top, _GPU_HEIGHT, style, lines, gpu.uuid or "")

    def _draw_distance(self, x: float, a: int, b: int) -> Iterator[str]:
        """Yield a line between two NUMA nodes with their NUMA distance."""
        y = _TITLE + 22
        yield f'<line class="between" x1="{x:g}" y1="{y}" x2="{x + _GAP:g}" y2="{y}"/>'
        distances = self.nodes[a].distances
        if distances is not None:
            distance = str(distances[list(self.nodes).index(b)])
            yield _text(x + _GAP / 2, y - 6, distance, "soft middle")

    def _draw_nvswitches(self) -> Iterator[str]:
        top = self.node_bottom + 40
        left, right = min(self.centers.values()), max(self.centers.values())
        counts = {
            gpu.index: sum(link.peer_kind == "switch" for link in gpu.active_nvlinks)
            for gpu in self.topology.gpus
        }
        for index, count in counts.items():
            if count:
                x, broken = self.centers[index], " broken" * (count < max(counts.values()))
                yield f'<path class="wire{broken}" d="M{x:g} {self.gpu_bottom:g} V{top}"/>'
                yield _text(x + 6, top - 10, f"NV{count}", "soft")
        yield _box(left - _BOX / 2, top, right - left + _BOX, 26, "gpu", 6)
        name = f"{len(self.nvswitches - {None})} NVSwitches"
        yield _text((left + right) / 2, top + 17, name, "name middle")

    def _draw_pairs(self) -> Iterator[str]:
        """Yield an arc for each pair of GPUs with direct NVLinks. Longer arcs reach lower."""
        order = sorted(self.centers, key=lambda index: self.centers[index])
        y = self.gpu_bottom
        max_nvlinks = max((link.nvlinks for link in self.pairs), default=0)
        for link in self.pairs:
            ends = sorted(order.index(int(name.removeprefix("GPU"))) for name in (link.a, link.b))
            distance = ends[1] - ends[0]
            # The arcs of one GPU start next to each other, so that they do not overlap.
            spread = 12 + 8 * (distance - 1)
            x1, x2 = self.centers[order[ends[0]]] + spread, self.centers[order[ends[1]]] - spread
            depth = self.node_bottom + 10 + 30 * distance
            broken = " broken" * (link.nvlinks < max_nvlinks)
            curve = f"M{x1:g} {y} C{x1:g} {depth} {x2:g} {depth} {x2:g} {y}"
            yield f'<path class="wire{broken}" d="{curve}"/>'
            label_y = y + 0.75 * (depth - y) - 5
            yield _text((x1 + x2) / 2, label_y, link.link_class, "soft middle")


def _device(
    left: float, top: float, height: float, style: str, lines: Sequence[str], tooltip: str
) -> Iterator[str]:
    yield f"<g><title>{escape(tooltip)}</title>"
    yield _box(left, top, _BOX, height, style, 5)
    for number, line in enumerate(lines):
        kind = "name middle" if number == 0 else "soft middle"
        yield _text(left + _BOX / 2, top + 18 + 16 * number, line, kind)
    yield "</g>"


def _box(left: float, top: float, width: float, height: float, style: str, radius: int) -> str:
    return (
        f'<rect class="{style}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" '
        f'rx="{radius}"/>'
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
