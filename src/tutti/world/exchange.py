"""Every rank's value to every rank, as JSON.

torch's object collectives unpickle what a peer sent, which lets a peer run code; JSON does not.
"""

import json
import time
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)])
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(each) for each in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded)
    return [
        json.loads(bytes(text[: int(length)].numpy()))
        for text, length in zip(texts, lengths, strict=True)
    ]


class RanksMissing(Exception):
    """Some ranks wrote no value within the timeout; `ranks` lists them."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"no value from rank {', '.join(map(str, ranks))}")
        self.ranks = ranks


def gather_json_from_store(
    store: dist.Store, key: str, value: Any, rank: int, size: int, timeout: float
) -> list[Any]:
    """Every rank's value, in rank order, exchanged through `store`: works before any process group.

    All ranks pass the same `key`, and a key is used once. Also a barrier: no rank returns before
    all have written. Raises RanksMissing after `timeout` seconds.
    """
    keys = [f"{key}/{peer}" for peer in range(size)]
    store.set(keys[rank], json.dumps(value))
    deadline = time.monotonic() + timeout
    pause = 0.0002
    # store.wait() cannot be interrupted by Ctrl-C and does not say which keys are missing.
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RanksMissing([peer for peer, each in enumerate(keys) if not store.check([each])])
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return [json.loads(text) for text in store.multi_get(keys)]
