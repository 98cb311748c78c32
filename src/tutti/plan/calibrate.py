"""Measures the rates of this machine for `tutti plan --calibrate FILE`, in less than a minute.

Every rank measures matrix products, attention, convolutions, copies and the host time per operator
on its own device. All ranks measure at the same time, because CPU ranks share memory bandwidth and
caches. Collectives are measured between all ranks. A case is one operator with one shape. Each
round measures every case once, so that a change of the clock speed affects all cases alike. A
rank's time for a case is the median over the rounds. The result for a case is the median of these
times over the ranks.

The rates of operator_cost.py are fitted to the times. The residual of each fit is recorded, and it
widens the uncertainty band of predictions. The calibration file also contains the machine and the
software versions. `read_calibration` refuses a file with a different schema or for a different
accelerator. Different software versions cause a warning.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.comm.collectives import all_gather, all_reduce, barrier, reduce_scatter
from tutti.machine.environment import describe_environment
from tutti.measure.collective_bandwidth import OPERATIONS, fit_alpha_beta
from tutti.measure.spread import relative_mad
from tutti.measure.timing import time_total
from tutti.models import GPT, GPTConfig
from tutti.plan.calibration_file import write_calibration
from tutti.plan.cluster_spec import Cluster, cluster_of_device, named_cluster
from tutti.plan.collective_cost import MeasuredCollective
from tutti.plan.operator_cost import (
    OperatorCost,
    Rates,
    default_rates,
    is_grouped_convolution,
)
from tutti.plan.step_simulation import Calibration
from tutti.plan.workload import Operation
from tutti.world.errors import UsageError
from tutti.world.world import World

_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}

BUDGET = 40.0  # maximum seconds of measurements, without the time to start the ranks
_MIN_ROUNDS, _MAX_ROUNDS = 3, 25
_MIN_SAMPLE = 2e-3  # minimum seconds of one sample on a GPU. Shorter calls are repeated.
_MIN_SAMPLE_CPU = 5e-4
_HOST_LAYERS = 8
# The lowest value of `Rates.sustained` after a calibration. Published rates were measured with one
# matrix product alone. During a calibration the GPU is busy for most of a minute, so the measured
# rates are closer to the rates in training, and the correction for sustained load is smaller.
_SUSTAINED = 0.93


class Case(NamedTuple):
    """A call to measure, and the operator that the call runs."""

    operation: Operation
    call: Callable[[], Any]
    executions: int = 1
    """The number of times that one call runs the operator."""


class Shapes(NamedTuple):
    """The sizes of the operators to measure."""

    matmuls: tuple[tuple[int, int, int], ...]
    """(m, n, k) of matrix products. Each is measured in bf16 and in float32."""
    copies: tuple[int, ...]
    """Numbers of elements of copies and elementwise operators."""
    attention: tuple[tuple[int, int, int, int], ...]
    """(batch, heads, length, head dim)."""
    convolutions: tuple[tuple[int, int, int, int, int, int], ...]
    """(batch, input channels, output channels, height and width, kernel size, groups)."""
    narrow: bool
    """True: attention is measured in bf16, and convolutions in float32 and in bf16. False: both are
    measured in float32 only."""
    messages: tuple[int, ...]
    """Message sizes of collectives, in bytes."""


GPU_SHAPES = Shapes(
    matmuls=(
        *((n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
        (8192, 3072, 1024),
        (16384, 1024, 4096),
        (4096, 32000, 2048),
        (1024, 4096, 1024),
    ),
    copies=(2**10, 2**18, 2**22, 2**25, 2**28),
    attention=((16, 16, 1024, 64), (4, 16, 4096, 128)),
    # The batch is large, so that the GPU needs more time to run a backward than the host needs to
    # launch it.
    convolutions=(
        (256, 64, 64, 56, 3, 1),
        (256, 256, 256, 14, 3, 1),
        (256, 256, 1024, 14, 1, 1),
        (256, 256, 256, 28, 3, 256),
    ),
    narrow=True,
    messages=(2**10, 2**16, 2**20, 2**24, 2**27),
)
CPU_SHAPES = Shapes(
    matmuls=(
        *((n, n, n) for n in (128, 256, 512, 1024)),
        (2048, 256, 256),
        (512, 2048, 512),
        (1024, 64, 256),
    ),
    copies=(2**10, 2**16, 2**20, 2**23),
    attention=((4, 4, 256, 64), (2, 8, 512, 64)),
    convolutions=((4, 64, 64, 28, 3, 1), (4, 128, 256, 14, 1, 1), (4, 128, 128, 14, 3, 128)),
    narrow=False,
    messages=(2**10, 2**16, 2**20, 2**24),
)


@dataclass(frozen=True)
class Timing:
    """The measured seconds of one operator."""

    operation: Operation
    seconds: float
    spread: float
    """Relative standard deviation over the rounds, estimated from the median absolute deviation."""


# -- cases -----------------------------------------------------------------------------------------


def operator_cases(device: torch.device, shapes: Shapes) -> list[Case]:
    """Return the operators to measure. On the meta device, the cases have shapes but no data."""
    cases: list[Case] = []
    for (m, n, k), name in product(shapes.matmuls, ("bf16", "float32")):
        if name == "float32" and m * n * k > 2**36:
            continue  # takes 0.1 s on a GPU, at the same rate as 4096 × 4096 × 4096
        dtype = _DTYPES[name]
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, n, device=device).to(dtype)
        size = float(dtype.itemsize * (m * k + k * n + m * n))
        op = Operation("mm", "matmul", name, 2.0 * m * n * k, size, (1, m, n, k))
        cases.append(Case(op, partial(torch.mm, a, b)))
    for n in shapes.copies:
        op = Operation("add", "memory", "float32", 0.0, 8.0 * n)
        cases.append(Case(op, partial(torch.add, torch.randn(n, device=device), 1.0)))
    for batch, heads, length, dim in shapes.attention:
        cases += _attention_cases(device, (batch, heads, length, dim), shapes.narrow)
    for shape, name in product(shapes.convolutions, ("bf16", "float32")):
        if name == "float32" or shapes.narrow:
            cases += _convolution_cases(device, shape, name)
    return cases


def _attention_cases(
    device: torch.device, shape: tuple[int, int, int, int], narrow: bool
) -> list[Case]:
    name = "bf16" if narrow else "float32"
    batch, heads, length, dim = shape
    q, k, v = (torch.randn(shape, device=device).to(_DTYPES[name]) for _ in range(3))
    # torch counts the FLOPs of all pairs of positions, even if the attention is causal.
    flops = 4.0 * batch * heads * length * length * dim
    size, full = 4.0 * q.nbytes, (batch, heads, length, length, dim)
    forward = partial(F.scaled_dot_product_attention, is_causal=True)
    return [
        Case(
            Operation("attention", "attention", name, flops, size, full), partial(forward, q, k, v)
        ),
        Case(
            Operation("attention_backward", "attention", name, 2.5 * flops, 2 * size, full),
            _backward_of(forward, q, k, v),
        ),
    ]


def _convolution_cases(
    device: torch.device, shape: tuple[int, int, int, int, int, int], name: str
) -> list[Case]:
    batch, inputs, outputs, size, kernel, groups = shape
    dtype = _DTYPES[name]
    x = torch.randn(batch, inputs, size, size, device=device).to(dtype)
    w = torch.randn(outputs, inputs // groups, kernel, kernel, device=device).to(dtype)
    flops = 2.0 * batch * w.numel() * size * size
    moved = float(dtype.itemsize * (x.numel() + w.numel() + batch * outputs * size * size))
    forward = partial(F.conv2d, padding=kernel // 2, groups=groups)
    return [
        Case(Operation("convolution", "convolution", name, flops, moved), partial(forward, x, w)),
        Case(
            Operation("convolution_backward", "convolution", name, 2 * flops, 2 * moved),
            _backward_of(forward, x, w),
        ),
    ]


def _backward_of(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], Any]:
    """Return a function that computes the gradients of all inputs."""
    trained = [each.clone().requires_grad_() for each in inputs]
    output = forward(*trained)
    gradient = torch.randn_like(output)
    return partial(torch.autograd.grad, output, trained, gradient, retain_graph=True)


def collective_cases(world: World, shapes: Shapes) -> list[Case]:
    """Return the collectives to measure between all ranks."""
    cases: list[Case] = []
    for size in shapes.messages if world.size > 1 else ():
        count = max(1, size // 4 // world.size) * world.size
        whole = torch.zeros(count, device=world.device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(all_reduce, whole),
            "all_gather": partial(all_gather, whole[: count // world.size].clone()),
            "reduce_scatter": partial(reduce_scatter, whole),
        }
        for name, call in calls.items():
            op = Operation(name, "collective", "float32", 0.0, 4.0 * count)
            cases.append(Case(op, call))
    return cases


# -- measuring -------------------------------------------------------------------------------------


def measure_rank(world: World, budget: float, shapes: Shapes | None = None) -> dict[str, Any]:
    """Measure all cases on this rank. Call this function on every rank at the same time.

    All ranks run the same number of rounds, because every collective needs all ranks.
    """
    device = world.device
    if shapes is None:
        shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    cases = operator_cases(device, shapes)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # as in the training loop
        cases = [_without_host(case, device) for case in cases]
    cases += collective_cases(world, shapes)
    smallest = _MIN_SAMPLE if device.type == "cuda" else _MIN_SAMPLE_CPU
    repeats = []
    for case in cases:
        case.call()  # warm-up: chooses kernels and allocates workspaces
        seconds = time_total(case.call, 2, device) / 2
        repeats.append(max(1, min(50, math.ceil(smallest / max(seconds, 1e-7)))))
    agreed = torch.tensor(repeats, dtype=torch.float64, device=device)
    if world.size > 1:
        all_reduce(agreed)
    repeats = [max(1, round(value / world.size)) for value in agreed.tolist()]
    started = time.monotonic()
    rounds: list[list[float]] = []
    host: list[tuple[float, float]] = []
    while len(rounds) < _MAX_ROUNDS:
        times = []
        for case, count in zip(cases, repeats, strict=True):
            if case.operation.kind == "collective":
                barrier()  # do not count the waiting for ranks that end the previous case later
            times.append(time_total(case.call, count, device) / count / case.executions)
        rounds.append(times)
        if device.type == "cuda":
            host.append(measure_host(device))
        enough = time.monotonic() - started > budget * len(rounds) / (len(rounds) + 1)
        stop = torch.tensor(float(enough), device=device)
        if world.size > 1:
            all_reduce(stop)
        if stop.item() > 0 and len(rounds) >= _MIN_ROUNDS:
            break
    columns = list(zip(*rounds, strict=True))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "ranks": world.size,
        "rounds": len(rounds),
        "operations": [asdict(case.operation) for case in cases],
        "seconds": [median(column) for column in columns],
        "spread": [relative_mad(column) for column in columns],
        "host": [median(each) for each in zip(*host, strict=True)] if host else None,
    }


def _without_host(case: Case, device: torch.device) -> Case:
    """Return a case whose GPU time does not contain the host time to issue the operator.

    The returned case replays a CUDA graph that runs the operator several times. Backward cases are
    returned unchanged, because their kernels take longer than the host needs to issue them.
    """
    if "backward" in case.operation.name:
        return case
    case.call()
    seconds = time_total(case.call, 3, device) / 3
    executions = max(1, min(20, math.ceil(_MIN_SAMPLE / 4 / seconds)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(executions):
            case.call()
    return case._replace(call=graph.replay, executions=executions)


class _CountOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that start a kernel, by the same rule as model_trace.py."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        self.count += not is_view and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


def measure_host(device: torch.device) -> tuple[float, float]:
    """Return the host seconds of one operator in forward and in backward.

    The measured model is a GPT with autocast, so the time includes the host work for modules and
    views. Its operators are so small that the device is idle most of the time, and the host alone
    determines the time.
    """
    config = GPTConfig(vocab_size=64, max_seq_len=8, layers=_HOST_LAYERS, heads=2, dim=32)
    model = GPT(config).to(device)
    inputs = torch.zeros(1, 8, dtype=torch.long, device=device)

    def forward() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return model(inputs).float().sum()

    def run() -> tuple[float, float]:
        _synchronize(device)
        start = time.perf_counter()
        loss = forward()
        middle = time.perf_counter()
        _synchronize(device)
        again = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - again

    run()
    with _CountOperators() as in_forward:
        loss = forward()
    with _CountOperators() as in_backward:
        loss.backward()
    times = [run() for _ in range(5)]
    return (
        median(each[0] for each in times) / max(1, in_forward.count),
        median(each[1] for each in times) / max(1, in_backward.count),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- fits ------------------------------------------------------------------------------------------


def fit_calibration(measured: Sequence[dict[str, Any]]) -> Calibration:
    """Return the rates and the collective costs that best fit the measurements of all ranks."""
    first = measured[0]
    operations = [_as_operation(row) for row in first["operations"]]
    columns = zip(*(each["seconds"] for each in measured), strict=True)
    spreads = zip(*(each["spread"] for each in measured), strict=True)
    timings = [
        Timing(operation, median(seconds), median(spread))
        for operation, seconds, spread in zip(operations, columns, spreads, strict=True)
    ]
    collectives = fit_collectives(timings, first["ranks"])
    if first["device"] == "cpu":
        return _fit_cpu(timings, collectives, first["ranks"])
    cluster = cluster_of_device(first["device"], 1)
    rates = default_rates(cluster).changed("sustained", 1.0)
    if first["host"]:
        hosts = [median(values) for values in zip(*(m["host"] for m in measured), strict=True)]
        rates = replace(rates, host_forward_s=hosts[0], host_backward_s=hosts[1])
    rates = _fit_memory(cluster, rates, timings)
    rates = _fit_grid(cluster, rates, timings, "matmul", "bf16", "matmul_16bit")
    rates = _fit_grid(cluster, rates, timings, "matmul", "float32", "matmul_float32")
    rates = _fit_shares(cluster, rates, timings)
    spread = _residuals(cluster, rates, timings)
    rates = rates.changed("sustained", max(default_rates(cluster).sustained, _SUSTAINED))
    return Calibration(first["device"], rates, collectives, spread)


def _as_operation(row: dict[str, Any]) -> Operation:
    return Operation(**(row | {"shape": tuple(row["shape"])}))


def _error(cluster: Cluster, rates: Rates, timings: Sequence[Timing]) -> float:
    cost = OperatorCost(cluster, rates)
    return sum(abs(math.log(cost.seconds(t.operation) / t.seconds)) for t in timings)


def _fit_memory(cluster: Cluster, rates: Rates, timings: Sequence[Timing]) -> Rates:
    """Fit `kernel_s` (the seconds of an operator without data), and the bandwidth for each size.

    The largest operator determines the memory bandwidth. Smaller operators may fit into a cache.
    """
    chosen = sorted(
        (t for t in timings if t.operation.kind == "memory"), key=lambda t: t.operation.bytes
    )
    largest = chosen[-1]
    overhead = min(min(t.seconds for t in chosen), 0.5 * largest.seconds)
    bandwidth = largest.operation.bytes / (largest.seconds - overhead)
    curve = tuple(
        (t.operation.bytes, t.operation.bytes / (t.seconds - overhead) / bandwidth)
        for t in chosen
        if t.seconds > 1.5 * overhead
    )
    share = bandwidth / cluster.memory_bandwidth
    return replace(rates, memory=share, kernel_s=overhead, memory_curve=curve)


def _fit_grid(
    cluster: Cluster, rates: Rates, timings: Sequence[Timing], kind: str, dtype: str, name: str
) -> Rates:
    """Fit the share of the peak, and for bf16 also `wave_s`, by a grid search."""
    chosen = [t for t in timings if (t.operation.kind, t.operation.dtype) == (kind, dtype)]
    if not chosen:
        return rates
    waves = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0) if dtype == "bf16" else (rates.wave_s * 1e6,)
    options = [
        rates.changed(name, share / 100).changed("wave_s", wave * 1e-6)
        for share, wave in product(range(20, 101, 2), waves)
    ]
    return min(options, key=lambda option: _error(cluster, option, chosen))


def _fit_shares(cluster: Cluster, rates: Rates, timings: Sequence[Timing]) -> Rates:
    """Fit each remaining rate: choose the share for which its cases have the smallest error."""
    groups: dict[str, Callable[[Timing], bool]] = {
        "attention_forward": lambda t: t.operation.name == "attention",
        "attention_backward": lambda t: t.operation.name == "attention_backward",
        "convolution_memory": lambda t: is_grouped_convolution(t.operation),
        "convolution": lambda t: _is_dense(t.operation, "float32", "convolution"),
        "convolution_16bit": lambda t: _is_dense(t.operation, "bf16", "convolution"),
        "convolution_backward": lambda t: (
            t.operation.name == "convolution_backward" and not is_grouped_convolution(t.operation)
        ),
    }
    for name, belongs in groups.items():
        chosen = [t for t in timings if belongs(t)]
        if not chosen:
            continue
        options = [rates.changed(name, share / 100) for share in range(2, 131)]
        rates = min(options, key=lambda option: _error(cluster, option, chosen))
    return rates


def _is_dense(operation: Operation, dtype: str, name: str) -> bool:
    return (operation.name, operation.dtype) == (name, dtype) and not is_grouped_convolution(
        operation
    )


def _residuals(
    cluster: Cluster, rates: Rates, timings: Sequence[Timing]
) -> tuple[tuple[str, float], ...]:
    """Return the median relative residual of each fit. It widens the uncertainty band."""
    cost = OperatorCost(cluster, rates)
    groups: dict[str, list[float]] = {}
    for timing in timings:
        kind, dtype = timing.operation.kind, timing.operation.dtype
        if kind == "collective":
            continue
        name = {"matmul": "matmul_16bit" if dtype == "bf16" else "matmul_float32"}.get(kind, kind)
        residual = abs(cost.seconds(timing.operation) / timing.seconds - 1)
        groups.setdefault(name, []).append(max(residual, timing.spread))
    return tuple(sorted((name, median(values)) for name, values in groups.items()))


def _fit_cpu(
    timings: Sequence[Timing], collectives: tuple[MeasuredCollective, ...], ranks: int
) -> Calibration:
    """Return the calibration of a CPU rank: peaks are the largest measured rates."""
    peaks: dict[str, float] = {}
    for timing in timings:
        if timing.operation.kind == "matmul":
            speed = timing.operation.flops / timing.seconds
            dtype = timing.operation.dtype
            peaks[dtype] = max(peaks.get(dtype, 0.0), speed)
    peaks["fp16"] = peaks["bf16"]
    copies = [t for t in timings if t.operation.kind == "memory"]
    largest = max(copies, key=lambda t: t.operation.bytes)
    cluster = named_cluster("cpu", ranks)
    cluster = replace(
        cluster,
        peak_flops=dict(cluster.peak_flops) | peaks,
        memory_bandwidth=largest.operation.bytes / largest.seconds,
    )
    products = sorted(
        (t for t in timings if (t.operation.kind, t.operation.dtype) == ("matmul", "float32")),
        key=lambda t: t.operation.flops,
    )
    speeds: dict[float, list[float]] = {}
    for timing in products:
        speed = timing.operation.flops / timing.seconds / peaks["float32"]
        speeds.setdefault(timing.operation.flops, []).append(speed)
    rates = _fit_memory(cluster, default_rates(cluster), timings)
    rates = replace(
        rates,
        matmul_16bit=1.0,
        matmul_float32=1.0,
        matmul_curve=tuple((flops, median(values)) for flops, values in speeds.items()),
    )
    rates = _fit_shares(cluster, rates, timings)
    return Calibration(
        "cpu",
        rates,
        collectives,
        _residuals(cluster, rates, timings),
        tuple(sorted(peaks.items())),
        cluster.memory_bandwidth,
    )


def fit_collectives(timings: Sequence[Timing], ranks: int) -> tuple[MeasuredCollective, ...]:
    """Return α and β of every collective, fitted with the smallest relative errors."""
    found = []
    for name in sorted({t.operation.name for t in timings if t.operation.kind == "collective"}):
        rows = [
            (
                t.seconds**-2,
                math.log2(ranks),
                OPERATIONS[name].bus_factor(ranks) * t.operation.bytes,
                t.seconds,
            )
            for t in timings
            if t.operation.name == name
        ]
        found.append(MeasuredCollective(name, ranks, *fit_alpha_beta(rows)))
    return tuple(found)


# -- the command -----------------------------------------------------------------------------------


def calibrate(
    path: Path, *, ranks: int | None, device: str = "auto", budget: float = BUDGET
) -> Calibration:
    """Measure this machine with local ranks, and write the result to a file.

    If `ranks` is None, one rank per visible GPU is started, or one CPU rank if there is no GPU.
    Raises UsageError if the GPU is not in the catalogue, and RankFailed if a rank fails.
    """
    from tutti.machine.gpus import visible_gpu_count
    from tutti.world.spawn import spawn

    gpus = 0 if device == "cpu" else visible_gpu_count()
    if gpus and (found := describe_environment()["gpus"]):
        try:
            cluster_of_device(found[0]["name"], 1)  # refuses an unknown GPU before ranks start
        except UsageError as error:
            raise UsageError(f"--calibrate: {error}") from None
    measured = spawn(
        _measure_in_world,
        (budget,),
        ranks=ranks or max(1, gpus),
        device=device,  # type: ignore[arg-type]
        show="none",
    )
    calibration = fit_calibration(measured)
    write_calibration(path, calibration, measured)
    return calibration


def _measure_in_world(budget: float) -> dict[str, Any]:
    import tutti

    with tutti.init() as world:
        return measure_rank(world, budget)
