"""Start NCCL on all ranks, and read its log and its dump files.

NCCL can hang or crash its process. Therefore every rank starts NCCL in a separate process, which is
killed after a timeout. The process executes this module with `python -m`.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.machine.checks.cluster import STOPPED, NcclRank
from tutti.machine.checks.nccl_topology import select_lines
from tutti.machine.checks.probe_devices import WatchedProcess
from tutti.machine.checks.probe_network import Peers

_SECONDS = 90.0
# After one rank has failed, the other ranks would wait until the timeout. Instead, they are killed
# after this time. In the meantime, they can still report their own failures.
_SECONDS_AFTER_FAILURE = 5.0
_COUNT = 100_003
# With more ranks, the probe does not run all_to_all, because it would connect all pairs of ranks.
_MAX_RANKS_ALL_PAIRS = 64


def start_nccl(
    peers: Peers,
    gpu_count: int,
    command: Sequence[str] = (sys.executable, "-m", __name__, "nccl"),
    seconds: float = _SECONDS,
) -> tuple[NcclRank, ...]:
    """Create a communicator over all ranks, or over all GPUs if there is only one rank.

    All ranks must call this function. Every rank gets the results of all ranks. `command` starts
    the process of one rank. Only tests set `command`.
    """
    size = len(peers.hosts)
    if size == 1:
        size, gpus = gpu_count, {gpu: gpu for gpu in range(gpu_count)}
    else:
        local_rank = list(peers.hosts[: peers.rank]).count(peers.host)
        gpus = {peers.rank: local_rank % gpu_count}
    server = None
    if peers.rank == 0:
        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    host, port = peers.gather(server and [peers.address, server.port])[0]
    try:
        store = server or dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        with tempfile.TemporaryDirectory(prefix="tutti-nccl-") as folder:
            commands, environments = {}, {}
            for rank, gpu in gpus.items():
                commands[rank] = [*command, *map(str, (rank, size, host, port, gpu))]
                dumps = rank in ((0,) if len(gpus) > 1 else peers.first_ranks)
                environments[rank] = os.environ | _nccl_variables(Path(folder), rank, dumps)
            own = _run_ranks(commands, environments, store, seconds)
            results = [
                _read_result(rank, peers.host, *own[rank], seconds, Path(folder)) for rank in gpus
            ]
    except (OSError, RuntimeError) as error:  # the store, the folder or the process failed
        reason = str(error).partition("\n")[0]
        results = [NcclRank(rank, peers.host, "process", reason) for rank in gpus]
    return peers.gather_rows(NcclRank, results)


def _nccl_variables(folder: Path, rank: int, dumps: bool) -> dict[str, str]:
    """Return the variables that make NCCL write its log and, with `dumps`, its dump files."""
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM",
        "NCCL_DEBUG_FILE": str(folder / f"{rank}.log"),
    }
    if dumps:
        for kind in ("TOPO", "GRAPH"):
            variables[f"NCCL_{kind}_DUMP_FILE"] = str(folder / f"{rank}.{kind}")
            variables[f"NCCL_{kind}_DUMP_FILE_RANK"] = str(rank)
    return variables


def _run_ranks(
    commands: Mapping[int, Sequence[str]],
    environments: Mapping[int, Mapping[str, str]],
    store: dist.Store,
    seconds: float,
) -> dict[int, tuple[list[str], int | None, bool]]:
    """Start `commands`. Wait until they end, until the timeout, or until any rank has failed.

    For each rank, return (lines of output, exit code, whether any rank failed). The exit code is
    None if the process was killed.
    """
    processes: dict[int, WatchedProcess] = {}
    codes: dict[int, int | None] = {}
    deadline, failed = time.monotonic() + seconds, False
    try:
        for rank, command in commands.items():
            processes[rank] = WatchedProcess(command, environments[rank])
        while True:
            codes = {rank: process.wait(0.05) for rank, process in processes.items()}
            with suppress(RuntimeError):  # the store fails after rank 0 has ended
                if any(codes.values()):
                    store.set("failed", "")
                if not failed and store.check(["failed"]):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_FAILURE)
            if None not in codes.values() or time.monotonic() > deadline:
                break
    finally:  # also if the user interrupts `tutti doctor`
        lines = {rank: process.close() for rank, process in processes.items()}
    return {rank: (lines[rank], codes[rank], failed) for rank in processes}


def _read_result(
    rank: int,
    host: int,
    lines: Sequence[str],
    code: int | None,
    another_failed: bool,
    seconds: float,
    folder: Path,
) -> NcclRank:
    """Return a result from the output of a rank's process and NCCL's log and dump files."""
    values: dict[str, Any] = {"stage": "process"}
    other_output = ""
    for line in lines:
        try:
            row = json.loads(line)
            values |= row
        except (ValueError, TypeError):  # a truncated line, or output of a library
            other_output = line.strip() or other_output
    error = str(values.get("error", ""))
    if values["stage"] != "done" and not error:
        if code is None:
            error = STOPPED if another_failed else f"no progress for {seconds:.0f} s"
        else:
            error = f"the process ended with exit code {code}: {other_output}".rstrip(": ")

    def read(name: str) -> str:
        with suppress(OSError):
            return (folder / name).read_text(errors="replace")
        return ""

    return NcclRank(
        rank,
        host,
        values["stage"],
        error,
        values.get("init_s"),
        select_lines(read(f"{rank}.log")),
        read(f"{rank}.TOPO"),
        read(f"{rank}.GRAPH"),
    )


# --- the process of one rank ---------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run one rank. The arguments are BACKEND RANK SIZE ADDRESS PORT GPU.

    The process prints the name of each stage before the stage begins. The output therefore shows in
    which stage the process hung or crashed. Tests use the backend "gloo".
    """
    signal.alarm(int(_SECONDS) + 30)  # ends this process even if `tutti doctor` was killed
    backend, rank, size, address, port, gpu = arguments
    try:
        _run_rank(backend, int(rank), int(size), address, int(port), int(gpu))
    except Exception as error:
        print(json.dumps({"error": str(error).strip().partition("\n")[0]}), flush=True)
        return 1
    return 0


def _run_rank(backend: str, rank: int, size: int, address: str, port: int, gpu: int) -> None:
    def begin(stage: str, **values: float) -> None:
        print(json.dumps({"stage": stage, **values}), flush=True)

    device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
    began = time.perf_counter()

    def seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return round(time.perf_counter() - began, 3)

    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=_SECONDS)
    store = dist.TCPStore(address, port, is_master=False, timeout=limit)
    store.set(f"started/{rank}", "")
    store.wait([f"started/{other}" for other in range(size)], limit)
    begin("init")
    began = time.perf_counter()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=limit,
        # With a device_id, NCCL creates the communicator now instead of at the first collective.
        device_id=device if device.type == "cuda" else None,
    )
    begin("all_reduce", init_s=seconds())
    # All sums are integers below 2^24, which float32 represents exactly, so the result does not
    # depend on the order of the additions.
    index = torch.arange(_COUNT, device=device) % 1000
    value = (index + rank).float()
    dist.all_reduce(value)
    _compare("all_reduce", value, index * size + size * (size - 1) // 2)
    if 1 < size <= _MAX_RANKS_ALL_PAIRS:
        begin("all_to_all")
        sent = torch.arange(size, device=device) * size + rank
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        _compare("all_to_all", received, rank * size + torch.arange(size, device=device))
    begin("destroy")
    dist.destroy_process_group()
    begin("done")


def _compare(operation: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = int((value != expected).sum())
    if wrong:
        raise ValueError(f"{operation}: {wrong} of {value.numel()} elements are wrong")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
