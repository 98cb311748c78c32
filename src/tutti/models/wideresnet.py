"""WideResNet: a wide network for small images, with batch norm and ReLU before convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.models.config import WideResNetConfig


class Block(nn.Module):
    """BN-ReLU-conv, dropout, BN-ReLU-conv, added to a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        # The shortcut is a convolution only if the shape changes. Otherwise it is the input before
        # batch norm and ReLU, so that an identity path runs through the stage.
        self.shortcut: nn.Conv2d | None = None
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(activated)
        y = F.relu(self.norm2(self.conv1(activated)))
        residual: Tensor = self.conv2(self.dropout(y))
        return shortcut + residual


class WideResNet(nn.Module):
    """A 16-channel stem, three stages at strides 1, 2 and 4, average pooling, one linear layer."""

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # only init_weights draws random numbers
            self.stem = nn.Conv2d(config.channels, 16, 3, padding=1, bias=False)
            self.stages = nn.Sequential()
            channels = 16
            for base, stride in ((16, 1), (32, 2), (64, 2)):
                outputs = base * config.width
                stage = nn.Sequential()
                for i in range(config.blocks_per_stage):
                    stage.append(Block(channels, outputs, stride if i == 0 else 1, config.dropout))
                    channels = outputs
                self.stages.append(stage)
            self.norm = nn.BatchNorm2d(channels)
            self.head = nn.Linear(channels, config.classes)
        self.to_empty(device=device)
        self.init_weights()

    def init_weights(self) -> None:
        """Set all weights: He initialisation of convolutions; batch norms start as the identity."""
        for name, module in self.named_modules():
            self.init_module(name, module)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Set the weights of one layer."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, _BatchNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes)."""
        x = F.relu(self.norm(self.stages(self.stem(images))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
