"""A GPT: RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU.

SwiGLU rather than GELU: for equal parameters and FLOPs it reaches the lower loss (Shazeer, arXiv
2002.05202), and gate and up split by columns, down by rows, as the attention's matrices do.

Plans for sharding, tensor and pipeline parallelism address the parts by name:

    embed
    blocks.N.attention_norm   blocks.N.attention.{wq,wk,wv,wo}
    blocks.N.mlp_norm         blocks.N.mlp.{gate,up,down}
    norm
    head

A pipeline stage sets the parts that it lacks to None (embed, norm, head) or deletes them (entries
of blocks, a dict, so that the names of the others stay); forward skips what is missing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.models.config import GPTConfig


class Rotary(nn.Module):
    """Rotates each pair (i, i + half) of a head by position × theta^(-i / half).

    Blocks get this module rather than the tables: FSDP casts floating-point arguments to its
    compute type, and bfloat16 cannot tell neighbouring angles apart.
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

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, heads, head_dim) → the same, rotated; computed in the tables' type."""
        length = x.size(1)
        if length > self.cos.size(0):
            raise ValueError(
                f"gpt: a sequence of {length} tokens is longer than max_seq_len "
                f"{self.cos.size(0)}: use shorter sequences or max_seq_len {length}"
            )
        cos, sin = self.cos[:length, None], self.sin[:length, None]  # broadcast over heads
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

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        # The number of heads is inferred: under tensor parallelism a rank holds some of them.
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q, k = rotary(q), rotary(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
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

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Tokens in, logits out; a pipeline stage takes and gives hidden states where it is cut."""

    cuttable = True  # forward skips the parts that are missing

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
        std = self.config.init_std
        self.rotary.init_weights()
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        if self.embed is not None:
            nn.init.normal_(self.embed.weight, std=std)
        for block in self.blocks.values():
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    writes = name in ("attention.wo", "mlp.down")
                    scale = (2 * self.config.layers) ** -0.5 if writes else 1.0
                    nn.init.normal_(module.weight, std=std * scale)
        if self.head is not None:
            if self.config.tied and self.embed is not None:
                self.head.weight = self.embed.weight
            else:
                nn.init.normal_(self.head.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, seq), or hidden states (batch, seq, dim) → logits or hidden states."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x, self.rotary)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        return x
