"""Probes of CPUs and GPUs: a matrix product, a memory copy, and copies between GPUs.

Copies between GPUs can hang in the driver. Therefore they run in a separate process, which is
killed after a timeout. The process executes this module with `python -m`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tutti.machine.checks.cluster import GpuCopy, MeasuredRate
from tutti.machine.checks.outliers import slow_outliers
from tutti.machine.checks.probe_network import Peers
from tutti.machine.cpu_numa import allowed_cpus

_ATTEMPTS = 5
_REPEATS_OF_SLOW = 2
_COPY_SECONDS = 90.0

# A probe prepares its tensors on a device. It returns (function to time, amount of work per call in
# FLOPs or bytes, name of the probe).
Probe = Callable[[torch.device], tuple[Callable[[], torch.Tensor], float, str]]


def matrix_product(device: torch.device) -> tuple[Callable[[], torch.Tensor], float, str]:
    """Probe of the compute speed. The amount of work is in FLOPs."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    name = "bf16" if dtype is torch.bfloat16 else "fp32"
    return lambda: a @ b, 2.0 * size**3, f"{name} product"


def memory_copy(device: torch.device) -> tuple[Callable[[], torch.Tensor], float, str]:
    """Probe of the memory bandwidth. The amount of work is the bytes read plus bytes written."""
    count = 1 << 28 if device.type == "cuda" else 1 << 24  # 1 GiB or 64 MiB
    source = torch.arange(count, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * 4 * count, "copy"


def measure_devices(peers: Peers, device: str, probe: Probe) -> tuple[MeasuredRate, ...]:
    """Return the rate of a probe on every rank, or on every GPU if there is only one rank.

    All ranks are measured at the same time, as in training. Then the slow ranks are measured again.
    The best rate of each rank is returned.
    """
    if device != "cuda" and "OMP_NUM_THREADS" not in os.environ:
        ranks_on_host = list(peers.hosts).count(peers.host)
        torch.set_num_threads(max(1, len(allowed_cpus()) // ranks_on_host))
    devices = _own_devices(peers, device)
    best: dict[str, MeasuredRate] = {}
    for _ in range(1 + _REPEATS_OF_SLOW):
        rates = [_rate(name, peers.host, where, probe) for name, where in devices.items()]
        for rate in peers.gather_rows(MeasuredRate, rates):
            before = best.get(rate.name)
            if before is None or rate.value > before.value:
                same = rate.reproducible and (before is None or before.reproducible)
                best[rate.name] = replace(rate, reproducible=same)
        measured = [rate for rate in best.values() if not rate.error]
        slow = {
            name
            for kind in {rate.kind for rate in measured}
            for name in slow_outliers({r.name: r.value for r in measured if r.kind == kind})
        }
        if not slow:
            break
        devices = {name: where for name, where in devices.items() if name in slow}
    return tuple(best.values())


def _own_devices(peers: Peers, device: str) -> dict[str, torch.device]:
    """Return the devices that this rank measures. A single rank measures all GPUs."""
    if device != "cuda":
        return {f"rank:{peers.rank}": torch.device("cpu")}
    count = torch.cuda.device_count()
    if len(peers.hosts) == 1:
        return {f"gpu:{index}": torch.device("cuda", index) for index in range(count)}
    local_rank = list(peers.hosts[: peers.rank]).count(peers.host)
    return {f"rank:{peers.rank}": torch.device("cuda", local_rank % count)}


def _rate(name: str, host: int, device: torch.device, probe: Probe) -> MeasuredRate:
    """Return the measured rate. If the probe fails (such as out of memory), set its `error`."""
    try:
        work, amount, probe_name = probe(device)
        reference = work().clone()
        fastest, reproducible = float("inf"), True
        for _ in range(_ATTEMPTS):
            seconds, result = _time(work, device)
            fastest = min(fastest, seconds)
            reproducible = reproducible and torch.equal(result, reference)
    except RuntimeError as error:
        return MeasuredRate(name, host, str(device), 0.0, error=str(error).splitlines()[0])
    if device.type == "cuda":
        kind = f"{probe_name}, {torch.cuda.get_device_name(device)}"
    else:
        kind = f"{probe_name}, CPU × {torch.get_num_threads()}"
    return MeasuredRate(name, host, kind, amount / fastest, reproducible)


def _time(work: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, torch.Tensor]:
    if device.type != "cuda":
        began = time.perf_counter()
        result = work()
        return time.perf_counter() - began, result
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3, result


def copy_between_gpus(
    command: Sequence[str] | None = None, seconds: float = _COPY_SECONDS
) -> tuple[GpuCopy, ...]:
    """Return the results of copies between all pairs of GPUs of this host, in both directions.

    `command` starts the process that makes the copies. Only tests set `command`.
    """
    lines, code = run_with_timeout(command or [sys.executable, "-m", __name__], seconds)
    return parse_copies(lines, code)


def parse_copies(lines: Sequence[str], code: int | None) -> tuple[GpuCopy, ...]:
    """Return the copies from the output of the process that makes them.

    If the output has a pair without a result, the copy of this pair hung (if `code` is None) or
    crashed the process (if `code` is an exit code).
    """
    found: dict[tuple[int, int], GpuCopy] = {}
    for line in lines:
        try:
            row = json.loads(line)
            pair = (row["src"], row["dst"])
        except (ValueError, KeyError, TypeError):  # a truncated line, or output of a library
            continue
        if "status" in row:
            found[pair] = GpuCopy(**row)
        elif code is None:
            found[pair] = GpuCopy(*pair, "hung")
        else:
            found[pair] = GpuCopy(*pair, "error", message=f"the process exited with code {code}")
    return tuple(found.values())


class WatchedProcess:
    """A process in a new process group. Its standard output and error go to a temporary file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int | None:
        """Wait at most `seconds`. Return the exit code, or None if the process still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def close(self) -> list[str]:
        """Return the lines of output. If the process still runs, kill its process group first."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait(5.0)  # not forever, because a process that hangs in the driver may not end
        with self._output:
            self._output.seek(0)
            return self._output.read().splitlines()


def run_with_timeout(command: Sequence[str], seconds: float) -> tuple[list[str], int | None]:
    """Run a command. Return (lines of output, exit code or None if the process was killed)."""
    process = WatchedProcess(command)
    code = None
    try:
        code = process.wait(seconds)
    finally:  # also if the user interrupts `tutti doctor`
        lines = process.close()
    return lines, code


def main() -> None:
    """Copy data between all pairs of GPUs. Print each pair before the copy, and its result after.

    The output therefore shows which copy hung or crashed the process.
    """
    pattern = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    for src in range(torch.cuda.device_count()):
        source = pattern.to(f"cuda:{src}")
        for dst in range(torch.cuda.device_count()):
            if src == dst:
                continue
            row: dict[str, object] = {"src": src, "dst": dst}
            print(json.dumps(row), flush=True)
            try:
                gbs, same = _copy(source, pattern, dst)
                row |= {"status": "ok" if same else "corrupt", "gbs": gbs}
            except RuntimeError as error:
                row |= {"status": "error", "message": str(error).splitlines()[0]}
            print(json.dumps(row), flush=True)


def _copy(source: torch.Tensor, pattern: torch.Tensor, dst: int) -> tuple[float, bool]:
    """Make five copies. Return (GB/s of the fastest copy, whether all copies were correct)."""
    expected = pattern.to(f"cuda:{dst}")  # copied from host memory, not from a GPU
    target = torch.zeros_like(expected)
    fastest, same = float("inf"), True
    for _ in range(_ATTEMPTS):
        target.zero_()
        torch.cuda.synchronize(dst)
        seconds, _result = _time(lambda: target.copy_(source), source.device)
        torch.cuda.synchronize(dst)
        fastest = min(fastest, seconds)
        same = same and torch.equal(target, expected)
    return source.numel() / fastest / 1e9, same


if __name__ == "__main__":
    main()
