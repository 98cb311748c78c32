"""NCCL settings and a private MPS daemon for several ranks on one GPU.

Without MPS (NVIDIA's Multi-Process Service), the kernels of different processes run in alternating
time slices. Each time that a rank waits for another rank, it then waits for milliseconds.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"


def shared_gpu_variables(rank: int, one_machine: bool) -> dict[str, str]:
    """Return environment variables for ranks that share a GPU.

    If any ranks of a world share a GPU, all ranks of the world must set these variables, because
    all ranks of an NCCL communicator must use the same transports.
    """
    variables = {
        # NCCL refuses two ranks on the same GPU of a host. With a different host id per rank, NCCL
        # treats each rank as a separate host, and the ranks communicate over sockets.
        "NCCL_HOSTID": f"tutti-rank{rank}",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Without expandable segments, each rank's allocator reserves more memory than the rank
        # uses, and other ranks on the GPU cannot use this memory: 1 to 3 GiB per rank, measured
        # with eight ranks and a model of 4.8 B parameters.
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if one_machine:
        variables |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return variables


@contextmanager
def mps_daemon(directory: Path) -> Iterator[dict[str, str]]:
    """Run a private MPS daemon during the block.

    Yield the environment variables that connect a process to the daemon, or {} if the daemon does
    not start.
    """
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
    }
    problem = ""
    try:
        if shutil.which(_CONTROL) is None:
            problem = f"{_CONTROL} is not installed"
        else:
            # If a signal interrupted the start, processes that _stop_mps does not find could
            # remain.
            with _signals_blocked():
                try:
                    for folder in variables.values():
                        Path(folder).mkdir(mode=0o700)
                    _control(variables, "-d")
                except (subprocess.SubprocessError, OSError) as error:
                    problem = f"MPS does not start ({error})"
        if problem:
            message = f"tutti run: {problem}. Ranks on one GPU run in time slices, which is slow."
            print(message, file=sys.stderr, flush=True)
        yield {} if problem else variables
    finally:
        with _signals_blocked():
            _stop_mps(variables)


def _stop_mps(variables: dict[str, str]) -> None:
    """Stop the daemon and its server processes. Kill those that are still alive after 10 s."""
    import psutil  # type: ignore[import-untyped]

    name = "CUDA_MPS_PIPE_DIRECTORY"
    processes = [
        process
        for process in psutil.process_iter(["name", "environ"])
        if process.info["name"].startswith("nvidia-cuda-mps")
        and (process.info["environ"] or {}).get(name) == variables[name]
    ]
    # This call fails if the daemon has already ended. Processes that remain are killed below.
    with suppress(subprocess.SubprocessError, OSError):
        _control(variables, command="quit -t 5\n")
    for process in psutil.wait_procs(processes, timeout=10)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _control(variables: dict[str, str], *arguments: str, command: str | None = None) -> None:
    subprocess.run(
        [_CONTROL, *arguments],
        input=command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
