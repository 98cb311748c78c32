"""Layouts, and the techniques that distribute a model over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.parallel.apply import build_engine, parallelize
    from tutti.parallel.engine import Engine
    from tutti.parallel.layout import EngineOptions, Layout, ParallelOptions

__all__ = ["Engine", "EngineOptions", "Layout", "ParallelOptions", "build_engine", "parallelize"]

_MODULES = {
    "Engine": "tutti.parallel.engine",
    "EngineOptions": "tutti.parallel.layout",
    "Layout": "tutti.parallel.layout",
    "ParallelOptions": "tutti.parallel.layout",
    "build_engine": "tutti.parallel.apply",
    "parallelize": "tutti.parallel.apply",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tutti.parallel' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
