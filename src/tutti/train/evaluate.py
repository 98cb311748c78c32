"""Evaluation on all ranks, exact: every sample once, sums and counts reduced in one collective."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.data.loader import Loader
from tutti.parallel.engine import Engine
from tutti.train.step import as_computed
from tutti.train.task import Task


@dataclass(frozen=True)
class Score:
    """How good a model is on a data set."""

    loss: float
    accuracy: float
    count: int


@torch.no_grad()
def evaluate(
    engine: Engine,
    loader: Loader,
    task: Task,
    example: Tensor,
    autocast: torch.dtype | None = None,
) -> Score:
    """Loss and accuracy of a model over all of a loader's samples, over all ranks.

    The sums are in float64 and exact in their counts, however unevenly the samples fall on ranks.
    """
    model, device = engine.model, engine.world.device
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    # loss sum, correct, count
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in loader.stream(epochs=1):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            outputs = engine.infer(as_computed(inputs, model), example)
        if outputs is None or not engine.speaks:
            continue
        sums[0] += task.loss_sum(outputs, targets)
        sums[1] += task.correct(outputs, targets)
        sums[2] += task.count(targets)
    for module in was_training:  # not the whole model: a user may have frozen parts of it
        module.training = True
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return Score(loss / count, correct / count, int(count))
