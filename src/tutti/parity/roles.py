"""What a parameter is in its model: embedding, norm, head, or its name without the numbers."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, _BatchNorm)
_HEADS = ("head", "lm_head", "output", "classifier", "fc")


def roles_of(model: nn.Module) -> dict[str, str]:
    """The role of every parameter, by its name."""
    aliases = aliases_of(model)
    roles = {}
    for path, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            if aliases[name] in roles:
                roles[aliases[name]] = "tied embedding"
            elif isinstance(module, nn.Embedding):
                roles[name] = "embedding"
            elif isinstance(module, _NORMS):
                roles[name] = "norm"
            elif path in _HEADS:
                roles[name] = "head"
            else:
                roles[name] = _without_numbers(path.split(".")) or own
    return roles


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter → the first of its names: a tied one has several."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _without_numbers(words: Sequence[str]) -> str:
    """blocks.3.attention.wq → attention.wq: the last two names of the way there."""
    return ".".join([word for word in words if not word.isdecimal()][-2:])
