"""One process, many devices: torch's DataParallel, kept for comparison.

Every forward copies the parameters to all devices and splits the inputs, every backward adds the
gradients up on the first device: one Python process drives all of it. `ddp` is faster wherever
there is more than one device.
"""

from typing import Any

import torch
from torch import nn

from tutti.parallel.engine import Engine
from tutti.world.errors import UsageError
from tutti.world.world import World


class DataParallel(Engine):
    """The model on all visible devices of this one process."""

    def __init__(self, model: nn.Module, world: World) -> None:
        if world.size > 1:
            raise UsageError(
                f"--engine dataparallel is one process with many devices, this world has "
                f"{world.size} ranks: use --engine ddp or --ranks 1"
            )
        super().__init__(model, world)
        self.devices = [world.device]
        if world.device.type == "cuda":
            others = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
            self.devices += [device for device in others if device != world.device]
        # On the CPU there is one device, and torch's DataParallel only passes the call on.
        gpus = self.devices if world.device.type == "cuda" else None
        self.scattered = nn.DataParallel(model, device_ids=gpus)

    @property
    def description(self) -> str:
        if len(self.devices) == 1:
            return f"dataparallel: there is only one device, {self.devices[0]}: nothing is split"
        return f"dataparallel: one process on {', '.join(map(str, self.devices))}"

    def __call__(self, *inputs: Any) -> Any:
        return self.scattered(*inputs)
