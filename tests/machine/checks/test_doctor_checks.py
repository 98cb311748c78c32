"""Every check finds the fault that it is for, on a machine that is healthy but for that fault."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from cases import change, first, found, healthy, of_gpu, plain, recorded, with_variables

from tutti.machine.checks.checklist import CHECKS
from tutti.machine.checks.cluster import (
    ClockOffset,
    Connection,
    GpuCopy,
    MeasuredRate,
    ProbeResults,
    RankObservation,
)
from tutti.machine.checks.finding import Finding
from tutti.machine.environment import Xid
from tutti.machine.observation import Machine

GIB = 1 << 30


def two(machine: Machine, **changes: object) -> tuple[Machine, Machine]:
    """Two hosts, the second changed."""
    return replace(machine, host="n0"), change(replace(machine, host="n1"), **changes)


def ports(machine: Machine, **changes: object) -> Machine:
    return replace(machine, rdma=first(machine.rdma, lambda p: p.device == "mlx5_1", **changes))


def nics(machine: Machine, name: str, **changes: object) -> Machine:
    return replace(machine, nics=first(machine.nics, lambda nic: nic.name == name, **changes))


def pci(machine: Machine, kind: str, **changes: object) -> Machine:
    return replace(machine, pci=first(machine.pci, lambda each: each.kind == kind, **changes))


def bridge_above(machine: Machine, gpu: int) -> Machine:
    device = machine.pci_device(machine.accelerators[gpu].pci_address)
    assert device is not None
    above = device.path[-2]
    fits = lambda each: each.address == above  # noqa: E731
    return replace(machine, pci=first(machine.pci, fits, acs_redirect=True))


def translating(machine: Machine) -> Machine:
    return replace(machine, pci=tuple(replace(each, iommu_type="DMA-FQ") for each in machine.pci))


def nvlink(machine: Machine, gpu: int, link: int, **changes: object) -> Machine:
    links = machine.accelerators[gpu].nvlinks
    assert links is not None
    return of_gpu(machine, gpu, nvlinks=first(links, lambda each: each.index == link, **changes))


def conf(machine: Machine) -> Machine:
    said = {"/etc/nccl.conf": {"NCCL_DEBUG": "WARN"}}
    return replace(with_variables(machine, NCCL_DEBUG="VERSION"), nccl_conf=said)


def numa_full(machine: Machine) -> Machine:
    return replace(machine, numa=first(machine.numa, lambda node: node.id == 1, free_bytes=1 << 20))


def slow_nic(machine: Machine) -> Machine:
    """The default route goes over 1 Gbit/s, and 100 Gbit/s lie idle; no RDMA."""
    machine = replace(machine, rdma=())
    machine = nics(machine, "eno1", speed_mbps=1000, default_route=True)
    return nics(machine, "ens1np0", speed_mbps=100000, families=("ipv4",), rdma="")


def small_buffers(machine: Machine) -> Machine:
    machine = slow_nic(machine)
    return replace(machine, sysctls=machine.sysctls | {"net.ipv4.tcp_rmem": "4096 131072 262144"})


def seats_on(machine: Machine, *gpus: str | None) -> tuple[RankObservation, ...]:
    return tuple(RankObservation(rank, 0, machine, gpu) for rank, gpu in enumerate(gpus))


def rates(kind: str, *values: float, name: str = "rank:{}") -> tuple[MeasuredRate, ...]:
    return tuple(MeasuredRate(name.format(i), 0, kind, value) for i, value in enumerate(values))


Case = tuple[str, str, str, Callable[[], list[Finding]]]
CASES: list[Case] = [
    # status, check, scope, what is found on a machine like this
    ("warn", "env.misspelt", "machine", lambda: found(with_variables(plain(), NCCL_DEBG="WARN"))),
    (
        "warn",
        "env.renamed",
        "machine",
        lambda: found(with_variables(plain(), NCCL_BLOCKING_WAIT="0")),
    ),
    (
        "warn",
        "env.switched_off",
        "machine",
        lambda: found(with_variables(plain(), NCCL_P2P_DISABLE="1")),
    ),
    ("warn", "env.pinned", "machine", lambda: found(with_variables(plain(), NCCL_ALGO="Ring"))),
    (
        "warn",
        "env.debugging",
        "machine",
        lambda: found(with_variables(plain(), CUDA_LAUNCH_BLOCKING="1")),
    ),
    (
        "fail",
        "env.values",
        "machine",
        lambda: found(with_variables(plain(), NCCL_IB_DISABLE="false")),
    ),
    (
        "warn",
        "env.threads",
        "machine",
        lambda: found(with_variables(plain(), OMP_NUM_THREADS="64")),
    ),
    (
        "warn",
        "env.allocator",
        "machine",
        lambda: found(
            with_variables(
                plain(),
                PYTORCH_ALLOC_CONF="expandable_segments:True",
                TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1",
            )
        ),
    ),
    (
        "warn",
        "env.devices",
        "machine",
        lambda: found(with_variables(plain(), CUDA_DEVICE_MAX_CONNECTIONS="1")),
    ),
    ("warn", "env.files", "machine", lambda: found(conf(plain()))),
    (
        "fail",
        "versions.torch",
        "machine",
        lambda: found(replace(plain(), versions={"torch": "2.7.1"})),
    ),
    (
        "warn",
        "versions.torch",
        "machine",
        lambda: found(replace(plain(), versions={"torch": "3.0.0"})),
    ),
    (
        "fail",
        "versions.cuda",
        "machine",
        lambda: found(replace(healthy(), versions={"torch": "2.13.0+cpu"})),
    ),
    (
        "fail",
        "versions.driver",
        "machine",
        lambda: found(
            change(
                healthy(), versions={**healthy().versions, "cuda": "13.0", "cuda_driver": "12.4"}
            )
        ),
    ),
    (
        "warn",
        "versions.nccl",
        "machine",
        lambda: found(change(healthy(), versions={**healthy().versions, "nccl": "2.21.5"})),
    ),
    (
        "fail",
        "limits.memlock",
        "machine",
        lambda: found(change(healthy(), limits__memlock_bytes=8 << 20, limits__ipc_lock=False)),
    ),
    (
        "warn",
        "limits.open_files",
        "machine",
        lambda: found(change(plain(), limits__open_files=256)),
    ),
    ("warn", "limits.processes", "machine", lambda: found(change(plain(), limits__processes=100))),
    ("warn", "limits.cpus", "machine", lambda: found(change(healthy(), limits__cgroup_cpus=4.0))),
    (
        "warn",
        "limits.governor",
        "machine",
        lambda: found(change(recorded("pcie-box")[0], cpus__governors=("powersave",))),
    ),
    (
        "warn",
        "limits.memory",
        "machine",
        lambda: found(change(healthy(), limits__cgroup_memory_bytes=GIB)),
    ),
    ("fail", "memory.shm", "machine", lambda: found(change(plain(), limits__shm_bytes=64 << 20))),
    (
        "warn",
        "memory.available",
        "machine",
        lambda: found(change(plain(), memory__available_bytes=1 << 20)),
    ),
    ("warn", "memory.affinity", "gpu:7", lambda: found(change(healthy(), cpus__allowed="0-55"))),
    ("warn", "memory.numa", "machine", lambda: found(numa_full(healthy()))),
    (
        "fail",
        "gpus.count",
        "machine",
        lambda: found(replace(healthy(), accelerators=healthy().accelerators[:7])),
    ),
    (
        "fail",
        "gpus.visible",
        "machine",
        lambda: found(with_variables(healthy(), CUDA_VISIBLE_DEVICES="0,8")),
    ),
    ("warn", "gpus.alike", "gpu:2", lambda: found(of_gpu(healthy(), 2, name="NVIDIA A10"))),
    ("fail", "gpus.ecc", "gpu:1", lambda: found(of_gpu(healthy(), 1, ecc__volatile_uncorrected=1))),
    ("warn", "gpus.remap", "gpu:1", lambda: found(of_gpu(healthy(), 1, ecc__remap_pending=True))),
    (
        "fail",
        "gpus.recovery",
        "gpu:4",
        lambda: found(of_gpu(healthy(), 4, recovery_action="gpu_reset")),
    ),
    (
        "warn",
        "gpus.mode",
        "gpu:0",
        lambda: found(of_gpu(healthy(), 0, compute_mode="exclusive_process")),
    ),
    ("warn", "gpus.persistence", "machine", lambda: found(of_gpu(healthy(), 0, persistence=False))),
    ("warn", "gpus.processes", "gpu:6", lambda: found(of_gpu(healthy(), 6, processes=1))),
    (
        "fail",
        "gpus.xid",
        "gpu:3",
        lambda: found(
            replace(
                healthy(),
                xids=(Xid(str(healthy().accelerators[3].pci_address), 79, 60.0, "NVRM: Xid"),),
            )
        ),
    ),
    ("fail", "nvlink.active", "gpu:2", lambda: found(nvlink(healthy(), 2, 4, active=False))),
    ("fail", "nvlink.speed", "gpu:2", lambda: found(nvlink(healthy(), 2, 4, speed_mbs=13281))),
    ("warn", "nvlink.errors", "gpu:2", lambda: found(nvlink(healthy(), 2, 4, crc_errors=900))),
    (
        "fail",
        "nvlink.fabric",
        "gpu:0",
        lambda: found(of_gpu(healthy(), 0, fabric_state="in_progress")),
    ),
    (
        "fail",
        "nvlink.peers",
        "pair:0-1",
        lambda: found(
            replace(
                healthy(),
                peers=first(healthy().peers, lambda p: (p.src, p.dst) == (0, 1), read="TNS"),
            )
        ),
    ),
    ("fail", "pcie.width", "gpu:5", lambda: found(of_gpu(healthy(), 5, pcie__width=8))),
    (
        "warn",
        "pcie.generation",
        "gpu:5",
        lambda: found(of_gpu(healthy(), 5, pcie__generation=3, processes=1)),
    ),
    ("fail", "pcie.errors", "gpu:0", lambda: found(pci(healthy(), "gpu", uncorrectable_errors=2))),
    ("warn", "pcie.acs", "machine", lambda: found(bridge_above(healthy(), 3))),
    ("warn", "pcie.iommu", "machine", lambda: found(translating(recorded("pcie-box")[0]))),
    ("warn", "pcie.hidden", "machine", lambda: found(*recorded("vm-hidden-pcie"))),
    (
        "fail",
        "clocks.throttle",
        "gpu:1",
        lambda: found(of_gpu(healthy(), 1, clocks__throttle=("hw_slowdown",))),
    ),
    (
        "warn",
        "clocks.heat",
        "gpu:1",
        lambda: found(of_gpu(healthy(), 1, temperature_c=89, slowdown_c=90)),
    ),
    (
        "warn",
        "clocks.power",
        "gpu:1",
        lambda: found(of_gpu(healthy(), 1, power_limit_w=350.0, default_power_limit_w=700.0)),
    ),
    (
        "warn",
        "clocks.locked",
        "gpu:1",
        lambda: found(of_gpu(healthy(), 1, clocks__throttle=("application_clocks",))),
    ),
    (
        "warn",
        "clocks.skew",
        "world",
        lambda: found(
            *two(plain()), probes=ProbeResults(clock_offsets=(ClockOffset(1, 0.25, 1e-4),))
        ),
    ),
    (
        "fail",
        "network.ifname",
        "machine",
        lambda: found(with_variables(plain(), GLOO_SOCKET_IFNAME="ib9")),
    ),
    (
        "fail",
        "network.outside",
        "machine",
        lambda: found(*two(plain(), nics=tuple(n for n in plain().nics if n.kind == "loopback"))),
    ),
    ("warn", "network.choice", "nic:eno1", lambda: found(slow_nic(recorded("pcie-box")[0]))),
    (
        "warn",
        "network.mtu",
        "nic:eth0",
        lambda: found(*two(plain(), nics=nics(plain(), "eth0", mtu=9000).nics)),
    ),
    ("warn", "network.errors", "nic:eno3", lambda: found(nics(healthy(), "eno3", rx_errors=5000))),
    ("warn", "network.kernel", "machine", lambda: found(small_buffers(recorded("pcie-box")[0]))),
    (
        "warn",
        "network.name",
        "machine",
        lambda: found(
            *two(replace(plain(), name_resolution="outside"), name_resolution="loopback")
        ),
    ),
    (
        "fail",
        "network.calls",
        "link:0-1",
        lambda: found(
            *two(plain()),
            probes=ProbeResults(
                connections=(Connection(0, 1, "no answer"), Connection(1, 0, None))
            ),
        ),
    ),
    (
        "warn",
        "rdma.state",
        "nic:mlx5_1",
        lambda: found(ports(healthy(), state="DOWN", physical_state="Polling")),
    ),
    ("fail", "rdma.rate", "nic:mlx5_1", lambda: found(ports(healthy(), rate_gbps=200.0))),
    (
        "warn",
        "rdma.errors",
        "nic:mlx5_1",
        lambda: found(ports(healthy(), counters={"symbol_error": 9000})),
    ),
    (
        "fail",
        "rdma.gid",
        "nic:mlx5_1",
        lambda: found(ports(recorded("roce-cluster")[0], gid_types=("IB/RoCE v1",))),
    ),
    (
        "fail",
        "rdma.hca",
        "machine",
        lambda: found(with_variables(healthy(), NCCL_IB_HCA="mlx5_0,mlx4_0")),
    ),
    (
        "warn",
        "rdma.gpu_direct",
        "machine",
        lambda: found(
            replace(
                healthy(),
                kernel_modules=("nvidia",),
                versions={**healthy().versions, "kernel_module": "proprietary"},
            )
        ),
    ),
    (
        "fail",
        "agreement.versions",
        "machine",
        lambda: found(*two(plain()), replace(plain(), host="n2", versions={"torch": "2.12.1"})),
    ),
    (
        "warn",
        "agreement.variables",
        "machine",
        lambda: found(*two(plain(), variables={"NCCL_IB_SL": "3"}), replace(plain(), host="n2")),
    ),
    (
        "warn",
        "agreement.limits",
        "machine",
        lambda: found(*two(plain(), limits__open_files=4096), replace(plain(), host="n2")),
    ),
    (
        "fail",
        "agreement.hardware",
        "machine",
        lambda: found(*two(healthy(), rdma=healthy().rdma[:7]), replace(healthy(), host="n2")),
    ),
    (
        "fail",
        "agreement.gpus",
        "rank:1",
        lambda: found(healthy(), ranks=seats_on(healthy(), "GPU-a", "GPU-a")),
    ),
    (
        "fail",
        "active.compute",
        "rank:2",
        lambda: found(plain(), probes=ProbeResults(compute=rates("fp32", 10e9, 11e9, 4e9, 10e9))),
    ),
    (
        "warn",
        "active.memory",
        "rank:1",
        lambda: found(
            plain(), probes=ProbeResults(bandwidth=rates("copy", 10e9, 8e9, 10e9, 10.1e9))
        ),
    ),
    (
        "fail",
        "active.links",
        "link:0-1",
        lambda: found(
            plain(),
            ranks=seats_on(plain(), None, None, None),
            probes=ProbeResults(
                links=tuple(
                    MeasuredRate(name, 0, "loopback", 1e8 if name in ("0-1", "1-0") else 3e9)
                    for name in ("0-1", "1-0", "0-2", "2-0", "1-2", "2-1")
                )
            ),
        ),
    ),
    (
        "fail",
        "active.p2p",
        "pair:0-1",
        lambda: found(
            healthy(),
            probes=ProbeResults(
                copies=((GpuCopy(0, 1, "corrupt", 20.0), GpuCopy(1, 0, "ok", 20.0)),)
            ),
        ),
    ),
    (
        "fail",
        "active.collective",
        "rank:1",
        lambda: found(plain(), probes=ProbeResults(all_reduce=("", "3 of 10 elements are wrong"))),
    ),
]


@pytest.mark.parametrize(("status", "check", "scope", "judge"), CASES, ids=[c[1] for c in CASES])
def test_a_check_finds_its_fault(
    status: str, check: str, scope: str, judge: Callable[[], list[Finding]]
) -> None:
    said = [each for each in judge() if each.id == check]
    assert (status, scope) in {(each.status, each.scope) for each in said}, said
    assert all(each.observed and each.expected and each.cure for each in said)


def test_every_check_is_shown_to_find_its_fault() -> None:
    assert {case[1] for case in CASES} == {check.id for check in CHECKS}


# What some fault brings with it: the same fault seen from two sides.
TOGETHER = {
    "gpus.alike": {"env.devices"},  # GPUs that differ are numbered by speed
    "network.kernel": {"network.choice"},
    "pcie.generation": {"gpus.processes"},
    "agreement.gpus": {"env.threads"},
    "active.links": {"limits.cpus"},
}


@pytest.mark.parametrize(
    ("check", "judge"), [(c[1], c[3]) for c in CASES], ids=[c[1] for c in CASES]
)
def test_a_fault_is_told_by_its_check_alone(check: str, judge: Callable[[], list[Finding]]) -> None:
    others = {each.id for each in judge()} - {check} - TOGETHER.get(check, set())
    # Two hosts that differ in a fault also differ: that is agreement's to say.
    assert {each for each in others if not each.startswith("agreement.")} == set()
