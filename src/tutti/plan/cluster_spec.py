"""Describes the GPUs (or CPU ranks) for which a plan is made: memory, links, price and power.

A cluster comes from one of three sources:

- a number and a name, such as `16xH100` or `4xcpu`: the figures are the usual values of this
  accelerator;
- a file of `tutti topo --record`: the figures are those of the recorded machine;
- a file cluster.toml, which names the accelerator and can replace each figure:

      gpus = "64xH100"
      per_node = 8
      memory_gb = 80             # of one GPU, 1e9 bytes
      intra_gbs = 450            # scale-up link of one GPU, one direction, 1e9 bytes/s
      inter_gbs = 50             # network of one GPU, one direction, 1e9 bytes/s
      price_per_gpu_hour = 2.5   # in any currency
      watts = 700                # of one GPU

Every figure that is not given explicitly is listed in `Cluster.assumptions`.
"""

import math
import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from tutti.machine.cpu_numa import allowed_cpus, cpu_quota, read_limits
from tutti.machine.hardware_catalogue import AcceleratorSpec, accelerator, link
from tutti.machine.recording import Machine, read_machines
from tutti.machine.sysfs import SysFiles
from tutti.parallel.layout import AXES, Layout
from tutti.world.errors import UsageError, closest_name

# Assumed figures of one server CPU core without a calibration: two AVX2 units, each of which
# computes a fused multiply-add of 8 float32 values per cycle at 2.5 GHz, and the core's share of
# the memory bandwidth.
_CORE_FLOPS = 2 * 2 * 8 * 2.5e9
_CORE_MEMORY_BANDWIDTH = 8e9
_CPU_LINK_BANDWIDTH = 5e9  # between ranks of one host, through shared memory
_CPU_NETWORK_BANDWIDTH = 1.25e9  # 10 Gbit/s between hosts
# The keys that a cluster.toml must have if its accelerator is not in the catalogue.
_NEEDED = ("bf16_tflops", "fp32_tflops", "memory_gb", "memory_tbs", "intra_gbs")
_NO_NVLINK_BANDWIDTH = 20e9  # between GPUs without NVLink: they share PCIe 4 links to the host


@dataclass(frozen=True)
class Cluster:
    """Identical accelerators on identical nodes. Bandwidths are bytes/s in one direction."""

    accelerator: str
    """The name in cluster_spec.toml, the name that the driver reports, or `cpu`."""
    gpus: int
    """The number of GPUs. If the accelerator is `cpu`: the number of ranks."""
    per_node: int
    architecture: str
    """Volta, Ampere, Hopper, Blackwell, CDNA3, CDNA4 or cpu."""
    memory_bytes: int
    """Memory of one GPU. For CPU ranks: the share of the host memory for one rank."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """Peak FLOP/s without sparsity, by dtype: bf16, fp16, float32, tf32, float64."""
    memory_bandwidth: float
    processors: int
    """Multiprocessors of one GPU, or cores of one CPU rank."""
    gemm_efficiency: float
    """The largest share of the peak that a matrix product reaches."""
    intra_bandwidth: float
    """Bandwidth from one GPU to the other GPUs of its node."""
    inter_bandwidth: float
    """Network bandwidth of one GPU."""
    device: str = ""
    """A name that the driver reports. The hardware catalogue finds the accelerator by this name."""
    switched: bool = True
    """Whether the GPUs of a node are connected by a switch such as NVSwitch."""
    price_per_gpu_hour: float | None = None
    watts: float | None = None
    assumptions: tuple[str, ...] = field(default=())
    """Figures that are assumed: usual values of the accelerator, not known for this cluster."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UsageError(f"--gpus must be at least 1, got {self.gpus}")
        if self.per_node < 1:
            raise UsageError(f"--per-node must be at least 1, got {self.per_node}")
        if self.gpus > self.per_node and self.gpus % self.per_node:
            low = self.gpus // self.per_node * self.per_node
            raise UsageError(
                f"--gpus {self.gpus} is not a multiple of --per-node {self.per_node}: use "
                f"{low} or {low + self.per_node} GPUs, or a different --per-node"
            )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return math.ceil(self.gpus / self.per_node)

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks compute on CPUs."""
        return self.architecture == "cpu"

    def with_gpus(self, gpus: int) -> "Cluster":
        """Return the same cluster with a different number of GPUs."""
        return replace(self, gpus=gpus)

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of one GPU for a dtype."""
        fallback = self.peak_flops["float32"]
        return self.peak_flops.get(dtype, fallback / 2 if dtype == "float64" else fallback)

    def members_and_nodes(
        self, layout: Layout, axis: str, order: Sequence[str] = AXES
    ) -> tuple[int, int]:
        """Return (ranks per node, nodes) of a process group along a mesh axis.

        Consecutive ranks are on one node. `order` lists the mesh axes, outermost first. The axis
        `data` combines dp and shard.
        """
        size = layout.data_ranks if axis == "data" else layout.axes[axis]
        inner = order[order.index("shard" if axis == "data" else axis) + 1 :]
        stride = math.prod(layout.axes[name] for name in inner)
        return spread_over_nodes(size, stride, self.per_node)


def spread_over_nodes(size: int, stride: int, per_node: int) -> tuple[int, int]:
    """Return (ranks per node, nodes) of a group of `size` ranks.

    `stride` is the difference between two neighbouring rank numbers of the group.
    """
    if size == 1:
        return 1, 1
    members = max(1, min(size, per_node // stride)) if stride <= per_node else 1
    while size % members:  # assume fewer ranks per node, so that all nodes have equally many
        members -= 1
    return members, size // members


def sizes_between(first: int, last: int) -> list[int]:
    """Return the GPU counts from `first` to at most `last`, each twice the previous one."""
    return [first * 2**power for power in range(int(math.log2(last / first)) + 1)]


def limit_power(cluster: Cluster, watts: float) -> Cluster:
    """Return the cluster with a different power limit per GPU.

    Large matrix products run at the power limit. Power grows faster than the clock rate, because a
    higher clock rate also needs a higher voltage. The throughput is assumed to be proportional to
    watts^0.75. This exponent fits the difference between an H100 PCIe (350 W) and an H100 SXM (700
    W).
    """
    if cluster.watts is None or watts >= cluster.watts:
        return replace(cluster, watts=watts)
    slower = cluster.gemm_efficiency * (watts / cluster.watts) ** 0.75
    return replace(cluster, watts=watts, gemm_efficiency=slower)


def parse_gpus(text: str, per_node: int | None = None) -> Cluster:
    """Return the cluster for a text such as `16xH100`, `8xA100-40GB` or `4xcpu`."""
    count, name = _split(text)
    return named_cluster(name, count, per_node)


def _split(text: str) -> tuple[int, str]:
    match = re.fullmatch(r"([0-9]+)\s*[xX×*]\s*(\S+)", text.strip())
    if match is None:
        raise UsageError(
            f"--gpus {text!r} must be a number and a name, as in 16xH100: use one of "
            f"{', '.join(known_accelerators())} or cpu"
        )
    return int(match[1]), match[2]


def named_cluster(name: str, gpus: int, per_node: int | None = None) -> Cluster:
    """Return a cluster of the named accelerator, with its usual figures."""
    if name.lower() == "cpu":
        cores = min(len(allowed_cpus()), cpu_quota() or sys.maxsize)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = read_limits(SysFiles()).cgroup_memory_bytes
        if isinstance(limit, int):
            memory = min(memory, limit)
        return _cpu_cluster(gpus, per_node or gpus, cores, memory)
    known = {entry.lower(): entry for entry in known_accelerators()}
    entry = known.get(name.lower().replace("_", "-").removeprefix("nvidia-"))
    if entry is None:
        near = closest_name(name.upper(), known_accelerators())
        raise UsageError(
            f"--gpus: accelerator {name!r} is not in the catalogue: use "
            + (f"{near}, or " if near else f"one of {', '.join(known_accelerators())} or cpu, or ")
            + "describe the accelerator in a file for --cluster, with the keys gpus, "
            + ", ".join(_NEEDED)
        )
    return _from_entry(_defaults()[entry], gpus, per_node)


def cluster_of_device(device: str, gpus: int) -> Cluster:
    """Return a cluster of the accelerator that the driver reports as `device`.

    Some accelerators exist with two memory sizes. The memory size in the device name selects the
    catalogue entry.
    """
    entries = [entry for entry in _defaults().values() if _same_model(entry["device"], device)]
    if not entries:
        raise UsageError(
            f"the accelerator {device!r} is not in the catalogue, so its peak rates are unknown: "
            "describe the accelerator in a file for tutti plan --cluster, with the keys gpus, "
            + ", ".join(_NEEDED)
        )
    same_size = [entry for entry in entries if f"{entry['memory_gb']:g}GB" in device]
    return _from_entry((same_size or entries)[0], gpus, None)


def read_cluster(path: Path, per_node: int | None = None) -> Cluster:
    """Return the cluster that a cluster.toml describes."""
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"--cluster {path}: the file does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--cluster {path}: {error}") from None
    numbers = {
        "memory_gb": ("memory_bytes", 1e9),
        "memory_tbs": ("memory_bandwidth", 1e12),
        "intra_gbs": ("intra_bandwidth", 1e9),
        "inter_gbs": ("inter_bandwidth", 1e9),
        "price_per_gpu_hour": ("price_per_gpu_hour", 1.0),
        "watts": ("watts", 1.0),
        "bf16_tflops": ("", 1e12),
        "fp32_tflops": ("", 1e12),
        "gemm_efficiency": ("gemm_efficiency", 1.0),
    }
    allowed = ["gpus", "per_node", *numbers]
    for key, value in content.items():
        if key not in allowed:
            near = closest_name(key, allowed) or ", ".join(allowed)
            raise UsageError(f"--cluster {path}: the key {key!r} is unknown: use {near}")
        if key in numbers and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise UsageError(f"--cluster {path}: {key} must be a positive number, got {value!r}")
    if not isinstance(content.get("gpus"), str):
        raise UsageError(f'--cluster {path} needs the key gpus, such as gpus = "16xH100"')
    nodes = content.get("per_node")
    if nodes is not None and (type(nodes) is not int or nodes < 1):
        raise UsageError(
            f"--cluster {path}: per_node must be a whole number of at least 1, got {nodes!r}"
        )
    listed = not all(key in content for key in _NEEDED)
    try:
        if listed:
            cluster = parse_gpus(content["gpus"], per_node or nodes)
        else:
            cluster = _unlisted_cluster(content, per_node or nodes)
    except UsageError as error:
        raise UsageError(f"--cluster {path}: {error}") from None
    changed: dict[str, Any] = {}
    for key, (name, unit) in numbers.items():
        if key in content and name:
            changed[name] = content[key] * unit
    if "memory_bytes" in changed:
        changed["memory_bytes"] = int(changed["memory_bytes"])
    peaks = dict(cluster.peak_flops)
    if "bf16_tflops" in content:
        peaks["bf16"] = peaks["fp16"] = content["bf16_tflops"] * 1e12
    if "fp32_tflops" in content:
        peaks["float32"] = content["fp32_tflops"] * 1e12
    if "watts" in content and "gemm_efficiency" not in content:
        changed["gemm_efficiency"] = limit_power(cluster, content["watts"]).gemm_efficiency
    kept = _without(cluster.assumptions, content)
    return replace(cluster, peak_flops=peaks, assumptions=kept, **changed)


def _unlisted_cluster(content: Mapping[str, Any], per_node: int | None) -> Cluster:
    """Return the cluster of a cluster.toml whose accelerator may be missing in the catalogue."""
    count, name = _split(content["gpus"])
    if name.lower() in {entry.lower() for entry in (*known_accelerators(), "cpu")}:
        return named_cluster(name, count, per_node)
    return Cluster(
        accelerator=name,
        gpus=count,
        per_node=per_node or min(8, count),
        architecture="Ampere",  # the oldest architecture with bf16: its rates are conservative
        memory_bytes=0,
        peak_flops={"float64": content["fp32_tflops"] * 1e12 / 2},
        memory_bandwidth=0.0,
        processors=108,
        gemm_efficiency=0.75,
        intra_bandwidth=0.0,
        inter_bandwidth=12.5e9,
        switched=False,
        assumptions=("inter_gbs 12.5 of one GPU between nodes", "gemm_efficiency 0.75"),
    )


def _without(assumptions: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """Return the assumptions whose figures are not in `known`."""
    return tuple(text for text in assumptions if text.split(" ")[0] not in known)


def read_machine_cluster(path: Path, gpus: int | None = None) -> Cluster:
    """Return the cluster that a file of `tutti topo --record` describes.

    All machines in the file must have the same accelerators. `gpus` is the number of GPUs in the
    plan. If it is None, the plan uses all GPUs of the recorded machines.
    """
    try:
        machines = read_machines(path)
    except FileNotFoundError:
        raise UsageError(f"--machine {path}: the file does not exist") from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--machine {path}: {error}: record the machine with tutti topo --record {path}"
        ) from None
    kinds = {(tuple(each.name for each in machine.accelerators)) for machine in machines}
    if len(kinds) > 1:
        raise UsageError(
            f"--machine {path} describes machines with different accelerators: record machines "
            "with the same accelerators, or use --cluster cluster.toml"
        )
    machine = machines[0]
    if not machine.accelerators:
        cores = machine.cpus.cores or machine.cpus.threads or 1
        ranks = gpus or 1
        return _cpu_cluster(ranks, ranks, cores, machine.memory.total_bytes or 8 * 2**30)
    per_node = len(machine.accelerators)
    count = gpus or per_node * len(machines)
    return _from_machine(path, machine, count, min(per_node, count))


def _from_machine(path: Path, machine: Machine, gpus: int, per_node: int) -> Cluster:
    device = machine.accelerators[0]
    entry = next((e for e in _defaults().values() if _same_model(e["device"], device.name)), None)
    if entry is None:
        raise UsageError(
            f"--machine {path}: the accelerator {device.name!r} is not in the catalogue: describe "
            f"it in a file for --cluster, with the keys gpus, {', '.join(_NEEDED)}"
        )
    cluster = _from_entry(entry, gpus, per_node)
    changed: dict[str, Any] = {"accelerator": device.name, "device": device.name}
    known = []
    if device.memory_bytes:
        changed["memory_bytes"] = device.memory_bytes
        known.append("memory_gb")
    if device.power_limit_w:
        cluster = limit_power(cluster, device.power_limit_w)
        known.append("watts")
    if device.nvlinks is not None:
        active = device.active_nvlinks
        speeds = [each.speed_mbs * 1e6 for each in active if each.speed_mbs]
        if speeds:
            changed["intra_bandwidth"] = sum(speeds)
        elif not active:
            pcie = link(_spec(entry["device"]).host_link)
            changed["intra_bandwidth"] = (pcie.achieved_gbs or pcie.gbs) * 1e9 if pcie else 12e9
        changed["switched"] = any(each.peer_kind == "switch" for each in active)
        known.append("intra_gbs")
    rates = [port.rate_gbps for port in machine.rdma if port.state == "ACTIVE" and port.rate_gbps]
    if rates:
        changed["inter_bandwidth"] = sum(rates) / 8 * 1e9 / len(machine.accelerators)
        known.append("inter_gbs")
    return replace(cluster, assumptions=_without(cluster.assumptions, known), **changed)


def _same_model(device: str, name: str) -> bool:
    first, second = accelerator(device), accelerator(name)
    return first is not None and first is second


def _from_entry(entry: Mapping[str, Any], gpus: int, per_node: int | None) -> Cluster:
    spec = _spec(entry["device"])
    node = per_node or min(entry.get("per_node", 8), gpus)
    memory_tbs = entry.get("memory_tbs") or spec.memory_tbs
    assert memory_tbs is not None, f"cluster_spec.toml: {entry['name']} has no memory bandwidth"
    intra = spec.scale_up_gbs * 1e9 if spec.scale_up_gbs else _NO_NVLINK_BANDWIDTH
    # By default, torch does not use TF32 for matrix products, so float32 matrix products run on the
    # fp32 units.
    peaks = {"bf16": spec.bf16, "fp16": spec.bf16, "float32": spec.fp32, "float64": spec.fp32 / 2}
    if spec.tf32 is not None:
        peaks["tf32"] = spec.tf32
    assumptions = [
        f"memory_gb {entry['memory_gb']:g} of one {entry['name']} (data sheet)",
        f"intra_gbs {intra / 1e9:g} between the GPUs of a node"
        + (f" ({spec.scale_up})" if spec.scale_up else " (PCIe through the host)"),
        f"watts {entry['watts']:g} of one GPU (power limit)",
    ]
    if gpus > node:
        assumptions.insert(2, f"inter_gbs {entry['nic_gbs']:g} of one GPU between nodes")
    if per_node is None and gpus > node:
        assumptions.append(f"per_node {node} GPUs")
    return Cluster(
        accelerator=entry["name"],
        gpus=gpus,
        per_node=node,
        architecture=entry["architecture"],
        memory_bytes=int(entry["memory_gb"] * 1e9),
        peak_flops={name: tflops * 1e12 for name, tflops in peaks.items()},
        memory_bandwidth=memory_tbs * 1e12,
        processors=entry["processors"],
        gemm_efficiency=entry["gemm_efficiency"],
        intra_bandwidth=intra,
        inter_bandwidth=entry["nic_gbs"] * 1e9,
        device=entry["device"],
        switched=spec.scale_up is not None and not spec.scale_up.startswith("xGMI"),
        watts=entry["watts"],
        assumptions=tuple(assumptions),
    )


def _cpu_cluster(ranks: int, per_node: int, cores: int, memory: int) -> Cluster:
    """Return a cluster of CPU ranks. The ranks of a host share its cores and memory equally."""
    share = max(1, cores // per_node)
    return Cluster(
        accelerator="cpu",
        gpus=ranks,
        per_node=per_node,
        architecture="cpu",
        memory_bytes=memory // per_node,
        # On a CPU without matrix units, bf16 is not faster than float32.
        peak_flops=dict.fromkeys(("bf16", "fp16", "float32"), share * _CORE_FLOPS)
        | {"float64": share * _CORE_FLOPS / 2},
        memory_bandwidth=share * _CORE_MEMORY_BANDWIDTH,
        processors=share,
        gemm_efficiency=0.7,
        intra_bandwidth=_CPU_LINK_BANDWIDTH,
        inter_bandwidth=_CPU_NETWORK_BANDWIDTH,
        switched=False,
        assumptions=(
            f"cores: {share} per rank, with {_CORE_FLOPS / 1e9:g} GFLOP/s per core (to measure "
            "the cores, use tutti plan --calibrate)",
        ),
    )


def _spec(device: str) -> AcceleratorSpec:
    spec = accelerator(device)
    assert spec is not None, f"cluster_spec.toml: {device} is not in hardware_catalogue.toml"
    return spec


def known_accelerators() -> list[str]:
    """Return the names of all accelerators in cluster_spec.toml."""
    return list(_defaults())


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {entry["name"]: entry for entry in content["accelerator"]}


def cluster_row(cluster: Cluster) -> dict[str, Any]:
    """Return the value of `cluster` in the JSON."""
    row = {each.name: getattr(cluster, each.name) for each in fields(cluster)}
    return row | {"peak_flops": dict(cluster.peak_flops), "nodes": cluster.nodes}
