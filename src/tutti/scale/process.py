"""One program, from its start to its end: output into a log, Ctrl-C passed on, nothing left."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

_TAIL_LINES = 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class Process:
    """`run()` ends with the program, also after Ctrl-C: then `stopped` says so.

    The program has a session of its own, so that a terminal's Ctrl-C comes to us alone, once:
    a launcher that hears it ends its ranks in good order.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command, self._env, self._log = list(command), dict(env), log
        self._started: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def run(self) -> int:
        """Returns the exit code."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        numbers = (signal.SIGINT, signal.SIGTERM)
        with open(self._log, "wb") as log:
            before = {number: signal.signal(number, self._on_signal) for number in numbers}
            try:
                self._started = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
                if self.stopped:  # the signal came before there was anyone to tell
                    self._tell(signal.SIGINT)
                return self._started.wait()
            finally:
                self._kill_what_is_left()
                for number, handler in before.items():
                    signal.signal(number, handler)

    def tail(self) -> str:
        """The last lines of its output."""
        with open(self._log, errors="replace") as log:
            return "".join(deque(log, maxlen=_TAIL_LINES))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            self._kill_what_is_left()  # asked twice: no more patience
        else:
            self.stopped = True
            self._tell(number)

    def _tell(self, number: int) -> None:
        if self._started is not None and self._started.returncode is None:
            self._started.send_signal(number)

    def _kill_what_is_left(self) -> None:
        if self._started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """In the child: whoever kills us ends the program, too. A launcher then ends its ranks."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
