"""EfficientNetV2 in sizes S, M and L, with an auxiliary classifier on intermediate features."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.models.config import EfficientNetConfig

AUXILIARY_WEIGHT = 0.3


class Stage(NamedTuple):
    """Consecutive blocks. Only the first block has the stride and changes the channels."""

    fused: bool  # one full 3×3 convolution instead of expansion and depthwise convolution
    expand: int
    stride: int
    channels: int
    blocks: int


# The fields fused, expand and stride of the stages, which are the same in all sizes. Size s has no
# seventh stage. The fifth stage is the last stage at stride 16.
_KINDS = [(True, 1, 1), (True, 4, 2), (True, 4, 2)]
_KINDS += [(False, 4, 2), (False, 6, 1), (False, 6, 2), (False, 6, 1)]
# The fields channels and blocks of the stages.
_SHAPES = {
    "s": ((24, 2), (48, 4), (64, 4), (128, 6), (160, 9), (256, 15)),
    "m": ((24, 3), (48, 5), (80, 5), (160, 7), (176, 14), (304, 18), (512, 5)),
    "l": ((32, 4), (64, 7), (96, 7), (192, 10), (224, 19), (384, 25), (640, 7)),
}
AUXILIARY_STAGE = 4
FEATURES = 1280
DROPOUT = {"s": 0.2, "m": 0.3, "l": 0.4}


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch norm and, if `activate`, SiLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        padding = kernel // 2
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)
        if activate:
            self.activation = nn.SiLU()


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the means of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(means))))


class StochasticDepth(nn.Module):
    """In training, zeroes samples with probability p and scales other samples by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        return x * x.new_empty(x.size(0), 1, 1, 1).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """MBConv or fused MBConv: expand channels, convolve, project to the output channels.

    If input and output have the same shape, the input is added to the output.
    """

    def __init__(self, stage: Stage, inputs: int, stride: int, skip_probability: float) -> None:
        super().__init__()
        outputs, expanded = stage.channels, stage.expand * inputs
        self.layers = nn.Sequential()
        if stage.fused and stage.expand == 1:
            self.layers.append(ConvNorm(inputs, outputs, 3, stride))
        else:
            if stage.fused:
                self.layers.append(ConvNorm(inputs, expanded, 3, stride))
            else:
                self.layers.append(ConvNorm(inputs, expanded, 1))
                self.layers.append(ConvNorm(expanded, expanded, 3, stride, groups=expanded))
                # The squeezed width is a quarter of the block's input channels, not of `expanded`.
                self.layers.append(SqueezeExcite(expanded, inputs // 4))
            self.layers.append(ConvNorm(expanded, outputs, 1, activate=False))
        self.residual = stride == 1 and inputs == outputs
        self.skip = StochasticDepth(skip_probability)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + self.skip(y) if self.residual else y


class EfficientNet(nn.Module):
    """EfficientNetV2. If the auxiliary head is enabled, the output is main + 0.3 × auxiliary.

    The auxiliary head is average pooling and one linear layer on the features of the fifth stage,
    at about 60 % of the depth. The auxiliary head contributes to the output in training and in
    evaluation, so one loss trains both heads and a training loop needs no special case.
    """

    def __init__(self, config: EfficientNetConfig) -> None:
        super().__init__()
        self.config = config
        shapes = _SHAPES[config.size]
        stages = [Stage(*kind, *shape) for kind, shape in zip(_KINDS, shapes, strict=False)]
        dropout = DROPOUT[config.size] if config.dropout is None else config.dropout
        depth = sum(stage.blocks for stage in stages)

        device = torch.get_default_device()
        with torch.device("meta"):  # only init_weights draws random numbers
            channels = stages[0].channels
            self.stem = ConvNorm(config.channels, channels, 3, config.stem_stride)
            self.stages = nn.ModuleList()
            position = 0
            for stage in stages:
                blocks = nn.Sequential()
                for i in range(stage.blocks):
                    stride = stage.stride if i == 0 else 1
                    skip_probability = config.stochastic_depth * position / depth
                    blocks.append(Block(stage, channels, stride, skip_probability))
                    channels = stage.channels
                    position += 1
                self.stages.append(blocks)
            self.last = ConvNorm(channels, FEATURES, 1)
            self.dropout = nn.Dropout(dropout)
            self.head = nn.Linear(FEATURES, config.classes)
            self.auxiliary: nn.Linear | None = None
            if config.auxiliary:
                self.auxiliary = nn.Linear(stages[AUXILIARY_STAGE].channels, config.classes)
        self.to_empty(device=device)
        self.init_weights()

    def init_weights(self) -> None:
        """Set all weights: He initialisation by fan-out; batch norms start as the identity."""
        for name, module in self.named_modules():
            self.init_module(name, module)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Set the weights of one layer."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, _BatchNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            bound = module.out_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.zeros_(module.bias)

    def classify(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the main head and of the auxiliary head (None if disabled)."""
        x: Tensor = self.stem(images)
        auxiliary: Tensor | None = None
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i == AUXILIARY_STAGE and self.auxiliary is not None:
                auxiliary = self.auxiliary(x.mean(dim=(2, 3)))
        features = self.last(x).mean(dim=(2, 3))
        return self.head(self.dropout(features)), auxiliary

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes)."""
        main, auxiliary = self.classify(images)
        return main if auxiliary is None else main + AUXILIARY_WEIGHT * auxiliary
