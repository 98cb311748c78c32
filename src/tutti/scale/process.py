"""Programs, one after another: output into logs, Ctrl-C passed on, nothing left of them."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_TAIL_LINES = 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class Interruption:
    """Ctrl-C or SIGTERM, for as long as runs are made: `asked` for, and told to the program.

    Between programs nothing is interrupted: what was measured is read to its end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._program: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for(self, program: "subprocess.Popen[bytes]") -> int:
        """Until the program ends; returns its exit code. Nothing of it is left then."""
        self._program = program
        try:
            if self.asked:  # before there was anyone to tell
                program.send_signal(signal.SIGINT)
            return program.wait()
        finally:
            self._program = None
            _kill(program)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self._program is not None and self._program.returncode is None:
            if again:
                _kill(self._program)  # asked twice: no more patience
            else:
                self._program.send_signal(number)


def run(
    command: Sequence[str], env: Mapping[str, str], log: Path, interruption: Interruption
) -> int:
    """Run a program to its end, its output in a log; returns its exit code.

    It has a session of its own, so that a terminal's Ctrl-C comes to us alone, and once: a launcher
    that hears it ends its ranks in good order.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        program = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        return interruption.wait_for(program)


def tail(log: Path) -> str:
    """The last lines of a log."""
    with open(log, errors="replace") as lines:
        return "".join(deque(lines, maxlen=_TAIL_LINES))


def _kill(program: "subprocess.Popen[bytes]") -> None:
    """It, and what it has started in its session's first group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """In the child: whoever kills us ends the program, too. A launcher then ends its ranks."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
