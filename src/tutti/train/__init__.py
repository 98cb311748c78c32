"""Training: recipe, initialisation, step, loop, checkpoints, telemetry.

The module is callable: `tutti.train("lenet", ranks=2)` trains a recipe.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **values: Any) -> dict[str, Any]:
        """Train a recipe. See `tutti.train.train_run.train` for the arguments."""
        from tutti.train.train_run import train

        return train(*arguments, **values)


sys.modules[__name__].__class__ = _CallableModule
