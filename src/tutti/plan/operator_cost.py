"""Predicts the device time of one operator, and the host time to issue the operator.

A matrix product of m × n × k is computed in tiles. Each multiprocessor of a GPU computes one tile
at a time, so the tiles are computed in waves:

    seconds = waves × (2 × tile rows × tile columns × k / rate of a multiprocessor + wave_s)
    waves   = ⌈tiles / multiprocessors⌉

The matmul library chooses the tile size, and may split k over several multiprocessors. The
prediction uses the fastest choice. Small tiles have a lower rate, because they load more bytes per
FLOP. Every operator takes at least bytes / (memory × bandwidth) seconds, where `memory` is the
reachable share of the memory bandwidth, and in addition kernel_s. Operators other than matrix
products, convolutions and attention are limited by memory bandwidth.

The host needs host_forward_s or host_backward_s to issue an operator. If the host is slower than
the device, the device is idle. step_simulation.py simulates both.

The rates come from a calibration file, or are the defaults of the architecture
(operator_cost.toml).
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from tutti.plan.cluster_spec import Cluster
from tutti.plan.workload import Operation

# (rows, columns, rate relative to the largest tile)
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.94),
    (256, 64, 0.85),
    (64, 256, 0.85),
    (128, 64, 0.80),
    (64, 128, 0.80),
    (64, 64, 0.65),
)
_SPLITS = (1, 2, 4, 8)
_MIN_SPLIT_K = 512
# The effect of torch.compile on elementwise operators: (kernels after fusion) / (kernels before),
# and (seconds after fusion) / (seconds before). A fused chain of operators reads its inputs and
# writes its results only once.
_FUSED_KERNELS = 0.3
_FUSED_SECONDS = 0.25
# (Rate of float32 convolutions) / (rate of matrix products) on GPUs without TF32. The ratio is
# higher than with TF32, because fp32 units are slower than tensor cores and so need fewer bytes per
# second.
_SIMT_CONVOLUTION = 0.85
# A convolution counts as grouped or depthwise if it has fewer FLOPs than this per element of its
# inputs and outputs. A dense convolution of 32 channels has at least 32 FLOPs per element, and
# usually hundreds.
_GROUPED_FLOPS = 48
# Attention on short sequences has few tiles and a short inner loop. With s positions, its rate is s
# / (s + 192) of the rate for long sequences.
_ATTENTION_HALF_LENGTH = 192


def is_grouped_convolution(operation: Operation) -> bool:
    """Return whether a convolution counts as grouped or depthwise, by its FLOPs per element."""
    element = 2 if operation.dtype in ("bf16", "fp16") else 4
    few = operation.flops * element < _GROUPED_FLOPS * operation.bytes
    return operation.kind == "convolution" and few


@dataclass(frozen=True)
class Rates:
    """The rates that a device reaches, mostly as shares of its peak FLOP/s or memory bandwidth."""

    matmul_16bit: float
    """The share of the peak that bf16 and fp16 matrix products reach."""
    sustained: float
    """(Highest rate of 16-bit matrix products in training) / (rate of one large product). The ratio
    is below 1, because a GPU that computes for minutes runs at its power limit."""
    matmul_float32: float
    matmul_tf32: float
    convolution: float
    """(Rate of dense float32 convolutions) / (rate of the largest TF32 matrix products)."""
    convolution_16bit: float
    """The same ratio for bf16 and fp16, including cuDNN's conversion of NCHW tensors to NHWC."""
    convolution_backward: float
    """(Rate of a convolution's backward) / (rate of its forward)."""
    convolution_memory: float
    """The share of the memory bandwidth that grouped and depthwise convolutions reach."""
    memory: float
    """The share of the memory bandwidth that elementwise operators, norms and reductions reach."""
    attention_forward: float
    """The share of the peak that fused attention reaches."""
    attention_backward: float
    wave_s: float
    """Seconds that a wave of tiles takes in addition to the time of its FLOPs."""
    kernel_s: float
    """Seconds that an operator takes in addition to the time of its FLOPs and bytes."""
    host_forward_s: float
    """Seconds that the host needs to issue an operator in forward."""
    host_backward_s: float
    host_step_s: float
    """Seconds that the host needs once per step: the update, the batch, the training loop."""
    overlap_slowdown: float
    """Relative slowdown of the computation while a collective runs at the same time."""

    memory_curve: tuple[tuple[float, float], ...] = ()
    """Points (bytes, bandwidth / bandwidth of large operators). Small tensors fit into caches."""
    matmul_curve: tuple[tuple[float, float], ...] = ()
    """Only for CPUs: points (FLOPs, rate / rate of large matrix products)."""

    def changed(self, name: str, value: float) -> "Rates":
        """Return a copy of the rates in which one rate has a new value."""
        values: dict[str, Any] = {name: value}
        return replace(self, **values)

    def scaled(self, name: str, factor: float) -> "Rates":
        """Return a copy of the rates with one rate multiplied by a factor. Shares stay at most
        1."""
        value = getattr(self, name) * factor
        is_share = not name.endswith("_s") and name != "overlap_slowdown"
        return self.changed(name, min(1.0, value) if is_share else value)


def default_rates(cluster: Cluster) -> Rates:
    """Return the rates of a device without a calibration."""
    tables = _tables()
    values = dict(tables["default"]) | tables.get(cluster.architecture, {})
    return Rates(matmul_16bit=cluster.gemm_efficiency, **values)


@dataclass(frozen=True)
class OperatorCost:
    """Predicts the seconds of operators on the devices of a cluster."""

    cluster: Cluster
    rates: Rates
    _cache: dict[Operation, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, operation: Operation, fused: bool = False) -> float:
        """Return the device seconds of an operator. Collectives count as 0 seconds here.

        `fused` is whether torch.compile fuses elementwise operators.
        """
        found = self._cache.get(operation)
        if found is None:
            found = self._cache[operation] = self._predict(operation)
        return found * _FUSED_SECONDS if fused and operation.kind == "memory" else found

    def host_seconds(
        self, operations: Sequence[Operation], *, backward: bool, fused: bool = False
    ) -> float:
        """Return the seconds that the host needs to issue these operators."""
        one = self.rates.host_backward_s if backward else self.rates.host_forward_s
        count = float(len(operations))
        if fused:
            elementwise = sum(each.kind == "memory" for each in operations)
            count -= elementwise * (1 - _FUSED_KERNELS)
        return one * count

    def _predict(self, operation: Operation) -> float:
        if operation.kind == "collective":
            return 0.0
        rates, cluster = self.rates, self.cluster
        moving = operation.bytes / (cluster.memory_bandwidth * rates.memory)
        if operation.kind == "memory":
            return moving / _interpolate(rates.memory_curve, operation.bytes) + rates.kernel_s
        if operation.kind == "matmul":
            return max(self._matmul(operation), moving) + rates.kernel_s
        if operation.kind == "attention":
            return max(self._attention(operation), moving) + rates.kernel_s
        if operation.kind == "convolution":
            # By default, torch lets cuDNN compute float32 convolutions in TF32, if the GPU supports
            # it.
            dtype = "tf32" if operation.dtype == "float32" else operation.dtype
            narrow = operation.dtype in ("bf16", "fp16")
            share = rates.convolution_16bit if narrow else rates.convolution
            if cluster.is_cpu:
                share *= _interpolate(rates.matmul_curve, operation.flops)
            if dtype == "tf32" and "tf32" not in cluster.peak_flops and not cluster.is_cpu:
                share = _SIMT_CONVOLUTION
            elif "backward" in operation.name:
                share *= rates.convolution_backward
            computing = operation.flops / (self._matmul_rate(dtype) * share)
            if is_grouped_convolution(operation):
                moving = operation.bytes / (cluster.memory_bandwidth * rates.convolution_memory)
            return max(computing, moving) + rates.kernel_s
        raise AssertionError(f"operation of unknown kind {operation.kind}")

    def _matmul_rate(self, dtype: str) -> float:
        """Return the FLOP/s of the largest matrix products."""
        rates = self.rates
        if dtype == "tf32" and "tf32" in self.cluster.peak_flops:
            return self.cluster.peak("tf32") * rates.matmul_tf32
        if dtype in ("bf16", "fp16"):
            return self.cluster.peak(dtype) * rates.matmul_16bit
        return self.cluster.peak(dtype) * rates.matmul_float32

    def _matmul(self, operation: Operation) -> float:
        rate = self._matmul_rate(operation.dtype)
        if self.cluster.is_cpu:
            return operation.flops / (rate * _interpolate(self.rates.matmul_curve, operation.flops))
        limit = self.rates.sustained if operation.dtype in ("bf16", "fp16") else 1.0
        sustained = operation.flops / (rate * limit)
        if len(operation.shape) != 4:
            return sustained
        batch, m, n, k = operation.shape
        one, processors = rate / self.cluster.processors, self.cluster.processors
        best = math.inf
        for (rows, columns, relative), split in product(_TILES, _SPLITS):
            if split > 1 and k < split * _MIN_SPLIT_K:
                continue
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns) * split
            tile = 2.0 * rows * columns * math.ceil(k / split) / (one * relative)
            seconds = math.ceil(tiles / processors) * (tile + self.rates.wave_s)
            if split > 1:  # float32 partial sums are written once and read once
                partial = 8.0 * batch * m * n * split
                seconds += partial / (self.cluster.memory_bandwidth * self.rates.memory)
            best = min(best, seconds)
        return max(best, sustained)

    def _attention(self, operation: Operation) -> float:
        backward = "backward" in operation.name
        flops = operation.flops
        if len(operation.shape) < 6 or operation.shape[5]:
            # torch counts the FLOPs of all pairs of positions, but a causal kernel computes half.
            flops /= 2
        share = self.rates.attention_backward if backward else self.rates.attention_forward
        if len(operation.shape) >= 5:
            length = operation.shape[3]
            share *= length / (length + _ATTENTION_HALF_LENGTH)
            # A head of 64 elements loads more bytes per FLOP than a head of 128.
            share *= min(1.0, 0.7 + 0.3 * operation.shape[4] / 128)
        dtype = operation.dtype if operation.dtype in ("bf16", "fp16") else "float32"
        return flops / (self.cluster.peak(dtype) * share)


def rates_row(rates: Rates) -> dict[str, Any]:
    """Return the rates as a dict for JSON."""
    return {each.name: getattr(rates, each.name) for each in fields(rates)}


def _interpolate(curve: tuple[tuple[float, float], ...], x: float) -> float:
    """Return the value of a curve at x, interpolated linearly in log x. Without points: 1."""
    if not curve:
        return 1.0
    if x <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if x <= right:
            return low + (high - low) * math.log(x / left) / math.log(right / left)
    return curve[-1][1]


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
