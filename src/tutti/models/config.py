"""The configuration of each model, with parameter and FLOP counts. Does not import torch."""

import math
from dataclasses import dataclass
from typing import Literal


def _at_least(model: str, lowest: int, **fields: int) -> None:
    for name, value in fields.items():
        if value < lowest:
            raise ValueError(f"{model}: {name} is {value}, it must be at least {lowest}")


def _probability(model: str, **fields: float) -> None:
    for name, value in fields.items():
        if not 0 <= value < 1:
            raise ValueError(f"{model}: {name} is {value}, it must be in [0, 1)")


@dataclass(frozen=True)
class LeNetConfig:
    """LeNet with 20 and 50 channels, for square images of 4 pixels a side or more."""

    channels: int = 1
    """Channels of the input image."""
    image_size: int = 28
    """Side of the square input image, in pixels. Below 28 the convolutions are padded."""
    classes: int = 10
    """Outputs of the last layer."""

    def __post_init__(self) -> None:
        _at_least("lenet", 1, channels=self.channels, classes=self.classes)
        _at_least("lenet", 4, image_size=self.image_size)

    @property
    def padding(self) -> int:
        """Width of the zero padding of both convolutions: 0 for images of 28×28 or more, else 2.

        Without padding, two 5×5 convolutions would reduce an 8×8 image to less than one pixel. With
        a padding of 2, only the poolings reduce its size (8 → 4 → 2). The alternative, enlarging
        the image to 28×28, would make a step four times as expensive without adding information.
        """
        return 0 if self.image_size >= 28 else 2

    @property
    def feature_size(self) -> int:
        """Side of the feature map after both convolutions and poolings: 4 for 28×28 images."""
        side = self.image_size
        for _ in range(2):
            side = (side + 2 * self.padding - 4) // 2
        return side


@dataclass(frozen=True)
class WideResNetConfig:
    """WideResNet-depth-width for small images (Zagoruyko and Komodakis, arXiv 1605.07146)."""

    depth: int = 28
    """Convolutions on the longest path and the classifier: 6n + 4, for n blocks in each stage."""
    width: int = 10
    """Channels of the three stages are 16, 32 and 64 times this."""
    channels: int = 3
    """Channels of the input image."""
    classes: int = 10
    """Outputs of the last layer."""
    dropout: float = 0.0
    """Probability of dropping a value between the two convolutions of a block."""

    def __post_init__(self) -> None:
        _at_least("wideresnet", 1, width=self.width, channels=self.channels, classes=self.classes)
        _probability("wideresnet", dropout=self.dropout)
        if self.depth < 10 or (self.depth - 4) % 6:
            n = max(1, round((self.depth - 4) / 6))
            raise ValueError(
                f"wideresnet: depth is {self.depth}, it must be 6n + 4: use depth {6 * n + 4}"
            )

    @property
    def blocks_per_stage(self) -> int:
        """The n of depth = 6n + 4: three stages of n blocks with two convolutions each."""
        return (self.depth - 4) // 6


@dataclass(frozen=True)
class EfficientNetConfig:
    """EfficientNetV2 (Tan and Le, arXiv 2104.00298) with an auxiliary classifier."""

    size: Literal["s", "m", "l"] = "s"
    """21, 54 or 119 million parameters with 1000 classes."""
    channels: int = 3
    """Channels of the input image."""
    classes: int = 1000
    """Outputs of both classifiers."""
    auxiliary: bool = True
    """Add 0.3 × the output of a second classifier, on the last features at stride 16."""
    stem_stride: int = 2
    """Stride of the first convolution: 2 as published, 1 for images of about 32 pixels a side."""
    dropout: float | None = None
    """Probability of dropping a feature before the classifier; unset: 0.2, 0.3, 0.4 for s, m, l."""
    stochastic_depth: float = 0.2
    """Probability of skipping the last block for a sample; falls linearly to 0 at the first."""

    def __post_init__(self) -> None:
        if self.size not in ("s", "m", "l"):
            raise ValueError(f"efficientnet: size is {self.size!r}, it must be s, m or l")
        _at_least("efficientnet", 1, channels=self.channels, classes=self.classes)
        _at_least("efficientnet", 1, stem_stride=self.stem_stride)
        _probability(
            "efficientnet", stochastic_depth=self.stochastic_depth, dropout=self.dropout or 0.0
        )


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer. The defaults are a byte-level model that trains on a CPU."""

    vocab_size: int = 256
    """Tokens in the vocabulary; a multiple of 64 keeps the head's matrix product fast."""
    max_seq_len: int = 256
    """Longest sequence that the rotary tables cover, in tokens."""
    layers: int = 4
    """Transformer blocks."""
    dim: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads; each is dim / heads wide."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads query heads; unset: as many as heads."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; unset: 8/3 × dim, rounded up to a multiple of 64."""
    tied: bool = False
    """The head uses the embedding's weights."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths, from 2π to about 2π × rope_theta tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        _at_least("gpt", 1, vocab_size=self.vocab_size, max_seq_len=self.max_seq_len)
        _at_least("gpt", 1, layers=self.layers, dim=self.dim, heads=self.heads)
        _at_least("gpt", 1, key_value_heads=self.key_value_heads, hidden=self.hidden)
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"gpt: dim {self.dim} over {self.heads} heads is {self.dim / self.heads:g} each, "
                f"rotary positions need an even whole number: "
                f"use dim {-(-self.dim // (2 * self.heads)) * 2 * self.heads}"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"gpt: {self.heads} heads cannot share {self.key_value_heads} kv_heads evenly: "
                f"use a kv_heads that divides {self.heads}"
            )

    @classmethod
    def gpt2(cls) -> "GPTConfig":
        """The size of GPT-2 small: 124 million parameters.

        The vocabulary of 50,257 tokens is padded to 50,304 = 128 × 393.
        """
        return cls(vocab_size=50_304, max_seq_len=1024, layers=12, dim=768, heads=12, tied=True)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        """The number of key and value heads: kv_heads, or heads if kv_heads is unset."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP: mlp_dim if it is set, else 8/3 × dim.

        With 8/3 × dim, the three matrices of SwiGLU have as many weights as the two matrices of a
        GELU MLP with 4 × dim. The width is rounded up to a multiple of 64, which tensor-parallel
        ranks can split evenly and for which matrix products are fast.
        """
        return -(-8 * self.dim // (3 * 64)) * 64 if self.mlp_dim is None else self.mlp_dim

    @property
    def init_std(self) -> float:
        """Standard deviation of the initial weights: 0.5 / √dim.

        This is 0.018 at the width of GPT-2. GPT-2 used 0.02 for all widths, but narrow models learn
        measurably slower with 0.02. The first loss is about ln(vocab_size) + 1/8 at every width.
        """
        return 0.5 / math.sqrt(self.dim)

    def matmul_parameters(self) -> int:
        """Number of weights in matrix products: the projections of the blocks and the head.

        The embedding is not counted, because it is a look-up; if it is tied to the head, its
        weights are counted as the head. The gains of norms are not counted.
        """
        queries_and_output = 2 * self.dim * self.dim
        keys_and_values = 2 * self.dim * self.key_value_heads * self.head_dim
        mlp = 3 * self.dim * self.hidden
        block = queries_and_output + keys_and_values + mlp
        return self.layers * block + self.dim * self.vocab_size

    def parameters(self) -> int:
        """Number of parameters, equal to `sum(p.numel() for p in GPT(config).parameters())`."""
        norms = (2 * self.layers + 1) * self.dim
        embedding = 0 if self.tied else self.vocab_size * self.dim
        return self.matmul_parameters() + norms + embedding

    def flops_per_token(self, seq_len: int | None = None) -> int:
        """FLOPs to train on one token, forward and backward: 6 N + 12 L d s.

        N is `matmul_parameters()`. Each weight needs one multiplication and one addition in forward
        and twice as many in backward, 6 in total. L is layers, d is dim and s is the sequence
        length (unset: max_seq_len). In each layer, q·k and scores·v cost 2 d s each in forward and
        twice as much in backward, 12 d s in total. As in published figures, the attention term
        counts the whole s × s matrix although causal attention needs only half of it, and
        recomputed activations are not counted.
        """
        s = self.max_seq_len if seq_len is None else seq_len
        return 6 * self.matmul_parameters() + 12 * self.layers * self.dim * s
