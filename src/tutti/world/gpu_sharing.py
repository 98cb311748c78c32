"""Several ranks on one GPU, to develop multi-GPU code on one GPU: NCCL settings, a private MPS.

Without MPS (NVIDIA's Multi-Process Service) kernels of different processes run in alternating time
slices, and every wait of one rank for another costs milliseconds.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path


def shared_gpu_variables(rank: int, one_machine: bool) -> dict[str, str]:
    """Environment variables for NCCL, symmetric memory and the allocator if ranks share a GPU.

    All ranks set these variables, also ranks that do not share their GPU, because all ranks of an
    NCCL communicator must agree on the transports.
    """
    variables = {
        # NCCL refuses two ranks on one GPU of one host. With a different host id each rank counts
        # as a separate host, and the ranks communicate over sockets.
        "NCCL_HOSTID": f"tutti-rank{rank}",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # The caching allocator of one process cannot use free blocks of another: in a training of
        # 4.8 B parameters on eight ranks, each rank had 1 to 3 GiB reserved and unused.
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if one_machine:
        variables |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return variables


class MpsDaemon:
    """A private MPS control daemon, started before the ranks and stopped after them."""

    def __init__(self, directory: Path) -> None:
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
        }

    def start(self) -> None:
        """Start the daemon; raises CalledProcessError if it refuses."""
        for directory in self.variables.values():
            Path(directory).mkdir(mode=0o700)
        self._control("-d")

    def stop(self) -> None:
        """Stop the daemon and its servers, and kill the processes that are alive after 10 s."""
        pids = self._processes()
        # The daemon may have ended already; processes that remain are killed below.
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self._control(command="quit -t 5\n")
        deadline = time.monotonic() + 10
        while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, 9)

    def _control(self, *arguments: str, command: str | None = None) -> None:
        subprocess.run(
            ["nvidia-cuda-mps-control", *arguments],
            input=command,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )

    def _processes(self) -> list[int]:
        """The process ids of the daemon and its servers, found by CUDA_MPS_PIPE_DIRECTORY."""
        marker = f"CUDA_MPS_PIPE_DIRECTORY={self.variables['CUDA_MPS_PIPE_DIRECTORY']}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_mps = (process / "comm").read_text().startswith("nvidia-cuda-mps")
                if is_mps and marker in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:  # the process has ended or belongs to another user
                continue
        return found
