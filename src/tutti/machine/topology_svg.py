"""draw(): an SVG of NUMA nodes with their NICs and GPUs, PCIe switches, NVSwitches and NVLinks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from tutti.machine.device_topology import Interface, Topology, pci_place
from tutti.machine.gpus import Accelerator

# Sizes in pixels. A slot is the width of a device's box plus the space around it.
_SLOT, _BOX, _NIC_HEIGHT, _GPU_HEIGHT = 120, 112, 46, 60
_PAD, _GAP, _HEAD, _TITLE = 12, 56, 76, 64
_NUMA_WIDTH = 216  # minimum width of a NUMA node, so that its two lines of text fit
_MARGIN = 24


def draw(topologies: Sequence[Topology], page: Literal["light", "dark", "any"] = "any") -> str:
    """An SVG of one or more hosts, one below the other.

    With `page="any"`, the viewer's `prefers-color-scheme` selects light or dark colours.
    """
    # CSS variables are not used, because many SVG viewers other than browsers do not support them.
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
        parts.append(f'<g transform="translate(0 {top})">')
        parts += panel.draw()
        parts.append("</g>")
        top += panel.height
    label = escape(f"Topology of {', '.join(each.machine.host for each in topologies)}")
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
    def slots(self) -> int:
        return max(len(self.nics), len(self.gpus))

    @property
    def is_switch(self) -> bool:
        """Whether the group is drawn as a switch.

        False for a single device, and for several ports of one card, which are functions of one
        PCI device.
        """
        devices: list[Interface | Accelerator] = [*self.nics, *self.gpus]
        addresses = [each.pci_address or "" for each in devices]
        return len({address.rpartition(".")[0] for address in addresses}) > 1


class _Panel:
    """The drawing of one host."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        nodes = {node.id: node for node in topology.machine.numa}
        self.columns: list[tuple[int | None, list[_SwitchGroup]]] = []
        self.empty: list[int] = []
        for node in (*nodes, None):
            # If there is a single node, devices whose NUMA node is unknown are drawn in that node.
            members = {node, None} if len(nodes) == 1 and node is not None else {node}
            groups = [] if node is None and len(nodes) == 1 else self._switch_groups(members)
            # Nodes without devices are drawn only if there are at most two nodes.
            if groups or (node is not None and len(nodes) <= 2) or (not nodes and node is None):
                self.columns.append((node, groups))
            elif node is not None:
                self.empty.append(node)
        self.centers: dict[int, float] = {}  # x of the centre of each GPU's box
        widths = [self._node_width(groups) for _, groups in self.columns]
        self.width = int(2 * _MARGIN + sum(widths) + _GAP * (len(widths) - 1))
        self.width = max(self.width, 640)
        has_nics = any(group.nics for _, each in self.columns for group in each)
        has_gpus = bool(topology.gpus)
        self.gpu_top = _TITLE + _HEAD + 2 * _PAD + (_NIC_HEIGHT + 10) * has_nics
        bottom = self.gpu_top + (_GPU_HEIGHT if has_gpus else -10)
        self.node_bottom = bottom + 2 * _PAD
        self.switches = any(
            link.peer_kind == "switch" for gpu in topology.gpus for link in gpu.nvlinks or ()
        )
        self.pairs = [link for link in topology.links if link.nvlinks and not self.switches]
        wires_height = 76 if self.switches else 0
        if self.pairs:  # the deepest arc connects the first GPU and the last GPU
            wires_height = 22 * len(topology.gpus)
        self.wires_bottom = self.node_bottom + wires_height
        self.height = int(self.wires_bottom + 30 + 16 * bool(self.empty) + _MARGIN)

    def _switch_groups(self, numa_nodes: set[int | None]) -> list[_SwitchGroup]:
        """The devices of these NUMA nodes in PCI order, grouped by PCIe switch."""
        topology = self.topology
        left = [
            (pci_place(topology.machine, device).path, name, device)
            for name, device in topology.devices.items()
            if device.numa_node in numa_nodes
        ]
        left.sort(key=lambda each: (each[0], each[1]))
        below_one_switch = [{a.a, a.b} for a in topology.links if a.pci_class == "PIX"]
        groups = []
        while left:
            path, name, _ = left[0]
            same = [each for each in left if {name, each[1]} in below_one_switch or each[1] == name]
            left = [each for each in left if each not in same]
            nics = tuple(device for _, _, device in same if isinstance(device, Interface))
            gpus = tuple(device for _, _, device in same if isinstance(device, Accelerator))
            groups.append(_SwitchGroup(path[0] if path else "", nics, gpus))
        return groups

    @staticmethod
    def _node_width(groups: Sequence[_SwitchGroup]) -> float:
        inside = sum(group.slots * _SLOT + _PAD for group in groups)
        return max(_NUMA_WIDTH, inside + _PAD)

    def draw(self) -> Iterator[str]:
        machine = self.topology.machine
        yield _text(_MARGIN, 34, machine.host, "title")
        count = f"{machine.cpus.packages} × " if (machine.cpus.packages or 1) > 1 else ""
        product = f"{machine.product}, " if machine.product else ""
        subtitle = f"{product}{count}{machine.cpus.model}"
        yield _text(_MARGIN, 53, subtitle.replace("(R)", ""), "soft")
        left: float = _MARGIN
        for number, (node, groups) in enumerate(self.columns):
            width = self._node_width(groups)
            yield from self._draw_node(left, width, node, groups)
            if number + 1 < len(self.columns):
                yield from self._draw_between(left + width, node, self.columns[number + 1][0])
            left += width + _GAP
        if self.switches:
            yield from self._draw_switches()
        elif self.pairs:
            yield from self._draw_pairs()
        yield from self._draw_foot()

    def _draw_node(
        self, left: float, width: float, node: int | None, groups: Sequence[_SwitchGroup]
    ) -> Iterator[str]:
        yield _box(left, _TITLE, width, self.node_bottom - _TITLE, "node", 10)
        machine = self.topology.machine
        found = next((each for each in machine.numa if each.id == node), None)
        name = "NUMA unknown" if found is None else f"NUMA {found.id}"
        cpus = machine.cpus.allowed if found is None else found.cpus or "none"
        memory = machine.memory.total_bytes if found is None else found.memory_bytes
        yield _text(left + _PAD, _TITLE + 22, name, "name")
        size = "" if memory is None else f", {memory / (1 << 30):.0f} GiB"
        yield _text(left + _PAD, _TITLE + 40, f"CPUs {cpus}{size}", "soft")
        at = left + _PAD
        for number, group in enumerate(groups):
            if group.root and (number == 0 or groups[number - 1].root != group.root):
                same = [each for each in groups if each.root == group.root]
                group_width = sum(each.slots * _SLOT + _PAD for each in same) - _PAD
                top = _TITLE + _HEAD - 4
                yield _box(at - 5, top, group_width + 10, self.node_bottom - top - 6, "root", 8)
                yield _text(at, top - 4, group.root, "soft")
            yield from self._draw_group(at, group)
            at += group.slots * _SLOT + _PAD

    def _draw_group(self, left: float, group: _SwitchGroup) -> Iterator[str]:
        nic_top = _TITLE + _HEAD + _PAD
        if group.is_switch:
            height = self.node_bottom - nic_top - _PAD + 2
            yield _box(left, nic_top - 8, group.slots * _SLOT, height, "switch", 6)
        for number, nic in enumerate(group.nics):
            on = nic.state in ("ACTIVE", "up")
            mark = " bad" if nic.errors or (nic.ports and not on) else "" if on else " off"
            rate = "rate unknown" if nic.rate_gbps is None else f"{nic.rate_gbps:g} Gb/s"
            lines = [f"{nic.id} {nic.name}", rate if on else nic.state]
            if nic.errors:
                lines[1] += ", errors"
            tooltip = ", ".join(f"{name} {count}" for name, count in nic.errors.items())
            where = (left + number * _SLOT + 4, nic_top)
            style = f"nic{mark}"
            yield from _device(where, _NIC_HEIGHT, style, lines, f"{nic.pci_address} {tooltip}")
        for number, gpu in enumerate(group.gpus):
            x = left + number * _SLOT + 4
            self.centers[gpu.index] = x + _BOX / 2
            links = gpu.nvlinks or ()
            lost = sum(not link.active for link in links)
            name = gpu.name.removeprefix("NVIDIA ")
            lines = [f"GPU{gpu.index}", name if len(name) < 17 else f"{name[:15]}…"]
            lines.append(gpu.pci_address or "PCI unknown")
            if lost and lost < len(links):
                lines[2] = f"{lost} NVLink{'s' * (lost > 1)} down"
            bad = 0 < lost < len(links) or any(
                link.replay_errors or link.recovery_errors or link.crc_errors for link in links
            )
            style = "gpu bad" if bad else "gpu"
            yield from _device((x, self.gpu_top), _GPU_HEIGHT, style, lines, gpu.uuid or "")

    def _draw_between(self, x: float, a: int | None, b: int | None) -> Iterator[str]:
        if a is None or b is None:
            return
        nodes = {node.id: node for node in self.topology.machine.numa}
        y = _TITLE + 22
        yield f'<line class="between" x1="{x:g}" y1="{y}" x2="{x + _GAP:g}" y2="{y}"/>'
        distances = nodes[a].distances
        if distances is not None:
            far = str(distances[list(nodes).index(b)])
            yield _text(x + _GAP / 2, y - 6, far, "soft middle")

    def _draw_switches(self) -> Iterator[str]:
        top = self.node_bottom + 40
        ends = list(self.centers.values())
        left, right = min(ends) - _BOX / 2, max(ends) + _BOX / 2
        most = max(self._active(gpu) for gpu in self.topology.gpus)
        for gpu in self.topology.gpus:
            count = self._active(gpu)
            if not count:
                continue
            x, broken = self.centers[gpu.index], " broken" * (count < most)
            y = self.gpu_top + _GPU_HEIGHT
            yield f'<path class="wire{broken}" d="M{x:g} {y:g} V{top}"/>'
            yield _text(x + 6, top - 10, f"NV{count}", "soft")
        yield _box(left, top, right - left, 26, "gpu", 6)
        peers = {link.peer_pci for gpu in self.topology.gpus for link in gpu.nvlinks or ()}
        name = f"{len(peers - {None})} NVSwitches"
        yield _text((left + right) / 2, top + 17, name, "name middle")

    @staticmethod
    def _active(gpu: Accelerator) -> int:
        return sum(bool(link.active) and link.peer_kind == "switch" for link in gpu.nvlinks or ())

    def _draw_pairs(self) -> Iterator[str]:
        """An arc for each pair of GPUs. The farther apart the GPUs are, the deeper the arc."""
        order = sorted(self.centers, key=lambda index: self.centers[index])
        y = self.gpu_top + _GPU_HEIGHT
        most = max(link.nvlinks for link in self.pairs)
        for link in self.pairs:
            ends = sorted(order.index(int(each.removeprefix("GPU"))) for each in (link.a, link.b))
            # The arcs of one GPU start next to each other, so that they do not overlap.
            spread = 8 * (ends[1] - ends[0] - 1)
            x1, x2 = self.centers[order[ends[0]]] + 12 + spread, self.centers[order[ends[1]]]
            x2 -= 12 + spread
            depth = self.node_bottom + 10 + 30 * (ends[1] - ends[0])
            broken = " broken" * (link.nvlinks < most)
            curve = f"M{x1:g} {y} C{x1:g} {depth} {x2:g} {depth} {x2:g} {y}"
            yield f'<path class="wire{broken}" d="{curve}"/>'
            middle, low = (x1 + x2) / 2, y + 0.75 * (depth - y)
            yield _text(middle, low - 5, link.link_class, "soft middle")

    def _draw_foot(self) -> Iterator[str]:
        y = self.wires_bottom + 24
        if self.empty:
            nodes = ", ".join(map(str, self.empty))
            yield _text(_MARGIN, y, f"NUMA {nodes}: CPUs and memory, no GPU or NIC", "soft")
            y += 16
        legend = "dashed: PCIe root complex; grey: PCIe switch (PIX); number between nodes:"
        if any(group.root for _, groups in self.columns for group in groups):
            yield _text(_MARGIN, y, f"{legend} NUMA distance", "soft")
        elif reason := self.topology.machine.why("pci"):
            yield _text(_MARGIN, y, f"PCI paths unknown: {reason}", "soft")


def _device(
    where: tuple[float, float],
    height: float,
    style: str,
    lines: Sequence[str],
    tooltip: str,
) -> Iterator[str]:
    left, top = where
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
