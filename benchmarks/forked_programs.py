"""Starts Python programs from a process that has already imported torch and the frameworks.

    python benchmarks/forked_programs.py serve SOCKET                     # imports, then forks
    FORK_SERVER=SOCKET python benchmarks/forked_programs.py FILE.py ARG   # runs FILE.py ARG

Imports take most of the time of a short run, so the first command imports all modules once and then
forks a process for each program. A launcher can use the second command as a rank: the program gets
the environment, directory, CPUs and output of the command, and the command exits with the exit code
of the program. If the command is killed, the program is killed, too. `tutti profile` and
`tutti scale` can record such a program.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

MODULES = (
    *("torch", "torch.distributed.fsdp", "torch.nn.parallel", "torch.optim", "torch.profiler"),
    *("accelerate", "pytorch_lightning", "transformers.trainer", "tutti.cli.train", "tutti.train"),
)


def serve(path: str) -> None:
    """Fork a program for each connection."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Without this call, the garbage collection of each program writes to the memory of all imported
    # modules, so that the system copies this memory.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    program = os.fork()
    if program == 0:
        os.setpgid(0, 0)  # processes that the program starts are killed with it
        connection.close()
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
        os._exit(_run(json.loads(message)))  # Python would free all imported modules first
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            connection.send(bytes([os.waitstatus_to_exitcode(status) & 255]))
            os._exit(0)
        if select.select([connection], [], [], 0.02)[0]:  # the command has ended
            os.killpg(program, signal.SIGKILL)
            os._exit(1)


def _run(request: dict[str, Any]) -> int:
    """Run the program and its exit handlers, and return its exit code."""
    import torch

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["cpus"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if settings := os.environ.get("TUTTI_PROFILE"):
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        spec = importlib.util.spec_from_file_location("capture", f"{entries[0]}/sitecustomize.py")
        assert spec is not None and spec.loader is not None
        hook = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hook)
        hook._begin_capture(json.loads(settings))
    sys.argv = request["arguments"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def request(arguments: list[str]) -> int:
    """Run a program on the server, and return its exit code."""
    message = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["FORK_SERVER"])
        socket.send_fds(connection, [json.dumps(message).encode()], [1, 2])
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(request(sys.argv[1:]))
