"""Captures and reads traces, explains the time of training steps, and finds stragglers.

The module itself is callable: `tutti.profile("traces")` returns a `Capture`.
"""

import sys
from os import PathLike
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, directory: str | PathLike[str], **options: Any) -> Any:
        """Return a Capture that writes traces into a directory. See `Capture` for the options."""
        from tutti.profile.capture import Capture

        return Capture(directory, **options)


sys.modules[__name__].__class__ = _CallableModule
