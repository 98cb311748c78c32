"""Runs many command lines of tutti, each in a forked child of one process that has loaded torch.

A new process for each command line would need seconds, most of them for loading torch. Standard
input has one JSON list of arguments per line; standard output gets one JSON object per line.
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS = 60  # a command line that runs longer is killed with its ranks


def run_all(command_lines: list[list[str]], directory: Path) -> list[dict[str, Any]]:
    """Run the command lines in `directory`. Return arguments, code and output of each."""
    import subprocess

    lines = "".join(json.dumps(arguments) + "\n" for arguments in command_lines)
    done = subprocess.run(
        [sys.executable, __file__],
        input=lines,
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _run_in_child(run: Any, arguments: list[str], out: Path, err: Path) -> int | None:
    """Return the exit code, or None if the child was killed after SECONDS."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), number)
        code = 99  # an exception that the command line did not turn into a message
        try:
            code = run(arguments)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 2
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _serve() -> None:
    import tempfile

    import torch.distributed  # noqa: F401

    import tutti.cli

    run = tutti.cli.run_cli
    for module in pkgutil.iter_modules(tutti.cli.__path__):
        importlib.import_module(f"tutti.cli.{module.name}")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 3)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        for line in sys.stdin.read().splitlines():
            arguments = json.loads(line)
            code = _run_in_child(run, arguments, out, err)
            texts = {"out": out.read_text(), "err": err.read_text()}
            print(json.dumps({"arguments": arguments, "code": code, **texts}), flush=True)


if __name__ == "__main__":
    _serve()
