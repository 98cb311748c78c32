"""One rank, one device: the plain loop that the other engines are compared with."""

from torch import nn

from tutti.parallel.engine import Engine
from tutti.world.errors import UsageError
from tutti.world.world import World


class Single(Engine):
    """No communication at all; the sum over one rank is the gradient itself."""

    def __init__(self, model: nn.Module, world: World) -> None:
        if world.size > 1:
            raise UsageError(
                f"--engine single is for a world of 1 rank, this one has {world.size}: "
                "use --engine ddp or --ranks 1"
            )
        super().__init__(model, world)

    @property
    def description(self) -> str:
        return f"single: one rank on {self.world.device}, no communication"
