"""A GPT with RMSNorm before attention and MLP, rotary positions, grouped-query attention, SwiGLU.

SwiGLU reaches a lower loss than GELU with the same number of parameters and FLOPs (Shazeer, arXiv
2002.05202). Sharding rules and pipeline stages refer to the modules by these names:

    embed
    blocks.N.attention_norm   blocks.N.attention.{wq,wk,wv,wo}
    blocks.N.mlp_norm         blocks.N.mlp.{gate,up,down}
    norm
    head

A pipeline stage sets embed, norm or head to None and deletes entries of blocks; forward skips them.
`blocks` is a ModuleDict, so that the names of the remaining blocks do not change.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.models.config import GPTConfig


class LayerCache:
    """Keys and values of one attention layer. The first call of `extend` allocates memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens. Return the keys and values of all tokens.

        Shapes are (batch, heads, tokens, head_dim). Under tp, these are the heads of this rank.
        """
        batch, heads, new, size = keys.shape
        end = self.length + new
        if end > self.capacity:
            raise ValueError(
                f"gpt: {end} tokens exceed the key-value cache of {self.capacity}. Use a larger "
                "capacity, up to max_seq_len."
            )
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty(batch, heads, self.capacity, size)
            self._values = values.new_empty(batch, heads, self.capacity, size)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The key-value caches of a model's blocks. A pipeline stage caches only its own blocks.

        cache = KVCache(capacity=64)
        with torch.no_grad():
            logits = model(prompt, cache=cache)           # all tokens of the prompt
            logits = model(next_token, cache=cache)       # then one token at a time

    A cache is for inference only, because its tensors are written in place. All sequences of a
    batch must have the same length.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"gpt: the capacity of a KVCache must be at least 1, got {capacity}")
        self.capacity = capacity
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """Return the cache of one block."""
        return self._layers.setdefault(name, LayerCache(self.capacity))

    @property
    def length(self) -> int:
        """The number of tokens that every block has cached."""
        return min((layer.length for layer in self._layers.values()), default=0)


class Rotary(nn.Module):
    """Rotates elements i and i + half of each head by the angle position × theta^(-i / half).

    Here, half is head_dim / 2.

    Blocks get this module as an argument, and not the tables cos and sin, because FSDP would cast
    the tables to bfloat16, which cannot represent the difference between neighbouring angles.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.theta = config.rope_theta
        shape = (config.max_seq_len, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)

    def init_weights(self) -> None:
        """Fill the tables with angles computed in float64.

        In float32, an angle above 1000 would be exact to only about three decimal places.
        """
        length, half = self.cos.shape
        exponents = torch.arange(half, dtype=torch.float64, device="cpu") / half
        positions = torch.arange(length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.theta**-exponents)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate x, which has shape (batch, seq, heads, head_dim).

        The rotation is computed in the dtype of the tables. `start` is the position of the first
        token of x. Earlier tokens are in the cache.
        """
        end = start + x.size(1)
        if end > self.cos.size(0):
            raise ValueError(
                f"gpt: a sequence of {end} tokens is longer than max_seq_len "
                f"{self.cos.size(0)}. Use shorter sequences or max_seq_len {end}."
            )
        cos, sin = self.cos[start:end, None], self.sin[start:end, None]  # broadcast over heads
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention. Each key and value head is shared by heads / kv_heads query heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.key_value_heads != config.heads
        kv_dim = config.key_value_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        # The number of heads is -1 (inferred), because under tp a rank holds only some heads.
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        start = 0 if cache is None else cache.length
        q, k = rotary(q, start), rotary(k, start)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = None
        if cache is not None and start == 0:
            cache.extend(k, v)
        elif cache is not None:
            k, v = cache.extend(k, v)
            new, total = q.size(2), k.size(2)
            if new > 1:  # a single new token attends to all keys
                mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(start)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=start == 0, enable_gqa=self.grouped
        )
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) × up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then MLP. Each reads the normalised residual stream and adds to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        # Hooks of tensor parallelism process positional arguments, so the cache is a keyword.
        x = x + self.attention(self.attention_norm(x), rotary, cache=cache)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Maps tokens to logits. Between pipeline stages, inputs and outputs are hidden states."""

    cuttable = True  # can be cut into pipeline stages, because forward skips missing modules

    embed: nn.Embedding | None
    norm: nn.RMSNorm | None
    head: nn.Linear | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # only init_weights draws random numbers
            self.embed = nn.Embedding(config.vocab_size, config.dim)
            self.rotary = Rotary(config)
            self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.to_empty(device=device)
        self.init_weights()

    def init_weights(self) -> None:
        """Set every weight and table, and tie the head to the embedding if `config.tied`.

        Call it again after `to_empty`, which separates tied parameters. Matrices are drawn from a
        normal distribution with standard deviation config.init_std. For wo and down, which write to
        the residual stream, the standard deviation is divided by √(2 layers), so that the variance
        of the stream does not grow with depth.
        """
        for name, module in self.named_modules():
            if not (name == "head" and self.config.tied and self.embed is not None):
                self.init_module(name, module)
        if self.config.tied and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def init_module(self, name: str, module: nn.Module) -> None:
        """Set the weights or tables of one module. `name` is its name in the whole model."""
        if isinstance(module, Rotary):
            module.init_weights()
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            writes_to_residual = name.endswith(("attention.wo", "mlp.down"))
            scale = (2 * self.config.layers) ** -0.5 if writes_to_residual else 1.0
            nn.init.normal_(module.weight, std=self.config.init_std * scale)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Map tokens (batch, seq) or hidden states (batch, seq, dim) to logits or hidden states.

        With a cache, `x` contains only the tokens that follow the cached tokens, and their keys and
        values are appended to the cache.
        """
        if self.embed is not None:
            x = self.embed(x)
        for name, block in self.blocks.items():
            x = block(x, self.rotary, cache=None if cache is None else cache.layer(name))
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        return x
