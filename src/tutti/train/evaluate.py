"""Evaluation over all ranks: every sample exactly once, sums and counts in one all-reduce."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.comm.collectives import all_reduce
from tutti.data.loader import Loader
from tutti.parallel.engine import Engine
from tutti.train.step import Task, as_model_dtype


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a model on a dataset."""

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
    """Return loss and accuracy of a model over all samples of a loader, over all ranks.

    Sums are in float64 and counts are exact, even if ranks have different numbers of samples.
    """
    model, device = engine.model, engine.world.device
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, count
    for inputs, targets in loader.stream(epochs=1):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            outputs = engine.infer(as_model_dtype(inputs, model), example)
        if outputs is None or not engine.reports_loss:
            continue
        sums[0] += task.loss_sum(outputs, targets)
        sums[1] += task.correct(outputs, targets)
        sums[2] += task.count(targets)
    for module in was_training:  # not model.train(): the user may have frozen some modules
        module.training = True
    all_reduce(sums)
    loss, correct, count = sums.tolist()
    return Score(loss / count, correct / count, int(count))
