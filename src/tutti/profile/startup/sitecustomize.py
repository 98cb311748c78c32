"""Runs at the start of every Python process under `tutti profile -- COMMAND`.

Python imports this file before the program. The file waits until the program imports torch, and
then adds hooks to torch's optimizers and modules. The file itself does not import torch, so a
process without torch only pays for one check per import. The file does not import tutti either, so
it also captures programs whose environment does not have tutti.
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
    """Import a module of tutti as tutti_capture.NAME. The module must not import tutti."""
    if "tutti_capture" not in sys.modules:
        package = ModuleType("tutti_capture")
        profile = os.path.dirname(_FOLDER)
        rooms = (os.path.join(os.path.dirname(profile), name) for name in ("world", "measure"))
        package.__path__ = [profile, *rooms]
        sys.modules[package.__name__] = package
    return importlib.import_module(f"tutti_capture.{name}")


def _begin_capture(settings: dict[str, Any]) -> None:
    """Start a Capture that finds the program's steps. Called after torch was imported."""
    try:
        # This prevents a crash in gloo's threads at exit. The crash would lose the trace.
        atexit.register(_load("liveness").wait_for_gloo_threads)
        _load("program_settings").watch_constructors(settings.pop("changes", {}))
        _load("capture").Capture(**settings, replace=False).follow_program()
    except Exception as error:  # the program must run even if it cannot be captured
        print(f"tutti profile: this process is not captured: {error!r}", file=sys.stderr)


class _TorchImportHook(MetaPathFinder):
    """Finds torch with the normal finders, and begins the capture after torch was imported.

    The hook stays installed until torch is really imported, because a library may only look up
    torch's module spec, to check whether torch is installed.
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
    # This file hides the environment's own sitecustomize module. Run that module now.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    _spec = PathFinder.find_spec("sitecustomize", sys.path)
    if _spec is not None and _spec.loader is not None:
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["sitecustomize"])
