"""Exchange small values between ranks as JSON. Object collectives would unpickle from peers."""

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(each) for each in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = text.to(device)
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded)
    return [
        json.loads(bytes(text[: int(length)].cpu().numpy()))
        for text, length in zip(texts, lengths, strict=True)
    ]
