"""Link classes from PCI paths, and tutti topo on recorded machines and on this one."""

import json
import os
import re
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hosts import hosts_missing, two_hosts
from tutti.cli import run_cli
from tutti.cli.topo import topology_lines
from tutti.machine.device_topology import PciLocation, Topology, pci_class
from tutti.machine.recording import read_machines
from tutti.machine.topology_svg import draw
from worlds import TUTTI, clean_environment, run_command

MACHINES = Path(__file__).parent / "machines"
HEALTHY = ("h100-nvswitch", "pcie-box", "vm-hidden-pcie", "cpu-only")
ALL = (*HEALTHY, "degraded-nvlink", "roce-cluster")


def topologies(name: str) -> list[Topology]:
    return [Topology(machine) for machine in read_machines(MACHINES / f"{name}.json")]


def topology(name: str) -> Topology:
    (only,) = topologies(name)
    return only


def classes_between_gpus(topology: Topology) -> dict[tuple[int, int], str]:
    return {
        (a.index, b.index): topology.link_class(f"GPU{a.index}", f"GPU{b.index}")
        for a, b in combinations(topology.gpus, 2)
    }


def near(topology: Topology) -> list[list[str]]:
    return [[nic.name for nic in topology.near_nics(gpu)] for gpu in topology.gpus]


# --- link classes --------------------------------------------------------------------------------

# root complex, root port, upstream port of a switch, downstream port, device
SWITCH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
ONE = (*SWITCH, "0000:17:00.0", "0000:18:00.0")
TWO = (*SWITCH, "0000:17:02.0", "0000:1b:00.0")
DEEPER = (*SWITCH, "0000:17:03.0", "0000:1c:00.0", "0000:1d:00.0", "0000:1e:00.0")
OTHER_PORT = ("pci0000:15", "0000:15:05.0", "0000:20:00.0")
OTHER_ROOT = ("pci0000:97", "0000:97:01.0", "0000:98:00.0")


@pytest.mark.parametrize(
    ("a", "b", "nodes", "link_class"),
    [
        (PciLocation(ONE, 0), PciLocation(TWO, 0), 2, "PIX"),
        (
            PciLocation(ONE, 0),
            PciLocation((*ONE[:-1], "0000:18:00.1"), 0),
            2,
            "PIX",
        ),  # two ports of a card
        (PciLocation(ONE, 0), PciLocation(DEEPER, 0), 2, "PXB"),
        (PciLocation(ONE, 0), PciLocation(OTHER_PORT, 0), 2, "PHB"),
        (PciLocation(ONE, 0), PciLocation(OTHER_ROOT, 0), 2, "NODE"),
        (PciLocation(ONE, 0), PciLocation(OTHER_ROOT, 1), 2, "SYS"),
        (PciLocation(ONE, None), PciLocation(OTHER_ROOT, None), 1, "NODE"),  # a single node
        (PciLocation(ONE, None), PciLocation(OTHER_ROOT, 1), 2, "?"),
        (PciLocation((), 0), PciLocation(OTHER_ROOT, 0), 2, "?"),
    ],
)
def test_the_class_of_two_devices_follows_from_their_pci_paths(
    a: PciLocation, b: PciLocation, nodes: int, link_class: str
) -> None:
    assert pci_class(a, b, nodes)[0] == link_class
    assert pci_class(b, a, nodes)[0] == link_class


@pytest.mark.parametrize("name", ALL)
def test_pci_classes_agree_with_the_classes_of_the_driver(name: str) -> None:
    for each in topologies(name):
        classes = {(link.a, link.b): link.pci_class for link in each.links}
        for peer in each.machine.peers:
            if peer.src < peer.dst:
                assert classes[f"GPU{peer.src}", f"GPU{peer.dst}"] == (peer.driver_class or "?")


# --- recorded machines -------------------------------------------------------------------------


def test_nvswitches_connect_all_gpus_and_each_gpu_has_its_own_nic() -> None:
    node = topology("h100-nvswitch")
    assert set(classes_between_gpus(node).values()) == {"NV18"}
    assert near(node) == [[f"mlx5_{index}"] for index in range(8)]
    assert [node.link_class(f"GPU{index}", f"NIC{index}") for index in range(8)] == ["PIX"] * 8
    assert {(link.pci_class, link.nvlink_gbs) for link in node.links if link.nvlinks} == {
        ("NODE", 478.116),  # 18 × 26.562
        ("SYS", 478.116),
    }


def test_a_machine_without_nvlink_has_switch_host_bridge_and_socket_classes() -> None:
    box = topology("pcie-box")
    assert classes_between_gpus(box) == {
        (0, 1): "PXB",
        (2, 3): "PHB",
        (0, 2): "SYS",
        (0, 3): "SYS",
        (1, 2): "SYS",
        (1, 3): "SYS",
    }
    assert near(box) == [["mlx5_0"], ["mlx5_0"], [], []]
    # GPU2 and GPU3 are on the socket of the two Ethernet ports, the RDMA port is on the other.
    assert [box.link_class("GPU2", nic.id) for nic in box.interfaces] == ["SYS", "NODE", "NODE"]


def test_an_inactive_nvlink_is_shown_at_its_gpu_only() -> None:
    node = topology("degraded-nvlink")
    for pair, link_class in classes_between_gpus(node).items():
        assert link_class == ("NV11" if 3 in pair else "NV12")
    text = "\n".join(topology_lines(node, 100))
    assert text.count("11 of 12 NVLinks active") == 1
    assert text.count("12 of 12 NVLinks active") == 7
    assert re.findall(r"link \d+:.*", text) == [
        "link 7: INACTIVE, errors: 1843 replay, 12 recovery, 52011 CRC"
    ]


def test_hidden_pci_paths_give_unknown_classes() -> None:
    vm = topology("vm-hidden-pcie")
    assert set(classes_between_gpus(vm).values()) == {"?"}
    assert near(vm) == [[], [], [], []]
    text = "\n".join(topology_lines(vm, 100))
    assert "NUMA nodes unknown: /sys/devices/system/node is empty or does not exist" in text
    assert "?     unknown: /sys does not show" in text
    assert "a virtual machine (kvm)" in text


def test_only_the_faulty_port_shows_a_low_rate_and_errors() -> None:
    first, second = topologies("roce-cluster")
    assert set(classes_between_gpus(first).values()) == {"NV6"}  # direct links, without a switch
    assert [nic.rate_gbps for nic in first.interfaces] == [400, 400, 400, 400, 25]
    assert [nic.rate_gbps for nic in second.interfaces] == [400, 400, 100, 400, 25]
    assert not any(nic.errors for nic in first.interfaces)
    assert [nic.name for nic in second.interfaces if nic.errors] == ["mlx5_2"]
    text = "\n".join(topology_lines(second, 1000))
    (line,) = re.findall(r"errors: .*", text)
    assert "symbol_error 48211" in line and "link_downed 4" in line


def test_a_machine_without_gpu_shows_cpus_numa_nodes_and_nics() -> None:
    vm = topology("cpu-only")
    rows = vm.to_json()
    assert [(row["kind"], row["cpus"]) for row in rows["devices"]] == [("cpu", "0-1")]
    assert [row["name"] for row in rows["nics"]] == ["eth0"]
    assert [row["id"] for row in rows["numa"]] == [0]
    assert "no GPU: NVML: NVML Shared Library Not Found" in list(topology_lines(vm, 80))


@pytest.mark.parametrize("name", ALL)
def test_the_text_fits_80_columns(name: str) -> None:
    for each in topologies(name):
        assert max(map(len, topology_lines(each, 80))) <= 80


# --- SVG -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_svg_has_every_device_once_and_marks_faulty_ones(name: str) -> None:
    hosts = topologies(name)
    svg_root = ElementTree.fromstring(draw(hosts))
    texts = [each.text or "" for each in svg_root.iter("{http://www.w3.org/2000/svg}text")]
    for host in hosts:
        for device in [f"GPU{gpu.index}" for gpu in host.gpus]:
            assert texts.count(device) == len(hosts)
        for nic in host.interfaces:
            assert texts.count(f"{nic.id} {nic.name}") == len(hosts)
    bad = [
        each
        for each in svg_root.iter("{http://www.w3.org/2000/svg}rect")
        if "bad" in each.attrib["class"].split()
    ]
    assert len(bad) == (0 if name in HEALTHY else 1)


def test_no_box_extends_beyond_the_svg() -> None:
    for name in ALL:
        svg_root = ElementTree.fromstring(draw(topologies(name)))
        width = float(svg_root.attrib["width"])
        for each in svg_root.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(each.get("x", 0)) + float(each.attrib["width"]) <= width


# --- the command -------------------------------------------------------------------------------


def test_a_recorded_copy_gives_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = MACHINES / "roce-cluster.json", tmp_path / "copy.json"
    svg = tmp_path / "topology.svg"
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    record = ["--record", str(copy), "--svg", str(svg)]
    assert run_cli(["topo", "--from", str(source), "--json", str(first), *record]) == 0
    assert "roce-1" in (out := capsys.readouterr().out) and "roce-2" in out
    assert run_cli(["topo", "--from", str(copy), "--json", str(second)]) == 0
    one, two = json.loads(first.read_text()), json.loads(second.read_text())
    assert one["schema"] == "tutti.topo/1" and one["environment"] and one["command"]
    for key in ("hosts", "devices", "links", "nics", "numa"):
        assert one[key] == two[key] and one[key]
    assert {row["host"] for row in one["links"]} == {"roce-1", "roce-2"}
    assert read_machines(copy) == read_machines(source)
    assert "prefers-color-scheme: dark" in svg.read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON, line 1"),
        ("[" * 100_000, "lists or objects are nested too deeply"),
        ("[3]", "the schema is missing"),
        ('{"schema": ["x"]}', 'the schema is ["x"], not "tutti.machine/1"'),
        ('{"schema": "tutti.machine/99"}', 'the schema is "tutti.machine/99", not'),
        ('{"schema": "tutti.machine/1", "machines": [3]}', "machine 0: the machine is 3"),
        ('{"schema": "tutti.machine/1", "machines": []}', "the file contains no machines"),
        (
            '{"schema": "tutti.machine/1", "machines": [{"host": "a", "gpus": 2}]}',
            "machine 0: gpus is not a field of Machine",
        ),
    ],
)
def test_an_invalid_recorded_file_is_refused_with_the_reason(
    content: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    file.write_text(content)
    for command in ("topo", "doctor"):
        assert run_cli([command, "--from", str(file)]) == 2
        error = capsys.readouterr().err
        assert f"--from {file}: {reason}" in error and "--record" in error
        assert error.count("\n") == 1


def test_topo_shows_this_machine_without_importing_torch(tmp_path: Path) -> None:
    probe = (
        "import sys; from tutti.cli import run_cli; code = run_cli(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    file = tmp_path / "this.json"
    done = run_command([sys.executable, "-c", probe, "topo", "--record", file])
    assert done.returncode == 0, done.stderr
    (machine,) = read_machines(file)
    assert machine.host == os.uname().nodename and machine.host in done.stdout
    assert machine.kernel == os.uname().release
    assert machine.cpus.allowed and machine.memory.total_bytes


@pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))
def test_under_a_launcher_rank_0_shows_every_host_once(
    tmp_path: Path,
) -> None:
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1"}
    common |= {"MASTER_PORT": "29411", "GROUP_WORLD_SIZE": "2"}
    with two_hosts() as hosts:
        ranks = [
            host.popen(
                [*TUTTI, "topo", "--record", str(tmp_path / "all.json")],
                env=clean_environment() | common | {"RANK": str(rank), "GROUP_RANK": str(rank)},
            )
            for rank, host in enumerate(hosts)
        ]
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    machines = read_machines(tmp_path / "all.json")
    assert [machine.host for machine in machines] == ["n1", "n2"]
    # Each host has the one interface of its network namespace, and loopback.
    assert [[nic.name for nic in each.nics] for each in machines] == [["eth0", "lo"]] * 2
    assert "n1:" in outputs[0][0] and "n2:" in outputs[0][0] and outputs[1][0] == ""
