"""tutti takes a PyTorch model from one device to many, proves it, and explains the speed.

Importing this package imports neither torch nor its subpackages: names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.parallel.apply import parallelize
    from tutti.parallel.layout import Layout
    from tutti.train.checkpoint import Checkpoints
    from tutti.train.own_loop import Meter, loader
    from tutti.train.recipe import Recipe, read_recipe
    from tutti.world.errors import UsageError
    from tutti.world.exchange import check_same
    from tutti.world.spawn import RankFailed, spawn
    from tutti.world.world import World, init

__version__ = "0.2.0"
__all__ = [
    "Checkpoints",
    "Layout",
    "Meter",
    "RankFailed",
    "Recipe",
    "UsageError",
    "World",
    "__version__",
    "check_same",
    "init",
    "loader",
    "parallelize",
    "read_recipe",
    "spawn",
]

_MODULES = {
    "Checkpoints": "tutti.train.checkpoint",
    "Layout": "tutti.parallel.layout",
    "Meter": "tutti.train.own_loop",
    "RankFailed": "tutti.world.spawn",
    "Recipe": "tutti.train.recipe",
    "UsageError": "tutti.world.errors",
    "World": "tutti.world.world",
    "check_same": "tutti.world.exchange",
    "init": "tutti.world.world",
    "loader": "tutti.train.own_loop",
    "parallelize": "tutti.parallel.apply",
    "read_recipe": "tutti.train.recipe",
    "spawn": "tutti.world.spawn",
}
_SUBPACKAGES = ("comm", "profile", "train")  # tutti.comm.all_reduce(…), tutti.train(…)


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        return import_module(f"tutti.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'tutti' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    if name == "init":  # the room `world` cannot import the room `observe`
        return import_module("tutti.observe.recorder").recorded(value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
