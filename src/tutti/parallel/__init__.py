"""Layout, and what turns a plain model into a parallel one."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.parallel.build import build_engine
    from tutti.parallel.engine import Engine
    from tutti.parallel.layout import Layout
    from tutti.parallel.options import EngineOptions
    from tutti.parallel.parallelize import parallelize

__all__ = ["Engine", "EngineOptions", "Layout", "build_engine", "parallelize"]

_HOMES = {
    "Engine": "tutti.parallel.engine",
    "EngineOptions": "tutti.parallel.options",
    "Layout": "tutti.parallel.layout",
    "build_engine": "tutti.parallel.build",
    "parallelize": "tutti.parallel.parallelize",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti.parallel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
