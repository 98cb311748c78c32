"""A model on its ranks, for inference: no gradients, no optimizer, so nothing that serves these."""

import torch
from torch import Tensor, nn

from tutti.models.config import GPTConfig
from tutti.models.gpt import GPT
from tutti.parallel.build import build_engine
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.options import ParallelOptions
from tutti.predict.decoder import Decoder
from tutti.predict.saved_run import SavedRun
from tutti.train.checkpoint import Loaded
from tutti.world.world import World


class Replicas(Engine):
    """The whole model on every rank: nobody waits for anybody."""

    @property
    def description(self) -> str:
        return f"{self.replicas}, no communication"


def inference_options(layout: Layout) -> ParallelOptions:
    """A batch of any length, down to one token; logits whole on every rank that has them."""
    return ParallelOptions(layout=str(layout), sequence_parallel=False, loss_parallel=False)


def place(model: nn.Module, world: World, layout: Layout, example: Tensor, batch: int) -> Engine:
    """Spread the model as the layout says. Call it on every rank, with the whole model."""
    if layout.only_replicas:
        return Replicas(model.to(world.device), world)
    return build_engine(
        model,
        world,
        parallel=inference_options(layout),
        example=example,
        # A pipeline is full when it has as many microbatches as stages.
        microbatches=layout.pp,
        microbatch_size=-(-batch // layout.pp),
    )


def place_gpt(
    world: World, run: SavedRun, layout: Layout, config: GPTConfig
) -> tuple[Decoder, Loaded]:
    """The run's GPT, spread as the layout says, to be fed token by token. Call it on every rank."""
    model = GPT(config).to(world.device, run.dtype)
    tokens = torch.zeros(1, config.max_seq_len, dtype=torch.int64, device=world.device)
    engine = place(model, world, layout, tokens, batch=1)
    loaded = run.load(engine)
    engine.model.eval()
    return Decoder(engine, config.dim, run.dtype), loaded
