"""Run a command that may hang: it writes lines, and is killed when its time is up."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

# A process stuck in the driver cannot be killed at once: it is left behind, not waited for.
_BURIAL_SECONDS = 5.0


def run_watched(command: Sequence[str], seconds: float) -> tuple[list[str], int | None]:
    """The lines it wrote, also if it had to be killed, and its exit code: None if it was."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_BURIAL_SECONDS)
        output.seek(0)
        return output.read().splitlines(), code


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours with this Python."""
    return [sys.executable, "-m", name, *arguments]
