"""Every check reports the fault it is for, on a machine that is healthy except for that fault."""

import re
from dataclasses import replace

import pytest
from check_cases import (
    HEALTHY,
    PLAIN,
    change,
    change_first,
    change_gpu,
    cluster,
    nccl_ranks,
    problems,
    recorded,
    with_variables,
)

from tutti.machine.checks.checklist import CHECKS
from tutti.machine.checks.cluster import (
    ClockOffset,
    Cluster,
    Connection,
    GpuCopy,
    MeasuredRate,
    RankObservation,
)
from tutti.machine.environment import Xid
from tutti.machine.recording import Machine

PCIE_BOX = recorded("pcie-box")[0]
ROCE = recorded("roce-cluster")[0]


def env(machine: Machine = PLAIN, **variables: str) -> Cluster:
    return cluster(with_variables(machine, **variables))


def plain(**changes: object) -> Cluster:
    return cluster(change(PLAIN, **changes))


def healthy(**changes: object) -> Cluster:
    return cluster(change(HEALTHY, **changes))


def gpu(index: int, **changes: object) -> Cluster:
    return cluster(change_gpu(HEALTHY, index, **changes))


def nvlink(gpu_index: int, link: int, **changes: object) -> Cluster:
    links = HEALTHY.accelerators[gpu_index].nvlinks
    assert links is not None
    return gpu(gpu_index, nvlinks=change_first(links, lambda each: each.index == link, **changes))


def versions(machine: Machine, **changed: str) -> Cluster:
    return cluster(replace(machine, versions={**machine.versions, **changed}))


def two_hosts(machine: Machine, **changes: object) -> tuple[Machine, Machine]:
    """Return two hosts, of which the second is changed."""
    return replace(machine, host="n0"), change(replace(machine, host="n1"), **changes)


def three_hosts(machine: Machine, **changes: object) -> Cluster:
    """Return a cluster whose second host is changed."""
    return cluster(*two_hosts(machine, **changes), replace(machine, host="n2"))


def rdma_port(machine: Machine = HEALTHY, **changes: object) -> Cluster:
    ports = change_first(machine.rdma, lambda port: port.device == "mlx5_1", **changes)
    return cluster(replace(machine, rdma=ports))


def nic(machine: Machine, name: str, **changes: object) -> Machine:
    nics = change_first(machine.nics, lambda each: each.name == name, **changes)
    return replace(machine, nics=nics)


def gpu_pci_errors() -> Cluster:
    devices = change_first(HEALTHY.pci, lambda each: each.kind == "gpu", uncorrectable_errors=2)
    return healthy(pci=devices)


def acs_above_gpu(index: int) -> Cluster:
    device = HEALTHY.pci_device(HEALTHY.accelerators[index].pci_address)
    assert device is not None
    bridge = device.path[-2]
    return healthy(
        pci=change_first(HEALTHY.pci, lambda each: each.address == bridge, acs_redirect=True)
    )


def translating_iommu() -> Cluster:
    pci = tuple(replace(each, iommu_type="DMA-FQ") for each in PCIE_BOX.pci)
    return cluster(replace(PCIE_BOX, pci=pci))


def nccl_conf_differs() -> Cluster:
    machine = with_variables(PLAIN, NCCL_DEBUG="VERSION")
    return cluster(replace(machine, nccl_conf={"/etc/nccl.conf": {"NCCL_DEBUG": "WARN"}}))


def slow_default_route() -> Machine:
    """Return a machine without RDMA: the default route has 1 Gbit/s, an unused NIC 100 Gbit/s."""
    machine = nic(replace(PCIE_BOX, rdma=()), "eno1", speed_mbps=1000, default_route=True)
    return nic(machine, "ens1np0", speed_mbps=100000, families=("ipv4",), rdma="")


def small_tcp_buffers() -> Cluster:
    machine = slow_default_route()
    sysctls = machine.sysctls | {"net.ipv4.tcp_rmem": "4096 131072 262144"}
    return cluster(replace(machine, sysctls=sysctls))


def ranks_on(machine: Machine, *gpus: str | None) -> tuple[RankObservation, ...]:
    return tuple(RankObservation(rank, 0, machine, uuid) for rank, uuid in enumerate(gpus))


def rates(kind: str, *values: float) -> tuple[MeasuredRate, ...]:
    return tuple(MeasuredRate(f"rank:{i}", 0, kind, value) for i, value in enumerate(values))


LINKS = tuple(
    MeasuredRate(name, 0, "loopback", 1e8 if name in ("0-1", "1-0") else 3e9)
    for name in ("0-1", "1-0", "0-2", "2-0", "1-2", "2-1")
)
XID_79 = Xid(str(HEALTHY.accelerators[3].pci_address), 79, 60.0, "NVRM: Xid")
REGISTER_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", REGISTER_HOOK: "1"}
NO_NVLINK_READ = change_first(HEALTHY.peers, lambda p: (p.src, p.dst) == (0, 1), read="TNS")
NO_NVLINKS = re.sub("<nvlink .*/>", "", nccl_ranks()[0].topology)
SLOW_RINGS = nccl_ranks()[0].graphs.replace('typeintra="NVL"', 'typeintra="SYS"')
FULL_NODE = change_first(HEALTHY.numa, lambda node: node.id == 1, free_bytes=1 << 20)
LOOPBACK_ONLY = tuple(each for each in PLAIN.nics if each.kind == "loopback")

# Status, check and scope of the expected finding; the cluster with the fault.
CASES = [
    ("warn", "env.misspelt", "machine", env(NCCL_DEBG="WARN")),
    ("warn", "env.renamed", "machine", env(NCCL_BLOCKING_WAIT="0")),
    ("warn", "env.switched_off", "machine", env(NCCL_P2P_DISABLE="1")),
    ("warn", "env.pinned", "machine", env(NCCL_ALGO="Ring")),
    ("warn", "env.debugging", "machine", env(CUDA_LAUNCH_BLOCKING="1")),
    ("fail", "env.values", "machine", env(NCCL_IB_DISABLE="false")),
    ("warn", "env.threads", "machine", env(OMP_NUM_THREADS="64")),
    ("warn", "env.allocator", "machine", env(**ALLOCATOR)),
    ("warn", "env.devices", "machine", env(CUDA_DEVICE_MAX_CONNECTIONS="1")),
    ("warn", "env.files", "machine", nccl_conf_differs()),
    ("fail", "versions.torch", "machine", versions(PLAIN, torch="2.7.1")),
    ("warn", "versions.torch", "machine", versions(PLAIN, torch="3.0.0")),
    ("fail", "versions.cuda", "machine", healthy(versions={"torch": "2.13.0+cpu"})),
    ("fail", "versions.driver", "machine", versions(HEALTHY, cuda="13.0", cuda_driver="12.4")),
    ("warn", "versions.nccl", "machine", versions(HEALTHY, nccl="2.21.5")),
    (
        *("fail", "limits.memlock", "machine"),
        healthy(limits__memlock_bytes=8 << 20, limits__ipc_lock=False),
    ),
    ("warn", "limits.open_files", "machine", plain(limits__open_files=256)),
    ("warn", "limits.processes", "machine", plain(limits__processes=100)),
    ("warn", "limits.cpus", "machine", healthy(limits__cgroup_cpus=4.0)),
    (
        *("warn", "limits.governor", "machine"),
        cluster(change(PCIE_BOX, cpus__governors=("powersave",))),
    ),
    ("warn", "limits.memory", "machine", healthy(limits__cgroup_memory_bytes=1 << 30)),
    ("fail", "memory.shm", "machine", plain(limits__shm_bytes=64 << 20)),
    ("warn", "memory.available", "machine", plain(memory__available_bytes=1 << 20)),
    ("warn", "memory.affinity", "gpu:7", healthy(cpus__allowed="0-55")),
    ("warn", "memory.numa", "machine", healthy(numa=FULL_NODE)),
    ("fail", "gpus.count", "machine", healthy(accelerators=HEALTHY.accelerators[:7])),
    ("fail", "gpus.visible", "machine", env(HEALTHY, CUDA_VISIBLE_DEVICES="0,8")),
    ("warn", "gpus.alike", "gpu:2", gpu(2, name="NVIDIA A10")),
    ("fail", "gpus.ecc", "gpu:1", gpu(1, ecc__volatile_uncorrected=1)),
    ("warn", "gpus.remap", "gpu:1", gpu(1, ecc__remap_pending=True)),
    ("fail", "gpus.recovery", "gpu:4", gpu(4, recovery_action="gpu_reset")),
    ("warn", "gpus.mode", "gpu:0", gpu(0, compute_mode="exclusive_process")),
    ("warn", "gpus.persistence", "machine", gpu(0, persistence=False)),
    ("warn", "gpus.processes", "gpu:6", gpu(6, processes=1)),
    ("fail", "gpus.xid", "gpu:3", healthy(xids=(XID_79,))),
    ("fail", "nvlink.active", "gpu:2", nvlink(2, 4, active=False)),
    ("fail", "nvlink.speed", "gpu:2", nvlink(2, 4, speed_mbs=13281)),
    ("warn", "nvlink.errors", "gpu:2", nvlink(2, 4, crc_errors=900)),
    ("fail", "nvlink.fabric", "gpu:0", gpu(0, fabric_state="in_progress")),
    ("fail", "nvlink.peers", "pair:0-1", healthy(peers=NO_NVLINK_READ)),
    ("fail", "pcie.width", "gpu:5", gpu(5, pcie__width=8)),
    ("warn", "pcie.generation", "gpu:5", gpu(5, pcie__generation=3, processes=1)),
    ("fail", "pcie.errors", "gpu:0", gpu_pci_errors()),
    ("warn", "pcie.acs", "machine", acs_above_gpu(3)),
    ("warn", "pcie.iommu", "machine", translating_iommu()),
    ("warn", "pcie.hidden", "machine", cluster(*recorded("vm-hidden-pcie"))),
    ("fail", "clocks.throttle", "gpu:1", gpu(1, clocks__throttle=("hw_slowdown",))),
    ("warn", "clocks.heat", "gpu:1", gpu(1, temperature_c=89, slowdown_c=90)),
    ("warn", "clocks.power", "gpu:1", gpu(1, power_limit_w=350.0, default_power_limit_w=700.0)),
    ("warn", "clocks.locked", "gpu:1", gpu(1, clocks__throttle=("application_clocks",))),
    (
        *("warn", "clocks.skew", "world"),
        cluster(*two_hosts(PLAIN), clock_offsets=(ClockOffset(1, 0.25, 1e-4),)),
    ),
    ("fail", "network.ifname", "machine", env(GLOO_SOCKET_IFNAME="ib9")),
    ("fail", "network.outside", "machine", cluster(*two_hosts(PLAIN, nics=LOOPBACK_ONLY))),
    ("warn", "network.choice", "nic:eno1", cluster(slow_default_route())),
    (
        *("warn", "network.mtu", "nic:eth0"),
        cluster(*two_hosts(PLAIN, nics=nic(PLAIN, "eth0", mtu=9000).nics)),
    ),
    ("warn", "network.errors", "nic:eno3", cluster(nic(HEALTHY, "eno3", rx_errors=5000))),
    ("warn", "network.kernel", "machine", small_tcp_buffers()),
    (
        *("warn", "network.name", "machine"),
        cluster(*two_hosts(replace(PLAIN, name_resolution="outside"), name_resolution="loopback")),
    ),
    (
        *("fail", "network.calls", "link:0-1"),
        cluster(
            *two_hosts(PLAIN), connections=(Connection(0, 1, "timeout"), Connection(1, 0, None))
        ),
    ),
    ("warn", "rdma.state", "nic:mlx5_1", rdma_port(state="DOWN", physical_state="Polling")),
    ("fail", "rdma.rate", "nic:mlx5_1", rdma_port(rate_gbps=200.0)),
    ("warn", "rdma.errors", "nic:mlx5_1", rdma_port(counters={"symbol_error": 9000})),
    ("fail", "rdma.gid", "nic:mlx5_1", rdma_port(ROCE, gid_types=("IB/RoCE v1",))),
    ("fail", "rdma.hca", "machine", env(HEALTHY, NCCL_IB_HCA="mlx5_0,mlx4_0")),
    (
        *("warn", "rdma.gpu_direct", "machine"),
        healthy(
            kernel_modules=("nvidia",),
            versions={**HEALTHY.versions, "kernel_module": "proprietary"},
        ),
    ),
    ("fail", "agreement.versions", "machine", three_hosts(PLAIN, versions={"torch": "2.12.1"})),
    ("warn", "agreement.variables", "machine", three_hosts(PLAIN, variables={"NCCL_IB_SL": "3"})),
    ("warn", "agreement.limits", "machine", three_hosts(PLAIN, limits__open_files=4096)),
    ("fail", "agreement.hardware", "machine", three_hosts(HEALTHY, rdma=HEALTHY.rdma[:7])),
    (
        *("fail", "agreement.gpus", "rank:1"),
        cluster(HEALTHY, ranks=ranks_on(HEALTHY, "GPU-a", "GPU-a")),
    ),
    (
        *("fail", "active.compute", "rank:2"),
        cluster(PLAIN, compute=rates("fp32", 10e9, 11e9, 4e9, 10e9)),
    ),
    (
        *("warn", "active.memory", "rank:1"),
        cluster(PLAIN, bandwidth=rates("copy", 10e9, 8e9, 10e9, 10.1e9)),
    ),
    (
        *("fail", "active.links", "link:0-1"),
        cluster(PLAIN, ranks=ranks_on(PLAIN, None, None, None), links=LINKS),
    ),
    (
        *("fail", "active.p2p", "pair:0-1"),
        cluster(HEALTHY, copies=((GpuCopy(0, 1, "corrupt", 20.0), GpuCopy(1, 0, "ok", 20.0)),)),
    ),
    (
        *("fail", "active.collective", "rank:1"),
        cluster(PLAIN, all_reduce=("", "3 of 10 elements are wrong")),
    ),
    (
        *("fail", "nccl.start", "rank:0"),
        cluster(HEALTHY, nccl=nccl_ranks(stage="init", error="no progress for 90 s", log=())),
    ),
    (
        *("fail", "nccl.transport", "pair:0-1"),
        cluster(HEALTHY, nccl=nccl_ranks(transport="SHM/direct/direct")),
    ),
    ("fail", "nccl.topology", "pair:0-1", cluster(HEALTHY, nccl=nccl_ranks(topology=NO_NVLINKS))),
    ("fail", "nccl.channels", "machine", cluster(HEALTHY, nccl=nccl_ranks(graphs=SLOW_RINGS))),
]
IDS = [case[1] for case in CASES]


@pytest.mark.parametrize(("status", "check", "scope", "checked"), CASES, ids=IDS)
def test_a_check_reports_its_fault_with_expectation_and_cure(
    status: str, check: str, scope: str, checked: Cluster
) -> None:
    found = [each for each in problems(checked) if each.id == check]
    assert (status, scope) in {(each.status, each.scope) for each in found}, found
    assert all(each.observed and each.expected and each.cure for each in found)


def test_every_check_has_a_case() -> None:
    assert set(IDS) == {check.id for check in CHECKS}


# Some faults are visible to a second check.
ALSO_REPORTED_BY = {
    "gpus.alike": {"env.devices"},  # CUDA numbers different GPUs by speed
    "network.kernel": {"network.choice"},
    "pcie.generation": {"gpus.processes"},
    "agreement.gpus": {"env.threads"},
    "active.links": {"limits.cpus"},
}


@pytest.mark.parametrize(("check", "checked"), [(c[1], c[3]) for c in CASES], ids=IDS)
def test_no_other_check_reports_the_fault(check: str, checked: Cluster) -> None:
    others = {each.id for each in problems(checked)} - {check} - ALSO_REPORTED_BY.get(check, set())
    # A fault of one host is also a difference between hosts, which agreement.* reports.
    assert {each for each in others if not each.startswith("agreement.")} == set()
