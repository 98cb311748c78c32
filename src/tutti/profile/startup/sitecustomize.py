"""Runs at the start of every Python process under `tutti profile -- COMMAND`.

Python imports `sitecustomize` before the program. This one waits for the program to import torch,
and then asks torch to tell of optimizer steps. It imports neither torch nor tutti: a process that
does not train pays for one look at each import, and a program whose interpreter has torch but not
tutti is captured as well.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_SETTINGS = "TUTTI_PROFILE"


def _ours(name: str) -> ModuleType:
    """A file of ours that needs no other room of tutti, under a name that is not tutti's."""
    if "tutti_capture" not in sys.modules:
        room = ModuleType("tutti_capture")
        profile = os.path.dirname(_HERE)
        room.__path__ = [profile, os.path.join(os.path.dirname(profile), "world")]
        sys.modules[room.__name__] = room
    return importlib.import_module(f"tutti_capture.{name}")


def _begin(settings: dict[str, Any]) -> None:
    """torch has been imported: from now on its optimizers' steps are counted."""
    try:
        # A profile is not lost to the way its program ends.
        atexit.register(_ours("liveness").wait_for_gloo_threads)
        _ours("capture").Capture(**settings, replace=False).follow_optimizers()
    except Exception as error:  # the program must run whether or not it can be captured
        print(f"tutti profile: nothing is captured here: {error!r}", file=sys.stderr)


class _AfterTorch(MetaPathFinder):
    """Finds torch as it would be found anyway, and has something to do once it is there.

    It stays until torch is really imported: libraries look whether torch exists before that.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._looking = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_and_begin(module: ModuleType) -> None:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            execute(module)
            _begin(self.settings)

        loader.exec_module = execute_and_begin  # type: ignore[method-assign]


def _run_the_one_we_hide() -> None:
    """A sitecustomize of the environment's own still runs, as if we were not here."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get(_SETTINGS):
        sys.meta_path.insert(0, _AfterTorch(json.loads(os.environ[_SETTINGS])))
    _run_the_one_we_hide()
