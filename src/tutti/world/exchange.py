"""Exchanges small JSON values between ranks, and checks that ranks have the same recipe and model.

torch's object collectives unpickle the bytes that a peer has sent. Unpickling can run code that the
peer chose, and parsing JSON cannot.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.world.errors import RanksDiffer, name_ranks

if TYPE_CHECKING:
    from tutti.world.world import World


def gather_json(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, or [value] without a process group."""
    if not dist.is_initialized():
        return [value]
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)])
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    # all_gather needs tensors of the same length. Pad with spaces, which JSON allows at the end.
    padded = bytearray(text.ljust(int(max(lengths))))
    buffer = torch.frombuffer(padded, dtype=torch.uint8)
    texts = [torch.empty_like(buffer) for _ in lengths]
    dist.all_gather(texts, buffer)
    return [json.loads(bytes(text.numpy())) for text in texts]


class RanksMissing(Exception):
    """Raised by `gather_json_from_store`: `ranks` wrote no value within the timeout."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))} wrote no value")
        self.ranks = ranks


def gather_json_from_store(
    store: dist.Store, key: str, value: Any, rank: int, size: int, timeout: float
) -> list[Any]:
    """Return every rank's value, in rank order, through `store` instead of a process group.

    All ranks must pass the same `key`, and each call needs a new key. The call is also a barrier:
    no rank returns before all ranks have written their values. Raise RanksMissing after `timeout`
    seconds.
    """
    keys = [f"{key}/{peer}" for peer in range(size)]
    store.set(keys[rank], json.dumps(value))
    deadline = time.monotonic() + timeout
    pause = 0.0002
    # store.wait() cannot be interrupted by Ctrl-C and does not report which keys are missing.
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RanksMissing([peer for peer in range(size) if not store.check([keys[peer]])])
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return [json.loads(text) for text in store.multi_get(keys)]


_CHUNK_ELEMENTS = 1 << 20  # hashing needs about 32 bytes of memory per element of a chunk
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_SHOWN_CHARACTERS = 12
_CURES = {
    "recipe": "Start every rank with the same flags and recipe file",
    "parameters": "Use the same seed on every rank before building the model, or broadcast "
    "the parameters from rank 0",
    "dataset": "Make the dataset function return the same samples on every rank: read the same "
    "files, and use generators with a fixed seed",
}


def check_same(
    world: "World",
    *,
    recipe: Mapping[str, Any] | None = None,
    dataset: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
) -> None:
    """Raise RanksDiffer, which names the rank that differs, unless all ranks pass equal arguments.

    All ranks must call this function. `recipe` and `dataset` may have any JSON values. The
    parameters and buffers of `model` are compared by a hash of their bits. The versions of torch
    and tutti are compared in tutti.init(), not here.
    """
    contents: dict[str, dict[str, str]] = {}
    for item, described in (("recipe", recipe), ("dataset", dataset)):
        if described is not None:
            contents[item] = {
                name: json.dumps(v, sort_keys=True, default=str) for name, v in described.items()
            }
    if model is not None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        contents["parameters"] = {name: str(hash_tensor(tensor)) for name, tensor in tensors}
    hashes = gather_json(
        {item: _hash_text(json.dumps(values, sort_keys=True)) for item, values in contents.items()}
    )
    for item, content in contents.items():
        by_rank = [row[item] for row in hashes]
        usual, count = Counter(by_rank).most_common(1)[0]
        different = [rank for rank, value in enumerate(by_rank) if value != usual]
        if not different:
            continue
        # All ranks have the same `hashes`, so all ranks reach this line and take part in this
        # collective.
        all_contents = gather_json([world.host, content])
        host, values = all_contents[different[0]]
        expected = all_contents[by_rank.index(usual)][1]
        names = [name for name in {**expected, **values} if expected.get(name) != values.get(name)]
        shown = [f"{name}{_both(values.get(name), expected.get(name))}" for name in names[:3]]
        where = ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        which = f"rank {different[0]} on {host}"
        if len(different) > 1:
            which = f"{name_ranks(different)} (rank {different[0]} is on {host})"
        others = "the other rank" if count == 1 else f"the other {count} ranks"
        raise RanksDiffer(
            f"the {item} of {which} differ{'s' * (item != 'parameters')} from {others}, in "
            f"{where}. {_CURES[item]}."
        )


def _both(value: str | None, expected: str | None) -> str:
    """Return both values as text for the error message, or "" for long values such as hashes."""
    longest = max(len(str(value)), len(str(expected)))
    return f" ({value}, others {expected})" if longest <= _SHOWN_CHARACTERS else ""


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def hash_tensor(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of a tensor's bits, shape and dtype, computed on its device.

    Each element's bits are multiplied by an odd number that depends on the element's position. The
    products are summed modulo 2^64. The order of summation varies on GPUs, but it does not change
    an integer sum.
    """
    if tensor.is_meta:  # a meta tensor has no values, so only shape and dtype are hashed
        return _hash_text(f"{tuple(tensor.shape)} {tensor.dtype} meta")
    flat = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = 0
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=chunk.device)
        weights = (position * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01) | 1
        total += int(((chunk + 1) * weights).sum())
    return _hash_text(f"{tuple(tensor.shape)} {tensor.dtype} {total % (1 << 64)}")
