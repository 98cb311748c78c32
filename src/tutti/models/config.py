"""The names of models, and the configuration of each model, with parameter and FLOP counts.

Does not import torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCES = ("hf", "timm")  # the other libraries whose models can be trained: hf:FOLDER, timm:NAME


class ModelError(ValueError):
    """A model cannot be built or its files are damaged; the message is one line with the cure."""


def split_source(model: str) -> tuple[str, str] | None:
    """Return (source, name) of hf:FOLDER and timm:NAME, and None for other models."""
    source, colon, name = model.partition(":")
    return (source, name) if colon and source in SOURCES else None


def model_name(model: str) -> str:
    """Return the name of a model without its source or module, for the name of a run."""
    source = split_source(model)
    return Path(source[1]).resolve().name if source else model.rpartition(":")[2]


def _check_range(config: object, lowest: float, *names: str, below: float = math.inf) -> None:
    model = type(config).__name__.removesuffix("Config").lower()
    for name in names:
        value = getattr(config, name)
        if value is not None and not lowest <= value < below:
            limits = f"at least {lowest}" + (f" and less than {below}" if below < math.inf else "")
            raise ValueError(f"{model}: {name} must be {limits}, got {value}")


@dataclass(frozen=True)
class LeNetConfig:
    """LeNet with 20 and 50 channels, for square images of 4 pixels a side or more."""

    channels: int = 1
    """Number of channels of the input image."""
    image_size: int = 28
    """Side of the square input image, in pixels. Below 28 the convolutions are padded."""
    classes: int = 10
    """Number of outputs of the last layer."""

    def __post_init__(self) -> None:
        _check_range(self, 1, "channels", "classes")
        _check_range(self, 4, "image_size")

    @property
    def padding(self) -> int:
        """Width of the zero padding of both convolutions: 0 for images of 28×28 or more, else 2.

        Without padding, two 5×5 convolutions would reduce an 8×8 image to less than one pixel.
        """
        return 0 if self.image_size >= 28 else 2

    @property
    def feature_size(self) -> int:
        """Side of the feature map after both convolutions and poolings: 4 for 28×28 images."""
        after_first = (self.image_size + 2 * self.padding - 4) // 2
        return (after_first + 2 * self.padding - 4) // 2


@dataclass(frozen=True)
class WideResNetConfig:
    """WideResNet-depth-width for small images (Zagoruyko and Komodakis, arXiv 1605.07146)."""

    depth: int = 28
    """Number of layers on the longest path: 6n + 4, for n blocks in each stage."""
    width: int = 10
    """Channel multiplier: the three stages have 16, 32 and 64 times this number of channels."""
    channels: int = 3
    """Number of channels of the input image."""
    classes: int = 10
    """Number of outputs of the last layer."""
    dropout: float = 0.0
    """Probability of dropping a value between the two convolutions of a block."""

    def __post_init__(self) -> None:
        _check_range(self, 1, "width", "channels", "classes")
        _check_range(self, 0, "dropout", below=1)
        if self.depth < 10 or (self.depth - 4) % 6:
            valid = 6 * max(1, round((self.depth - 4) / 6)) + 4
            raise ValueError(
                f"wideresnet: depth must be 6n + 4, got {self.depth}. Use depth {valid}."
            )

    @property
    def blocks_per_stage(self) -> int:
        """The n of depth = 6n + 4: three stages of n blocks with two convolutions each."""
        return (self.depth - 4) // 6


@dataclass(frozen=True)
class EfficientNetConfig:
    """EfficientNetV2 (Tan and Le, arXiv 2104.00298) with an auxiliary classifier."""

    size: Literal["s", "m", "l"] = "s"
    """Size of the model: 21 (s), 54 (m) or 119 (l) million parameters with 1000 classes."""
    channels: int = 3
    """Number of channels of the input image."""
    classes: int = 1000
    """Number of outputs of each classifier."""
    auxiliary: bool = True
    """Add 0.3 × the output of a second classifier, which reads the last features at stride 16."""
    stem_stride: int = 2
    """Stride of the first convolution: 2 as published, 1 for images of about 32 pixels a side."""
    dropout: float | None = None
    """Probability of dropping a feature before the classifier. Unset: 0.2, 0.3, 0.4 for s, m, l."""
    stochastic_depth: float = 0.2
    """Probability of skipping the last block for a sample. It falls to 0 for the first block."""

    def __post_init__(self) -> None:
        if self.size not in ("s", "m", "l"):
            raise ValueError(f"efficientnet: size must be s, m or l, got {self.size!r}")
        _check_range(self, 1, "channels", "classes", "stem_stride")
        _check_range(self, 0, "stochastic_depth", "dropout", below=1)


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer. The defaults are a byte-level model that trains on a CPU."""

    vocab_size: int = 256
    """Number of tokens in the vocabulary. The head is fastest if this is a multiple of 64."""
    max_seq_len: int = 256
    """Maximum sequence length, in tokens."""
    layers: int = 4
    """Number of transformer blocks."""
    dim: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Number of query heads, each of width dim / heads."""
    kv_heads: int | None = None
    """Number of key and value heads, each shared by heads / kv_heads query heads. Unset: heads."""
    mlp_dim: int | None = None
    """Hidden width of the MLP. Unset: 8/3 × dim, rounded up to a multiple of 64."""
    tied: bool = False
    """Use the weights of the embedding in the head."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths, which are 2π to about 2π × rope_theta tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        _check_range(self, 1, "vocab_size", "max_seq_len", "layers", "dim", "heads")
        _check_range(self, 1, "kv_heads", "mlp_dim", "rope_theta")
        _check_range(self, 0, "norm_eps")
        if self.dim % (2 * self.heads):
            raise ValueError(
                "gpt: dim / heads must be an even integer for rotary positions, got "
                f"{self.dim} / {self.heads} = {self.dim / self.heads:g}. Use dim "
                f"{-(-self.dim // (2 * self.heads)) * 2 * self.heads}."
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"gpt: kv_heads {self.key_value_heads} does not divide heads {self.heads}. Use a "
                f"kv_heads that divides {self.heads}."
            )

    @classmethod
    def gpt2(cls) -> "GPTConfig":
        """Return GPT-2 small: 124 million parameters, vocabulary padded to 50,304 = 128 × 393."""
        return cls(vocab_size=50_304, max_seq_len=1024, layers=12, dim=768, heads=12, tied=True)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        """The number of key and value heads: kv_heads if it is set, else heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP: mlp_dim if it is set, else 8/3 × dim.

        With 8/3 × dim, the three matrices of SwiGLU have as many weights as the two matrices of a
        GELU MLP with 4 × dim. Multiples of 64 have fast matrix products and can be split by tp.
        """
        return -(-8 * self.dim // (3 * 64)) * 64 if self.mlp_dim is None else self.mlp_dim

    @property
    def init_std(self) -> float:
        """Standard deviation of the initial weights: 0.5 / √dim, which is 0.018 for GPT-2 small.

        GPT-2 used 0.02 for all widths, but narrow models learn measurably slower with 0.02. The
        first loss is about ln(vocab_size) + 1/8 at every width.
        """
        return 0.5 / math.sqrt(self.dim)

    def matmul_parameters(self) -> int:
        """Return the number of weights in matrix products, which are in the blocks and the head.

        Norms and the embedding, which is a look-up, are not counted.
        """
        wq_and_wo = 2 * self.dim * self.dim
        wk_and_wv = 2 * self.dim * self.key_value_heads * self.head_dim
        mlp = 3 * self.dim * self.hidden
        return self.layers * (wq_and_wo + wk_and_wv + mlp) + self.dim * self.vocab_size

    def parameters(self) -> int:
        """Return the number of parameters: `sum(p.numel() for p in GPT(config).parameters())`."""
        norms = (2 * self.layers + 1) * self.dim
        embedding = 0 if self.tied else self.vocab_size * self.dim
        return self.matmul_parameters() + norms + embedding

    def flops_per_token(self, seq_len: int | None = None) -> int:
        """Return the FLOPs to train on one token, forward and backward: 6 N + 12 L d s.

        N is `matmul_parameters()`. Each weight needs one multiplication and one addition in forward
        and twice as many in backward, 6 in total. L is layers, d is dim and s is the sequence
        length (unset: max_seq_len). In each layer, q·k and scores·v cost 2 d s each in forward and
        twice as much in backward, 12 d s in total. As usual, the whole s × s matrix of scores is
        counted, although causal attention masks half of it. Recomputed activations are not counted.
        """
        s = self.max_seq_len if seq_len is None else seq_len
        return 6 * self.matmul_parameters() + 12 * self.layers * self.dim * s


@dataclass(frozen=True)
class OwnModelConfig:
    """A model of your own has no settings here: the function of --model defines its sizes."""


@dataclass(frozen=True)
class HuggingFaceConfig(OwnModelConfig):
    """A model of --model hf:FOLDER has no settings here: FOLDER/config.json defines its sizes."""
