"""The other ranks, if there are any: a program without a world is rank 0 of 1."""

import sys
from typing import Any

import torch.distributed as dist

from tutti.world.exchange import gather_json


def rank() -> int:
    """The number of this process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; JSON."""
    return gather_json(value) if dist.is_initialized() else [value]


def say(text: str) -> None:
    """Print a note on standard error, once for all ranks."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)
