"""Plain models without distributed code: LeNet, WideResNet, EfficientNetV2 and a GPT.

The configs do not import torch, so that command lines are built quickly. Model classes, which
import torch, are imported on first use. `init_weights()` sets every parameter and buffer of a
model, even if the model was built on the meta device and moved with `to_empty`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tutti.models.config import EfficientNetConfig, GPTConfig, LeNetConfig, WideResNetConfig

if TYPE_CHECKING:
    from tutti.models.efficientnet import EfficientNet
    from tutti.models.gpt import GPT, KVCache
    from tutti.models.lenet import LeNet
    from tutti.models.wideresnet import WideResNet

__all__ = ["GPT", "EfficientNet", "EfficientNetConfig", "GPTConfig", "KVCache"]
__all__ += ["LeNet", "LeNetConfig", "WideResNet", "WideResNetConfig"]

_MODULES = {
    "EfficientNet": "tutti.models.efficientnet",
    "GPT": "tutti.models.gpt",
    "KVCache": "tutti.models.gpt",
    "LeNet": "tutti.models.lenet",
    "WideResNet": "tutti.models.wideresnet",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
