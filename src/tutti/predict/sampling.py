"""Which token comes next: chance that depends on the seed, the prompt and the position alone.

No generator has a state that ranks, batches or devices could advance differently: the random
number of a token is a hash of (seed, index of the prompt, position). The draw is made in float64
on the CPU. So the same logits give the same text in every layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tutti.data.sampler import hash_integers
from tutti.world.errors import UsageError

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How to choose among the tokens that may follow."""

    temperature: float = 0.8
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 40
    """Only the so many likeliest tokens; 0: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature:g}: use 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: use 1 or more, or 0 for all tokens")

    def pick(self, logits: Tensor, prompts: Sequence[int], position: int) -> list[int]:
        """A token for each row of logits (rows, vocabulary): those of these prompts, in turn."""
        table = logits.double().cpu().numpy()
        if not np.isfinite(table).all():
            raise UsageError(
                "the model's logits are not finite: it has diverged, use another --step"
            )
        return [
            self._draw(row, uniform(self.seed, prompt, position))
            for row, prompt in zip(table, prompts, strict=True)
        ]

    def _draw(self, logits: Row, chance: float) -> int:
        if self.temperature == 0:
            return int(logits.argmax())  # of equal ones the first
        # The largest is taken off first: a temperature near 0 then gives 0 and -inf, not NaN.
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max()) / self.temperature
        if 0 < self.top_k < len(scaled):
            least = np.partition(scaled, -self.top_k)[-self.top_k]
            scaled = np.where(scaled >= least, scaled, -np.inf)
        # A probability is as wide as its token's part of the line from 0 to their sum.
        edges = np.exp(scaled).cumsum()
        found = int(np.searchsorted(edges, chance * edges[-1], side="right"))
        return min(found, int(np.flatnonzero(scaled > -np.inf)[-1]))  # where the product rounds up


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number from 0 to below 1, the same on every machine."""
    return (hash_integers(seed, prompt, position) >> 11) / (1 << 53)
