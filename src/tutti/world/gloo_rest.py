"""The end of a process that used gloo. It imports the standard library alone, for those who cannot
import tutti: see profile/startup."""

import time
from pathlib import Path

_PATIENCE_SECONDS = 5.0  # a thread of the program's own may keep them busy to its very end


def let_gloo_rest() -> None:
    """Wait until gloo's threads rest, some seconds at most; returns at once where there are none.

    A gloo thread lets go of its last operation, and of Python objects with it, a moment after the
    operation's result is known. Should the interpreter end just then, torch aborts the process
    ("terminate called without an active exception"), destroy_process_group or not: a DDP model
    keeps the group, and its threads, alive.
    """
    resting, end = 0, time.monotonic() + _PATIENCE_SECONDS
    while resting < 2 and time.monotonic() < end and (states := _states()):
        resting = 0 if "R" in states else resting + 1
        time.sleep(0.01)  # also lets them have Python's lock


def _states() -> list[str]:
    """One letter, as of /proc, for each thread of gloo."""
    threads = Path("/proc/self/task").glob("*")  # none where there is no /proc
    gloo = [thread for thread in threads if _read(thread / "comm").startswith("pt_gloo")]
    return [_read(thread / "stat").rpartition(")")[2].strip()[:1] for thread in gloo]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended meanwhile
        return ""
