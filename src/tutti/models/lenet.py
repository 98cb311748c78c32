"""LeNet with 20 and 50 channels, average pooling and 128 hidden units."""

import torch.nn.functional as F
from torch import Tensor, nn

from tutti.models.config import LeNetConfig


class LeNet(nn.Module):
    """Two 5×5 convolutions, each with ReLU and 2×2 average pooling, then two linear layers."""

    def __init__(self, config: LeNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(config.channels, 20, kernel_size=5, padding=config.padding)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5, padding=config.padding)
        self.hidden = nn.Linear(50 * config.feature_size**2, 128)
        self.head = nn.Linear(128, config.classes)

    def init_weights(self) -> None:
        """Draw all weights again with torch's default initialisation, as the constructor does."""
        for name, module in self.named_modules():
            self.init_module(name, module)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Draw the weights of one layer."""
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, size, size) to logits (batch, classes)."""
        x = F.avg_pool2d(F.relu(self.conv1(images)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        logits: Tensor = self.head(x)
        return logits
