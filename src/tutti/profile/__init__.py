"""Capture a trace, read traces, explain a step, find the rank that is late.

    with tutti.profile("runs/mine/traces") as p:
        for batch in loader:
            ...
            p.step()

The room can be called, because the shortest way to say "profile this" should work; what a call
returns is a `Capture`.
"""

import sys
from os import PathLike
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, directory: str | PathLike[str], **options: Any) -> Any:
        """Capture traces into a directory: see `Capture` for the options."""
        from tutti.profile.capture import Capture

        return Capture(directory, **options)


sys.modules[__name__].__class__ = _Room
