"""Live probes of every rank or GPU: a matrix product and a copy in memory, the best of several."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from tutti.machine.checks.company import Company
from tutti.machine.checks.outliers import slow_ones
from tutti.machine.checks.patient import Rate
from tutti.machine.cpu_numa import allowed_cpus

_ATTEMPTS = 5
_CONFIRMATIONS = 2


def measure(company: Company, kind: str, device: str) -> tuple[Rate, ...]:
    """`kind` is compute or bandwidth. All ranks at once, as in training; the slow ones again."""
    probe = _product if kind == "compute" else _copy
    if device != "cuda":
        neighbours = company.hosts.count(company.hosts[company.rank])
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(allowed_cpus()) // neighbours))
    devices = _devices(company, device)
    best: dict[str, Rate] = {}
    suspects: set[str] | None = None
    for _ in range(1 + _CONFIRMATIONS):
        mine = [
            asdict(_try(name, company, where, probe))
            for name, where in devices.items()
            if suspects is None or name in suspects
        ]
        for rates in company.gather(mine):
            for rate in (Rate(**each) for each in rates):
                before = best.get(rate.name)
                if before is None or rate.value > before.value:
                    best[rate.name] = replace(rate, ok=rate.ok and (before is None or before.ok))
        kinds = {rate.kind for rate in best.values()}
        suspects = {
            name
            for each in kinds
            for name in slow_ones(
                {n: r.value for n, r in best.items() if r.kind == each and not r.error}
            )
        }
        if not suspects:
            break
    return tuple(best.values())


def _devices(company: Company, device: str) -> dict[str, torch.device]:
    """What this rank measures: its own device, or all GPUs if it is alone."""
    if device != "cuda":
        return {f"rank:{company.rank}": torch.device("cpu")}
    count = torch.cuda.device_count()
    if company.size == 1:
        return {f"gpu:{index}": torch.device("cuda", index) for index in range(count)}
    host = company.hosts[company.rank]
    local = company.hosts[: company.rank].count(host)
    return {f"rank:{company.rank}": torch.device("cuda", local % count)}


Probe = Callable[[torch.device], tuple[Callable[[], torch.Tensor], float, str]]


def _try(name: str, company: Company, device: torch.device, probe: Probe) -> Rate:
    """Out of memory, a driver that fails: all that is for the report, and no reason to end."""
    try:
        return _rate(name, company, device, probe)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        return Rate(name, company.hosts[company.rank], str(device), 0.0, error=said)


def _rate(name: str, company: Company, device: torch.device, probe: Probe) -> Rate:
    work, amount, what = probe(device)
    reference = work().clone()
    quickest, ok = float("inf"), True
    for _ in range(_ATTEMPTS):
        seconds, result = _timed(work, device)
        quickest = min(quickest, seconds)
        ok = ok and torch.equal(result, reference)
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = f" × {torch.get_num_threads()}" if device.type == "cpu" else ""
    kind = f"{what}, {model}{threads}"
    return Rate(name, company.hosts[company.rank], kind, amount / quickest, ok)


def _timed(work: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, torch.Tensor]:
    if device.type != "cuda":
        began = time.perf_counter()
        result = work()
        return time.perf_counter() - began, result
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        start.record()
        result = work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3, result


def _product(device: torch.device) -> tuple[Callable[[], torch.Tensor], float, str]:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    one, other = (
        torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    name = "bf16" if dtype is torch.bfloat16 else "fp32"
    return lambda: one @ other, 2.0 * size**3, f"{name} product"


def _copy(device: torch.device) -> tuple[Callable[[], torch.Tensor], float, str]:
    size = 1 << 28 if device.type == "cuda" else 1 << 24  # 1 GiB, 64 MiB
    source = torch.arange(size, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * 4 * size, "copy"
