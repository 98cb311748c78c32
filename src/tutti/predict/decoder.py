"""A GPT that is fed piece by piece, spread over ranks in any layout.

    tp     every rank has its own heads, and their keys and values; logits are gathered
    shard  a block's parameters are gathered when it runs: all data ranks must run equally often
    pp     hidden states hop from stage to stage; each stage has the caches of its own blocks

The ranks of one data rank (those that differ in tp and pp) are a team: they work on the same
prompts. One of them has the logits and picks the tokens, and tells the others.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.models.kv_cache import KVCache
from tutti.parallel.engine import Engine


class Decoder:
    """The model of this rank's team. What it is fed goes on from what it was fed before."""

    def __init__(self, engine: Engine, width: int, dtype: torch.dtype) -> None:
        # The engine has placed the model; here it runs by itself, with its cache.
        self.engine, self.model, self.grid = engine, engine.model, engine.grid
        self.width, self.dtype, self.device = width, dtype, engine.world.device
        grid = engine.grid
        self.stage, self.stages = grid.rank("pp"), grid.layout.pp
        self._cache: KVCache | None = None

    @property
    def picks(self) -> bool:
        """Whether this rank gets the logits and picks the tokens of its team."""
        return self.stage == self.stages - 1 and self.grid.rank("tp") == 0

    def begin(self, capacity: int) -> None:
        """Forget what was fed, and make room for so many tokens."""
        self._cache = KVCache(capacity)

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor | None:
        """The logits after the last of these tokens (rows, new), on the last stage; else None."""
        hidden = tokens.to(self.device)
        if self.stage > 0:
            hidden = torch.empty(*tokens.shape, self.width, dtype=self.dtype, device=self.device)
            dist.recv(hidden, group=self.grid.group("pp"), group_src=self.stage - 1)
        outputs: Tensor = self.model(hidden, cache=self._cache)
        if self.stage < self.stages - 1:
            dist.send(outputs.contiguous(), group=self.grid.group("pp"), group_dst=self.stage + 1)
            return None
        last = outputs[:, -1]
        return last.full_tensor() if isinstance(last, DTensor) else last

    def tell(self, tokens: list[int]) -> list[int]:
        """The tokens that the picking rank of the team has, on all of its ranks."""
        told = torch.tensor(tokens, device=self.device)
        if self.grid.layout.tp > 1 and self.stage == self.stages - 1:
            dist.broadcast(told, group=self.grid.group("tp"), group_src=0)
        if self.stages > 1:
            dist.broadcast(told, group=self.grid.group("pp"), group_src=self.stages - 1)
        return told.tolist()
