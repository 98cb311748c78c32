"""A tensor that lies in pieces on several ranks: this rank's piece, or all of them together."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece, without its history; a plain tensor is its own."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(outputs: Any) -> Any:
    """Logits that are split by words, put together."""
    return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs
