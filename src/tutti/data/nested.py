"""Inputs and targets that consist of one tensor, or of nested dicts, tuples or lists of tensors.

Dim 0 of every tensor is the batch dim. `call_with` passes a dict to a model by keyword, and a tuple
or list by position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Nested = Any
"""A tensor, or a dict, tuple or list of Nested."""


def tensors_of(value: Nested) -> list[Tensor]:
    """Return all tensors of a value, in a fixed order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def is_nested(value: object) -> bool:
    """Return whether a value consists of tensors only, and has at least one."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)


def map_tensors(function: Callable[[Tensor], Any], value: Nested) -> Nested:
    """Return the same structure with `function(tensor)` in place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def count_rows(value: Nested) -> int:
    """Return the number of samples, the length of dim 0."""
    return len(value) if isinstance(value, Tensor) else len(tensors_of(value)[0])


def split_rows(value: Nested, sizes: Sequence[int]) -> list[Nested]:
    """Split along dim 0 into parts of these sizes."""
    if isinstance(value, Tensor):
        return list(torch.split(value, list(sizes)))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        map_tensors(lambda t, a=start, n=size: t[a : a + n], value)  # type: ignore[misc]
        for start, size in zip(starts, sizes, strict=True)
    ]


def call_with(function: Callable[..., Any], inputs: Nested) -> Any:
    """Call a model with its inputs: a dict by keyword, a tuple or list by position."""
    if isinstance(inputs, dict):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)


def describe(value: object) -> str:
    """Return the structure and shapes of a value, for an error message."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, dict):
        return f"dict of {', '.join(map(str, value))}" if value else "an empty dict"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"({', '.join(describe(part) for part in value)})"
    return type(value).__name__
