"""Keys and values of the tokens so far: a GPT that goes on need not compute them again.

Without it the n-th token costs a forward pass over n tokens; with it, over one. The memory is
2 × layers × capacity × kv_heads × head_dim numbers for each sequence.
"""

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of one attention; their memory is taken when the first ones come."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens, (batch, heads, new, head_dim); returns all there are.

        The shape is that of what comes: under tensor parallelism, of this rank's heads.
        """
        batch, heads, new, size = keys.shape
        end = self.length + new
        if end > self.capacity:
            raise ValueError(
                f"gpt: {end} tokens in a key-value cache for {self.capacity}: use a larger one, up "
                "to max_seq_len"
            )
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty(batch, heads, self.capacity, size)
            self._values = values.new_empty(batch, heads, self.capacity, size)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of a model's blocks, by name: a pipeline stage fills those of its own blocks.

        cache = KVCache(capacity=64)
        with torch.no_grad():
            logits = model(prompt, cache=cache)           # all tokens of the prompt at once
            logits = model(next_token, cache=cache)       # then one by one

    For inference only: tensors are written in place. All sequences of a batch have one length.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(
                f"a key-value cache for {capacity} tokens holds nothing: use 1 or more"
            )
        self.capacity = capacity
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """The cache of one block."""
        if name not in self._layers:
            self._layers[name] = LayerCache(self.capacity)
        return self._layers[name]

    @property
    def length(self) -> int:
        """Tokens that every block has seen; 0 before the first."""
        return min((layer.length for layer in self._layers.values()), default=0)


def causal_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """Which of `total` keys each of the last `new` queries may see; None where that is all."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
