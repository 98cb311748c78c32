"""Every rank's value to every rank, as JSON.

torch's object collectives unpickle what a peer sent, which lets a peer run code; JSON does not.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.world.errors import RanksDiffer
from tutti.world.world import World


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; [value] without a process group."""
    if not dist.is_initialized():
        return [value]
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


_CHUNK_ELEMENTS = 1 << 24  # bounds the memory of hashing a large parameter


def check_same(
    world: World, *, recipe: Mapping[str, Any] | None = None, model: nn.Module | None = None
) -> None:
    """Raise RanksDiffer, naming the odd rank out, unless all ranks have the same recipe and model.

    recipe: anything that JSON can write. model: its parameters and buffers, as they are now.
    Call it on every rank. Versions were compared when the world started.
    """
    items: dict[str, int] = {}
    if recipe is not None:
        items["recipe"] = _hash_text(json.dumps(recipe, sort_keys=True, default=str))
    if model is not None:
        items["parameters"] = _hash_tensors(model)
    mine = torch.tensor(list(items.values()), dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    for column, item in enumerate(items):
        hashes = [int(row[column]) for row in everyone]
        usual, _ = Counter(hashes).most_common(1)[0]
        odd = [rank for rank, seen in enumerate(hashes) if seen != usual]
        if odd:
            # All ranks come here together, so they may exchange what exactly differs.
            parts = _recipe_parts(recipe) if item == "recipe" else _tensor_parts(model)
            raise RanksDiffer(_message(item, odd, usual, hashes, gather_json([world.host, parts])))


def _message(
    item: str, odd: list[int], usual: int, hashes: list[int], told: list[tuple[str, dict[str, str]]]
) -> str:
    host, parts = told[odd[0]]
    expected = told[hashes.index(usual)][1]
    names = [name for name in {**expected, **parts} if expected.get(name) != parts.get(name)]
    where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    who = f"rank {odd[0]} on {host}"
    if len(odd) > 1:
        who = f"ranks {', '.join(map(str, odd))} (rank {odd[0]} is on {host})"
    cure = {
        "recipe": "start every rank with the same flags and recipe file",
        "parameters": "seed every rank alike before the model is built, or broadcast from rank 0",
    }[item]
    return (
        f"the {item} of {who} differ{'s' * (item == 'recipe')} from the other "
        f"{len(hashes) - len(odd)}, in {where}: {cure}"
    )


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _recipe_parts(recipe: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: json.dumps(value, default=str) for name, value in (recipe or {}).items()}


def _tensor_parts(model: nn.Module | None) -> dict[str, str]:
    if model is None:
        return {}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: str(_hash_tensor(tensor)) for name, tensor in tensors}


def _hash_tensors(model: nn.Module) -> int:
    return _hash_text(json.dumps(_tensor_parts(model)))


def _hash_tensor(tensor: torch.Tensor) -> int:
    """A hash of a tensor's bits, computed where it lives.

    Every element's bits are multiplied by an odd number that depends on its place, and summed
    modulo 2^64: whole numbers, so that the order of summation does not matter, on GPU either.
    """
    if tensor.is_meta:  # not there yet: only its shape can differ
        return _hash_text(f"{tuple(tensor.shape)} {tensor.dtype} meta")
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=chunk.device)
        weights = (place * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01) | 1
        total += int(((chunk + 1) * weights).sum())
    return _hash_text(f"{tuple(tensor.shape)} {tensor.dtype} {total % (1 << 64)}")
