"""Runs at the start of every Python process under `tutti profile -- COMMAND`.

Python imports this file before the program. The file waits until the program imports torch and then
hooks torch's optimizers and modules. The file does not import torch, so processes without torch
only spend one check per import. The file does not import tutti, so programs are also captured if
their environment does not have tutti.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SETTINGS = "TUTTI_PROFILE"


def _load(name: str) -> ModuleType:
    """Import a module of tutti as tutti_capture.NAME. The module must not need tutti itself."""
    if "tutti_capture" not in sys.modules:
        package = ModuleType("tutti_capture")
        profile = os.path.dirname(_FOLDER)
        rooms = (os.path.join(os.path.dirname(profile), name) for name in ("world", "measure"))
        package.__path__ = [profile, *rooms]
        sys.modules[package.__name__] = package
    return importlib.import_module(f"tutti_capture.{name}")


def _begin_capture(settings: dict[str, Any]) -> None:
    """Start a Capture that follows the program's steps. Called after torch was imported."""
    try:
        # This prevents a crash in gloo's threads at exit, which would lose the profile.
        atexit.register(_load("liveness").wait_for_gloo_threads)
        _load("program_settings").watch_constructors(settings.pop("changes", {}))
        _load("capture").Capture(**settings, replace=False).follow_program()
    except Exception as error:  # the program must run even if it cannot be captured
        print(f"tutti profile: this process is not captured: {error!r}", file=sys.stderr)


class _TorchImportHook(MetaPathFinder):
    """Finds torch as usual, and begins the capture once torch is imported.

    The hook stays installed until torch is executed, because a library may look up the spec of
    torch (to check whether torch is installed) without importing torch.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_begin(module: ModuleType) -> None:
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                execute(module)
                _begin_capture(self.settings)

            spec.loader.exec_module = execute_and_begin  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    if os.environ.get(_SETTINGS):
        sys.meta_path.insert(0, _TorchImportHook(json.loads(os.environ[_SETTINGS])))
    # Run the environment's own sitecustomize, which this file hides.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    _spec = PathFinder.find_spec("sitecustomize", sys.path)
    if _spec is not None and _spec.loader is not None:
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["sitecustomize"])
