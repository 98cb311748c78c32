"""DataParallel against DDP: one Python process for all GPUs, or one for each."""

import torch
from torch import Tensor, nn

from tutti.bench.pairs.pair import Pair, Setting
from tutti.bench.pairs.workload import gradients_of, inputs_of, large, model_of, replica


def data_parallel(setting: Setting) -> Pair:
    """Rank 0 drives all GPUs while the others wait; then every rank drives its own."""
    world = setting.world
    gpus = torch.cuda.device_count() if setting.on_gpu else 0
    enough = world.size > 1 and world.nodes == 1 and gpus >= world.size and not world.sharing_note
    setting.need(
        enough,
        "DataParallel splits a batch over the GPUs of one process: it needs as many GPUs as ranks, "
        f"on one host, and at least two; here are {gpus} for {world.size} ranks",
    )
    size = large(setting)
    own = replica(size, setting, bucket_mb=25)
    everything = [torch.cat([inputs_of(size, setting, rank) for rank in range(world.size)])]
    mine = [inputs_of(size, setting)]

    def one_process() -> list[Tensor]:
        return gradients_of(scattered, everything) if world.is_first else []

    def process_each() -> list[Tensor]:
        gradients = gradients_of(own, mine)
        return gradients if world.is_first else []

    scattered = nn.DataParallel(model_of(size, setting), device_ids=list(range(world.size)))
    return Pair(
        baseline=one_process,
        optimized=process_each,
        tolerance=1e-4,
        reason=f"{size.about}; matrix products of other shapes are added up in another order",
    )
