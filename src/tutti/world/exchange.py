"""Exchange small values between ranks as JSON. Object collectives would unpickle from peers."""

import json
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
