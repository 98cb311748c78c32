"""Which samples a rank predicts: batches of consecutive samples, dealt out in turn.

Batch i is samples i·B .. i·B + B − 1, however many ranks there are. So the model computes the same
batches on one rank and on eight, and where each rank holds the whole model, to the same bits. A
rank takes `run` batches in a row before the next one's turn; what all ranks made in one turn is a
contiguous part of the data set, and can be written in order.

    B = 2, run = 2, 2 ranks      rank 0: 0 1  2 3     8 9
                                 rank 1:          4 5  6 7     10 11
"""

import torch
from torch import Tensor

from tutti.data.dataset import Pair, Samples

# Batches between two exchanges: few enough to bound what waits, enough to make waiting rare.
LONGEST_RUN = 8


class Deal:
    """How many turns there are, and who takes which batches in them; the same on every rank."""

    def __init__(self, samples: int, batch: int, ranks: int) -> None:
        self.samples, self.batch, self.ranks = samples, batch, ranks
        batches = -(-samples // batch)
        # A small data set is spread evenly rather than given to the first ranks.
        self.run = min(LONGEST_RUN, max(1, -(-batches // ranks)))
        self.turns = -(-batches // (self.run * ranks))

    def first(self, turn: int, rank: int) -> int:
        """The first sample of a rank's turn."""
        return min(self.samples, (turn * self.ranks + rank) * self.run * self.batch)

    def count(self, turn: int, rank: int) -> int:
        """The samples of a rank's turn: fewer, or none, at the end."""
        return min(self.samples, self.first(turn, rank) + self.run * self.batch) - self.first(
            turn, rank
        )

    def total(self, rank: int) -> int:
        """All samples of a rank."""
        return sum(self.count(turn, rank) for turn in range(self.turns))


class DealtSamples(Samples):
    """The samples of one rank, in its order: what its loader reads from first to last."""

    def __init__(self, samples: Samples, deal: Deal, rank: int) -> None:
        self.samples, self.deal, self.rank = samples, deal, rank

    def __len__(self) -> int:
        return self.deal.total(self.rank)

    def fetch(self, indices: Tensor) -> Pair:
        a_turn = self.deal.run * self.deal.batch
        turn = torch.div(indices, a_turn, rounding_mode="floor")
        return self.samples.fetch(indices + (turn * (self.deal.ranks - 1) + self.rank) * a_turn)

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self.samples.prepare(inputs, targets)

    def on(self, device: torch.device) -> "DealtSamples":
        """The same, with the whole data set on the device."""
        return DealtSamples(self.samples.on(device), self.deal, self.rank)
