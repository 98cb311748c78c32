"""Key-value cache of a GPT: keys and values of earlier tokens are not computed again.

Without the cache the n-th token costs a forward pass over n tokens, with it over one. The memory is
2 × layers × capacity × kv_heads × head_dim elements per sequence.
"""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one attention layer; allocated at the first `extend`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, (batch, heads, new, head_dim); returns all.

        The number of heads is that of `keys`: under tensor parallelism, this rank's heads.
        """
        batch, heads, new, size = keys.shape
        end = self.length + new
        if end > self.capacity:
            raise ValueError(
                f"gpt: {end} tokens exceed the key-value cache of {self.capacity}: use a larger "
                "capacity, up to max_seq_len"
            )
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty(batch, heads, self.capacity, size)
            self._values = values.new_empty(batch, heads, self.capacity, size)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of a model's blocks, by name; a pipeline stage uses those of its own blocks.

        cache = KVCache(capacity=64)
        with torch.no_grad():
            logits = model(prompt, cache=cache)           # all tokens of the prompt
            logits = model(next_token, cache=cache)       # then one token at a time

    For inference only: tensors are written in place. All sequences of a batch have the same length.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a key-value cache of {capacity} tokens: use a capacity of 1 or more")
        self.capacity = capacity
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """The cache of one block."""
        if name not in self._layers:
            self._layers[name] = LayerCache(self.capacity)
        return self._layers[name]

    @property
    def length(self) -> int:
        """Tokens in the cache of every block; 0 before the first."""
        return min((layer.length for layer in self._layers.values()), default=0)


def causal_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """Which of `total` keys each of the last `new` queries may attend to; None for all."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
