"""Machine: observing this host, writing and reading files; unknown fields have a reason."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tutti.machine.recording import Machine, observe, read_machines

HERE = Path(__file__).parent
FILES = sorted((HERE / "machines").glob("*.json"))


def unknown_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields that are None."""
    if value is None:
        yield path
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            name = f"{path}.{field.name}" if path else field.name
            yield from unknown_paths(getattr(value, field.name), name)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from unknown_paths(each, f"{path}[{number}]")


def unexplained(machine: Machine) -> list[str]:
    return [path for path in unknown_paths(machine) if machine.reason_unknown(path) is None]


# --- observing ---------------------------------------------------------------------------------


def test_every_unknown_field_of_this_machine_has_a_reason() -> None:
    assert unexplained(observe()) == []


def test_without_sys_and_proc_everything_is_unknown_with_a_reason(tmp_path: Path) -> None:
    machine = observe(tmp_path)
    assert unexplained(machine) == []
    assert machine.pci == () and machine.nics == () and machine.numa == ()
    assert machine.reason_unknown("nics") == "/sys/class/net is empty or does not exist"
    assert (
        machine.reason_unknown("memory.total_bytes") == "/proc/meminfo: No such file or directory"
    )


def test_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("HF_TOKEN", "NVIDIA_API_KEY", "TORCH_HUB_TOKEN", "UCX_PASSWORD"):
        monkeypatch.setenv(name, "hidden-value")
    machine = observe()
    assert machine.variables["NCCL_DEBUG"] == "INFO"
    assert "hidden-value" not in json.dumps(dataclasses.asdict(machine))


class FakeSys:
    """Writes the files and links that the kernel shows in /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str | bytes) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def pci(self, path: str, files: dict[str, str | bytes]) -> None:
        """A PCI device in the device tree, and the link to it in bus/pci/devices."""
        where = f"sys/devices/{path}"
        for name, text in files.items():
            self.file(f"{where}/{name}", text)
        self.link(f"sys/bus/pci/devices/{path.rpartition('/')[2]}", where)


def bridge_with_acs(control: int) -> bytes:
    """Return 4096 bytes of configuration space with AER at byte 0x100 and ACS at byte 0x140."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x140 << 20 | 2 << 16 | 0x0001).to_bytes(4, "little")
    config[0x140:0x144] = (0 << 20 | 1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(config)


@pytest.fixture
def box(tmp_path: Path) -> Machine:
    """Return a root port with ACS redirect, and below it a switch with a GPU and a RoCE NIC."""
    files = FakeSys(tmp_path)
    root = "pci0000:15/0000:15:01.0"
    switch = f"{root}/0000:16:00.0"
    plain = {"class": "0x060400", "vendor": "0x1000", "numa_node": "1"}
    files.pci(root, plain | {"config": bridge_with_acs(0b11101)})
    files.pci(switch, plain | {"config": bridge_with_acs(0)})
    files.pci(f"{switch}/0000:17:00.0", plain | {"config": b"\0" * 64})  # without root
    files.pci(f"{switch}/0000:17:02.0", plain | {"config": bridge_with_acs(0)})
    gpu = f"{switch}/0000:17:02.0/0000:1b:00.0"
    link = {"current_link_speed": "2.5 GT/s PCIe", "current_link_width": "8"}
    link |= {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
    aer = {"aer_dev_correctable": "RxErr 3\nTOTAL_ERR_COR 3", "aer_dev_nonfatal": "X 1"}
    aer |= {"aer_dev_fatal": "TOTAL_ERR_FATAL 2"}
    files.pci(gpu, {"class": "0x030200", "vendor": "0x10de", "numa_node": "1"} | link | aer)
    files.file(f"sys/devices/{gpu}/local_cpulist", "8-15")
    files.link(f"sys/devices/{gpu}/iommu_group", "sys/kernel/iommu_groups/7")
    files.file("sys/kernel/iommu_groups/7/type", "DMA-FQ")
    nic = f"{switch}/0000:17:00.0/0000:18:00.0"
    files.pci(nic, {"class": "0x020000", "vendor": "0x15b3", "numa_node": "-1"})
    card = f"sys/devices/{nic}"
    files.link(f"{card}/driver", "sys/bus/pci/drivers/mlx5_core")
    files.file("sys/bus/pci/drivers/mlx5_core/bind", "")
    for name, text in {"mtu": "9000", "operstate": "up", "speed": "100000", "type": "1"}.items():
        files.file(f"{card}/net/ens1/{name}", text)
    files.link(f"{card}/net/ens1/device", card)
    files.link("sys/class/net/ens1", f"{card}/net/ens1")
    port = f"{card}/infiniband/mlx5_0/ports/1"
    port_files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "Ethernet"}
    port_files |= {"rate": "100 Gb/sec (4X EDR)", "counters/symbol_error": "17"}
    port_files |= {"counters/port_xmit_data": "99", "hw_counters/out_of_sequence": "4"}
    port_files |= {"gid_attrs/types/0": "IB/RoCE v1", "gid_attrs/types/1": "RoCE v2"}
    for name, text in port_files.items():
        files.file(f"{port}/{name}", text)
    files.link(f"{card}/infiniband/mlx5_0/device", card)
    files.link("sys/class/infiniband/mlx5_0", f"{card}/infiniband/mlx5_0")
    files.file("sys/devices/virtual/net/bond0/mtu", "9000")
    files.file("sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4")
    files.link("sys/class/net/bond0", "sys/devices/virtual/net/bond0")
    files.file("proc/modules", "nvidia_peermem 16384 0 - Live 0x0\next4 1 0 - Live 0x0")
    files.file("proc/cmdline", "root=/dev/sda1 intel_iommu=on password=x iommu=pt")
    files.file("etc/nccl.conf", "# site\nNCCL_IB_HCA = mlx5\nNCCL_DEBUG=WARN")
    return observe(tmp_path)


def test_pci_paths_links_errors_and_iommu_are_read_from_sys(box: Machine) -> None:
    gpu = box.pci_device("0000:1b:00.0")
    assert gpu is not None and gpu.kind == "gpu"
    assert gpu.path == (
        *("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:02.0"),
        "0000:1b:00.0",
    )
    assert gpu.link is not None
    assert dataclasses.astuple(gpu.link) == (1, 8, 5, 16)
    assert (gpu.numa_node, gpu.local_cpus, gpu.iommu_type) == (1, "8-15", "DMA-FQ")
    assert (gpu.correctable_errors, gpu.uncorrectable_errors) == (3, 2)
    assert unexplained(box) == []


def test_acs_redirect_is_read_from_the_configuration_space_of_bridges(box: Machine) -> None:
    found = {each.address: each.acs_redirect for each in box.pci if each.kind == "bridge"}
    assert found == {
        "0000:15:01.0": True,
        "0000:16:00.0": False,
        "0000:17:00.0": None,
        "0000:17:02.0": False,
    }
    hidden = [number for number, each in enumerate(box.pci) if each.address == "0000:17:00.0"]
    assert "only root" in (box.reason_unknown(f"pci[{hidden[0]}].acs_redirect") or "")


def test_nics_and_bonds_are_distinguished_and_nics_have_their_rdma_device(box: Machine) -> None:
    nics = {nic.name: nic for nic in box.nics}
    assert nics["bond0"].kind == "bond" and nics["ens1"].kind == "physical"
    assert (nics["ens1"].rdma, nics["ens1"].driver, nics["ens1"].speed_mbps) == (
        *("mlx5_0", "mlx5_core"),
        100000,
    )
    assert nics["ens1"].pci_address == "0000:18:00.0" and nics["ens1"].numa_node is None
    (port,) = box.rdma
    assert (port.state, port.physical_state, port.rate_gbps) == ("ACTIVE", "LinkUp", 100)
    assert port.netdev == "ens1" and port.gid_types == ("IB/RoCE v1", "RoCE v2")
    assert port.counters == {"symbol_error": 17, "out_of_sequence": 4}


def test_only_listed_kernel_settings_are_kept(box: Machine) -> None:
    assert box.kernel_modules == ("nvidia_peermem",)
    assert box.kernel_parameters == ("intel_iommu=on", "iommu=pt")
    assert box.nccl_conf == {"/etc/nccl.conf": {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"}}


# --- NVML --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_nvml(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return this machine, with a fake NVML library that reports two GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    source = HERE / "fake_nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    code = "import dataclasses, json; from tutti.machine.recording import observe; "
    code += "print(json.dumps(dataclasses.asdict(observe())))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Machine.from_json(json.loads(done.stdout))


def test_gpus_are_read_through_the_nvml_bindings(with_nvml: Machine) -> None:
    first, second = with_nvml.accelerators
    assert [gpu.name for gpu in (first, second)] == ["Stand-in GPU"] * 2
    assert (first.pci_address, second.pci_address) == ("0000:1b:00.0", "0001:43:00.0")
    assert first.memory_bytes == 80 << 30 and first.used_bytes == 1 << 30
    assert first.power_limit_w == 700.0 and first.mig is False and first.persistence is True
    assert first.clocks.throttle == ("idle", "hw_thermal")
    assert first.ecc.volatile_uncorrected == 5 and first.ecc.remap_pending is True
    assert with_nvml.versions["driver"] == "580.00" and with_nvml.versions["cuda_driver"] == "13.0"


def test_the_list_of_nvlinks_ends_at_the_first_invalid_index(with_nvml: Machine) -> None:
    first, second = with_nvml.accelerators
    assert first.nvlinks is not None and len(first.nvlinks) == 4
    assert [link.active for link in first.nvlinks] == [True, True, True, False]
    assert {link.peer_pci for link in first.nvlinks if link.active} == {"0001:43:00.0"}
    assert first.nvlinks[2].crc_errors == 2 and first.nvlinks[0].speed_mbs == 26562
    assert second.nvlinks == ()
    (there, back) = with_nvml.peers
    assert (there.read, back.read, there.driver_class) == ("OK", "CNS", "SYS")


def test_a_value_that_nvml_does_not_report_is_unknown_with_its_error(with_nvml: Machine) -> None:
    assert with_nvml.accelerators[0].temperature_c is None
    assert (
        with_nvml.reason_unknown("accelerators[0].temperature_c")
        == "NVML Temperature: Not Supported"
    )
    assert with_nvml.accelerators[0].compute_mode is None
    assert "Function Not Found" in (with_nvml.reason_unknown("accelerators[0].compute_mode") or "")
    assert unexplained(with_nvml) == []


# --- recording ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_machine_is_the_same_after_writing_and_reading(file: Path) -> None:
    for machine in read_machines(file):
        assert Machine.from_json(json.loads(json.dumps(dataclasses.asdict(machine)))) == machine
        assert unexplained(machine) == []
    assert "written by hand" in json.loads(file.read_text())["note"]


def test_this_machine_is_the_same_after_writing_and_reading() -> None:
    machine = observe()
    assert Machine.from_json(json.loads(json.dumps(dataclasses.asdict(machine)))) == machine


def test_the_recorded_files_are_the_output_of_build_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE / "machines")
    import build_machines

    monkeypatch.setattr(build_machines, "HERE", tmp_path)
    build_machines.main()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        file.name: file.read_text() for file in FILES
    }


def recorded() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(FILES[0].read_text())["machines"][0]
    return values


def test_a_field_missing_in_the_file_is_unknown() -> None:
    values = recorded()
    del values["limits"]["memlock_bytes"]
    machine = Machine.from_json(values)
    assert machine.limits.memlock_bytes is None
    assert machine.reason_unknown("limits.memlock_bytes") == "not in the recorded file"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("limits", "open_files"), "many", 'limits.open_files is "many", not int'),
        (("memory", "total_bytes"), True, "memory.total_bytes is true, not int"),
        (("nics", 0, "kind"), "wifi", "nics[0].kind is \"wifi\", not 'physical' or"),
        (("cpus",), None, "cpus is null, not an object"),
        (("numa", 0, "colour"), "red", "numa[0].colour is not a field of NumaNode"),
    ],
)
def test_a_wrong_value_in_a_file_is_reported_with_its_path(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    values = recorded()
    place: Any = values
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ValueError) as error:
        Machine.from_json(values)
    assert message in str(error.value)
