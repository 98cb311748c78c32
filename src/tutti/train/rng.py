"""The state of all random generators that a training step may draw from, as tensors.

Python's `random`, numpy's global generator, torch's on the CPU and on the current GPU. Two ranks
draw different numbers (dropout), so that each has a state of its own.
"""

import hashlib
import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

# The Mersenne Twister, in Python and numpy: 624 words of 32 bits and the position in them. We add
# whether a second normal number is kept from the last draw, and the bits of that number.
_WORDS = 624


def rng_state() -> dict[str, torch.Tensor]:
    """This process' generators: `python`, `numpy`, `cpu` and, with a GPU, `cuda`."""
    _, words, kept = random.getstate()
    state = {
        "cpu": torch.get_rng_state(),
        "python": _twister([*words], kept),
    }
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        inner = numpy["state"]
        words = [*inner["key"].tolist(), inner["pos"]]
        state["numpy"] = _twister(words, numpy["gauss"] if numpy["has_gauss"] else None)
    if _uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Put the generators back to what `rng_state` returned; those not in `state` stay."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "python" in state:
        words, kept = _twister_parts(state["python"])
        random.setstate((3, tuple(words), kept))
    if "numpy" in state:
        words, kept = _twister_parts(state["numpy"])
        np.random.set_state(
            (
                "MT19937",
                np.array(words[:-1], dtype=np.uint32),
                words[-1],
                int(kept is not None),
                kept or 0.0,
            )
        )
    if "cuda" in state and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*reason: object) -> int:
    """Seed all generators from what `reason` says, the same on every machine; returns the seed."""
    digest = hashlib.blake2b(repr(reason).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # the GPUs' generators, too
    return seed


def _uses_cuda() -> bool:
    # A program on the CPU, beside a GPU, should not get a context there by asking.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _twister(words: list[int], kept: float | None) -> torch.Tensor:
    bits = struct.unpack("<q", struct.pack("<d", kept or 0.0))[0]
    return torch.tensor([*words, int(kept is not None), bits], dtype=torch.int64)


def _twister_parts(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, is_kept, bits = state.tolist()
    # numpy would believe any position, and read from there.
    if len(words) != _WORDS + 1 or not 0 <= words[-1] <= _WORDS:
        raise ValueError("this is not the state of a Mersenne Twister")
    kept: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return words, kept if is_kept else None
