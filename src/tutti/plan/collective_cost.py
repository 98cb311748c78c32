"""Predicts the time of a collective: with NCCL's cost model on GPUs, and an α–β model on CPUs.

NCCL chooses the algorithm and the protocol with the shortest predicted time:

    seconds = latency + bytes / algbw

The constants are in collective_cost.toml. algbw = message size / transfer time. `hop` is the
latency of one message inside a node, and `network hop` of one message between nodes. With n ranks
on N nodes, a ring all-reduce has 2 (n − 1) steps, and a ring all-gather or reduce-scatter has n − 1
steps.

    ring        latency = base + steps inside nodes × hop + steps between nodes × network hop
                algbw   = bus bandwidth × n / steps
    tree        latency = base + 2 ((ranks per node − 1) × hop + log2(N) × network hop)
                algbw   = 0.85 × 0.5 × 0.92 × bus bandwidth, at most the sum over NCCL's channels
    NVLS        latency = base + 25 µs (+ 2 log2(N) × network hop if N > 1)

With NVLS, the NVLink switch computes the sums. The protocol LL has the lowest latency and reaches
half of the bandwidth. LL128 reaches 92 % of the bandwidth, and Simple the whole bandwidth.

For a group inside a node, the bus bandwidth is the link bandwidth of one GPU. For a group over
several nodes, it is at most the sum of the NIC bandwidths of the group's GPUs on one node. The NICs
of the node's other GPUs are not counted, because other groups use them at the same time.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tutti.measure.collective_bandwidth import OPERATIONS
from tutti.plan.cluster_spec import Cluster

_PROTOCOLS = ("ll", "ll128", "simple")
_RING_SHARE = {"ll": 0.5, "ll128": 0.92, "simple": 1.0}
_CHANNELS = 8
# The share of a NIC's specified bandwidth that NCCL reaches: 46 of 50 GB/s with NDR InfiniBand.
_NETWORK_SHARE = 0.92
# algbw of NVLS / (link bandwidth × nvls_efficiency × (n − 1) / n), from nccl-tests of 8 H200.
_NVLS_SHARE = 0.8
# The latency of a message between two GPUs in seconds, and the share of the link bandwidth that the
# message reaches. Copies between two A100 reach 276 of 300 GB/s, between two H100 376 of 450 GB/s,
# and between two H200 396 of 450 GB/s.
_PAIR_LATENCY = {"intra": 10e-6, "inter": 20e-6}
_PAIR_SHARE = 0.85
# Seconds of one round of messages between CPU ranks, if there is no calibration.
_CPU_LATENCY = {"intra": 20e-6, "inter": 100e-6}


@dataclass(frozen=True)
class MeasuredCollective:
    """α and β of one collective on a calibrated machine, for one number of ranks.

    seconds = alpha × log2(ranks) + beta × bus factor × bytes, as in `tutti scale`.
    """

    op: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class CollectiveCost:
    """Predicts the seconds of collectives on a cluster."""

    cluster: Cluster
    measured: tuple[MeasuredCollective, ...] = ()
    """Measurements inside one node. They replace the cost model for groups inside a node."""
    latency_factor: float = 1.0
    bandwidth_factor: float = 1.0
    _cache: dict[tuple[str, float, int, int], float] = field(
        default_factory=dict, compare=False, repr=False
    )

    def seconds(self, op: str, size: float, members: int, nodes: int = 1) -> float:
        """Return the seconds of one collective.

        `size` is the message size in bytes as nccl-tests counts it (see collective_bandwidth.py).
        `members` is the number of ranks of the group on each of its `nodes`.
        """
        if members * nodes < 2 or op not in OPERATIONS:
            return 0.0
        key = (op, size, members, nodes)
        if key not in self._cache:
            self._cache[key] = self._predict(op, size, members, nodes)
        return self._cache[key]

    def _predict(self, op: str, size: float, members: int, nodes: int) -> float:
        if nodes == 1 and (found := self._measured(op, members)) is not None:
            rounds = 1.0 if op == "send_recv" else math.log2(members)
            moved = OPERATIONS[op].bus_factor(members) * size
            latency, transfer = found.alpha_s * rounds, found.beta_s_per_byte * moved
        elif op == "send_recv":
            latency, transfer = self._pair(size, nodes)
        elif self.cluster.is_cpu:
            latency, transfer = self._on_cpu(op, size, members, nodes)
        else:
            latency, transfer = self.choose(op, size, members, nodes)[1:]
        return latency * self.latency_factor + transfer / self.bandwidth_factor

    def _measured(self, op: str, ranks: int) -> MeasuredCollective | None:
        """Return the measurement of this or a similar collective, with the nearest rank count."""
        alike = {"reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}
        for name in (op, alike.get(op, "all_reduce"), "all_reduce"):
            rows = [row for row in self.measured if row.op == name]
            if rows:
                return min(rows, key=lambda row: abs(math.log2(row.ranks / ranks)))
        return None

    def _pair(self, size: float, nodes: int) -> tuple[float, float]:
        where = "intra" if nodes == 1 else "inter"
        if self.cluster.is_cpu:
            bandwidth = getattr(self.cluster, f"{where}_bandwidth")
            return _CPU_LATENCY[where], size / bandwidth
        if nodes == 1:
            bandwidth = self.cluster.intra_bandwidth * _PAIR_SHARE
        else:
            bandwidth = self.cluster.inter_bandwidth * _NETWORK_SHARE
        return _PAIR_LATENCY[where], size / bandwidth

    def _on_cpu(self, op: str, size: float, members: int, nodes: int) -> tuple[float, float]:
        latency = math.log2(members) * _CPU_LATENCY["intra"] if members > 1 else 0.0
        bandwidth = self.cluster.intra_bandwidth
        if nodes > 1:
            latency += math.log2(nodes) * _CPU_LATENCY["inter"]
            bandwidth = min(bandwidth, self.cluster.inter_bandwidth * members)
        return latency, OPERATIONS[op].bus_factor(members * nodes) * size / bandwidth

    def choose(self, op: str, size: float, members: int, nodes: int) -> tuple[str, float, float]:
        """Return (algorithm and protocol, latency, transfer seconds) of the fastest combination."""
        options = []
        for algorithm, protocol in product(("ring", "tree", "nvls"), _PROTOCOLS):
            predicted = self._tuner(op, size, members, nodes, algorithm, protocol)
            if predicted is not None:
                options.append((f"{algorithm} {protocol}", *predicted))
        return min(options, key=lambda option: option[1] + option[2])

    def _tuner(
        self, op: str, size: float, members: int, nodes: int, algorithm: str, protocol: str
    ) -> tuple[float, float] | None:
        """Return (latency, transfer seconds), or None if NCCL has no such combination."""
        constants = _constants()
        limits: Mapping[str, Any] = constants["architecture"].get(
            self.cluster.architecture, constants["architecture"]["Ampere"]
        )
        ranks, position = members * nodes, _PROTOCOLS.index(protocol)
        column = 0 if nodes == 1 else 1 if nodes == 2 else 2
        fast_links = self.cluster.intra_bandwidth > 60e9  # NVLink or xGMI
        hops = constants["hop_latency"]["nvlink" if fast_links else "pcie"]
        network = constants["hop_latency"]["network"]
        intra = self.cluster.intra_bandwidth / 1e9 * limits["link_share"]
        if members > 1:
            intra *= 1 - limits["ring_loss"] / members
        inter = self.cluster.inter_bandwidth / 1e9 * _NETWORK_SHARE * members
        bus = intra if nodes == 1 else inter if members == 1 else min(intra, inter)
        reduces_all = op in ("all_reduce", "reduce", "broadcast")
        steps = 2 * (ranks - 1) if op == "all_reduce" else ranks - 1
        channels = min(_CHANNELS, 2 * members) if nodes > 1 else 3 * _CHANNELS
        if protocol == "ll128" and not limits["ll128_channel"]:
            return None

        if algorithm == "ring":
            crossing = 0 if nodes == 1 else (2 if op == "all_reduce" else 1) * (nodes - 1)
            hop = hops["ring"][position]
            if nodes > 1:
                minimum = constants["network_overhead"]["us"]
                if protocol == "simple":
                    minimum *= constants["network_overhead"]["simple_factor"]
                hop = max(hop, minimum)
            latency = (steps - crossing) * hop + crossing * network["ring"][position]
            if nodes > 1 and protocol == "simple" and op == "all_reduce":
                latency *= constants["ring_simple_factor"]["several_nodes"]
            latency += constants["base_latency"]["ring"][position]
            bandwidth = bus * _RING_SHARE[protocol]
            if protocol == "ll":
                bandwidth = min(bandwidth, limits["ll"][column])
            elif protocol == "ll128":
                bandwidth = min(bandwidth, channels * limits["ll128_channel"])
            bandwidth *= ranks / steps
        elif algorithm == "tree":
            if not reduces_all or nodes == 1:  # inside a node, NCCL's tree is a chain
                return None
            latency = constants["base_latency"]["tree"][position]
            latency += 2 * (members - 1) * hops["tree"][position]
            latency += 2 * math.log2(nodes) * network["tree"][position]
            # With two nodes, half of the message crosses the network in each direction.
            bandwidth = (intra if nodes == 2 and members > 1 else bus) * _RING_SHARE["ll128"]
            if nodes == 2:
                bandwidth = min(bandwidth, inter * 1.7)
            bandwidth = min(bandwidth, channels * limits["tree_channel"][column]) * 0.85 * 0.5
            if protocol == "ll":
                bandwidth = min(bandwidth / 3.8, limits["ll"][column])
            elif protocol == "ll128":
                bandwidth = min(bandwidth * 0.9, channels * limits["ll128_channel"] * 0.5)
            table = constants["tree_correction"][protocol]
            bandwidth *= table[min(len(table) - 1, max(0, int(math.log2(max(size, 64) / 64))))]
        else:
            efficient = limits["nvls_efficiency"] and self.cluster.switched
            if op != "all_reduce" or protocol != "simple" or not efficient or members < 3:
                return None
            # NCCL's table has no base latency for NVLS. The base latency of a ring is used, because
            # the launch takes equally long.
            latency = hops["nvls"] + constants["base_latency"]["ring"][0]
            bandwidth = self.cluster.intra_bandwidth / 1e9 * limits["nvls_efficiency"]
            bandwidth *= (members - 1) / members * _NVLS_SHARE
            if nodes > 1:
                latency += 2 * math.log2(nodes) * network["nvls"]
                # Each node sends one copy of the sums, in both directions at the same time.
                bandwidth = min(bandwidth, inter * (0.7 if nodes == 2 else 0.42))
        return (latency + limits["overhead_us"]) * 1e-6, size / (bandwidth * 1e9)


@cache
def _constants() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
