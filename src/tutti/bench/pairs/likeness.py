"""How far two results are apart: tensors, or lists, tuples and dicts of tensors and numbers."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tutti.world.errors import UsageError

Snapshot = tuple[list[Any], str]


def snapshot(result: Any) -> Snapshot:
    """A copy on the CPU: the next call may write into the same tensors."""
    leaves, form = tree_flatten(result)
    return [_kept(leaf) for leaf in leaves], str(form)


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    if not isinstance(leaf, bool | int | float | complex):
        raise UsageError(
            f"a side returned {type(leaf).__name__}, which cannot be compared: return tensors or "
            "numbers, or lists, tuples and dicts of them"
        )
    return leaf


def difference(baseline: Snapshot, optimized: Snapshot) -> float:
    """The largest |a − b| / max |a| over all tensors of two snapshots; inf where forms differ.

    A tensor is measured by its own largest value, so that a small one is not lost beside a large
    one. NaN is like nothing, not even NaN: a result that holds one proves nothing.
    """
    (ours, our_form), (theirs, their_form) = baseline, optimized
    if our_form != their_form:
        return math.inf
    return max(map(_apart, ours, theirs), default=0.0)


def _apart(one: Any, other: Any) -> float:
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    apart = float((one.to(wide) - other.to(wide)).abs().max())
    if apart == 0:
        return 0.0
    scale = float(one.to(wide).abs().max())
    return apart / scale if scale > 0 and not math.isnan(apart) else math.inf
