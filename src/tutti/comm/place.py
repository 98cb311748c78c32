"""Where a thread is in the user's code, and a note of it once a second for whoever asks later."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"
_SECONDS = 1.0

_sinks: list[Callable[[str], None]] = []
_noting_in: int | None = None  # the process whose thread takes notes: a fork has none


def is_ours(filename: str) -> bool:
    """Whether a file belongs to tutti.comm, torch or Python's start: nobody's bug is there."""
    return filename.startswith((_OURS, "<frozen")) or _TORCH in filename


def outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the user's."""
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def shown_path(filename: str) -> str:
    """A path as a person would write it: from the working directory where it lies below that."""
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:
        return filename
    return filename.removeprefix(here)


def describe(frame: FrameType | None) -> str:
    """`train.py:88 in step` for the innermost frame that is the user's."""
    theirs = outside(frame)
    if theirs is None:
        return "nowhere"
    code = theirs.f_code
    return f"{shown_path(code.co_filename)}:{theirs.f_lineno} in {code.co_name}"


def add_sink(sink: Callable[[str], None]) -> None:
    """Give every note to this function, too."""
    if sink not in _sinks:
        _sinks.append(sink)


def start_noting_places() -> None:
    """Note from now on, once a second, where the main thread is. Safe to call again.

    The notes go to the ledger of operations, where other processes can read them, so that a
    timeout can say where in its code a late rank was.
    """
    global _noting_in
    if _noting_in == os.getpid():
        return
    _noting_in = os.getpid()
    threading.Thread(target=_note_places, name="tutti-places", daemon=True).start()


def _note_places() -> None:
    main = threading.main_thread().ident
    while main is not None:
        text = describe(sys._current_frames().get(main))
        for sink in list(_sinks):
            sink(text)
        time.sleep(_SECONDS)
