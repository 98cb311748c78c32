"""A GPT: RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU.

SwiGLU instead of GELU: with equal parameters and FLOPs it reaches a lower loss (Shazeer, arXiv
2002.05202), and tensor parallelism splits gate and up by columns, down by rows, as in attention.

Sharding rules, tensor and pipeline parallelism address the modules by name:

    embed
    blocks.N.attention_norm   blocks.N.attention.{wq,wk,wv,wo}
    blocks.N.mlp_norm         blocks.N.mlp.{gate,up,down}
    norm
    head

A pipeline stage sets the modules of other stages to None (embed, norm, head) or deletes them
(entries of blocks, a dict, so that the remaining names do not change); forward skips them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.models.config import GPTConfig


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


class Rotary(nn.Module):
    """Rotates each pair (i, i + half) of a head by position × theta^(-i / half).

    Blocks receive this module, not the tables: FSDP casts floating-point arguments to its compute
    dtype, and bfloat16 cannot represent the difference of neighbouring angles.
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
        """Fill the tables. In float64: at thousands of radians float32 keeps three decimals."""
        length, half = self.cos.shape
        exponents = torch.arange(half, dtype=torch.float64, device="cpu") / half
        positions = torch.arange(length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.theta**-exponents)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """(batch, seq, heads, head_dim) → the same, rotated; computed in the tables' type.

        start: the position of the first token; a cache holds the tokens before it.
        """
        end = start + x.size(1)
        if end > self.cos.size(0):
            raise ValueError(
                f"gpt: a sequence of {end} tokens is longer than max_seq_len "
                f"{self.cos.size(0)}: use shorter sequences or max_seq_len {end}"
            )
        cos, sin = self.cos[start:end, None], self.sin[start:end, None]  # broadcast over heads
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves heads / kv_heads query heads."""

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
        # The number of heads is inferred: under tensor parallelism a rank holds some of them.
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        start = 0 if cache is None else cache.length
        q, k = rotary(q, start), rotary(k, start)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = None
        if cache is not None and start:  # new tokens attend to cached ones: the mask is not square
            k, v = cache.extend(k, v)
            mask = causal_mask(q.size(2), k.size(2), q.device)
        elif cache is not None:
            cache.extend(k, v)
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
    """Attention, then MLP, each on the normalised residual stream and added back to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        # By keyword: tensor-parallel rules say how each positional argument is sharded.
        x = x + self.attention(self.attention_norm(x), rotary, cache=cache)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Tokens in, logits out; between pipeline stages, hidden states in and out."""

    cuttable = True  # for pipelines: forward skips missing modules

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
        """Set every weight and table; to be called again after `to_empty`, which forgets ties.

        All matrices are normal with config.init_std; wo and down, which write to the residual
        stream, get it divided by √(2 layers), so that its variance does not grow with depth. The
        head is not zero: then no gradient would reach the blocks in the first step.
        """
        for name, module in self.named_modules():
            if not (name == "head" and self.config.tied and self.embed is not None):
                self.init_module(name, module)
        if self.config.tied and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def init_module(self, name: str, module: nn.Module) -> None:
        """Set the weights or tables of one module, by its name in the whole model."""
        if isinstance(module, Rotary):
            module.init_weights()
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            writes = name.endswith(("attention.wo", "mlp.down"))
            scale = (2 * self.config.layers) ** -0.5 if writes else 1.0
            nn.init.normal_(module.weight, std=self.config.init_std * scale)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Tokens (batch, seq), or hidden states (batch, seq, dim) → logits or hidden states.

        With a cache, `x` holds the tokens after the cached ones and is appended to the cache.
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
