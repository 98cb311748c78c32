"""Losses, metrics, and batches of several tensors: equal to one device in every layout.

Tolerance: float64 sums in another order differ by some units of 2⁻⁵³; 1e-12 catches any wrong
factor, sum or sign.
"""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.data.dataset import TensorSamples
from tutti.data.loader import evaluation_loader
from tutti.data.nested import call_with, map_tensors
from tutti.parallel import build_engine
from tutti.parallel.layout import ParallelOptions
from tutti.train.checkpoint import Checkpoints
from tutti.train.init import build_optimizer
from tutti.train.recipe import Compute, Optimization
from tutti.train.recipe_check import OPTIMIZERS
from tutti.train.step import Step, as_model_dtype, evaluate
from tutti.train.task import Task
from tutti.world.world import World
from worlds import in_world

SAMPLES = 7  # two ranks and two microbatches: all parts have different sizes
LR = 0.5


class TwoInputs(nn.Module):
    """Takes two inputs, returns a dict of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(3, 8)
        self.value, self.label = nn.Linear(8, 1), nn.Linear(8, 5)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(a) + self.right(b))
        return {"value": self.value(hidden), "label": self.label(hidden)}


class TinyForCausalLM(nn.Module):
    """Returns its own loss, as models of transformers do: the mean over the labels it has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def weighted(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Squared errors of samples with weights."""
    values, weights = targets
    return (outputs - values).square().mean(1) * weights, weights


def two_heads(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    regression = F.mse_loss(outputs["value"].squeeze(1), targets["value"], reduction="none")
    return regression + F.cross_entropy(outputs["label"], targets["label"], reduction="none")


def case(name: str) -> tuple[nn.Module, Any, Any, Task]:
    """Return model, inputs, targets and task. Floats of the data are float32, as in datasets."""
    torch.manual_seed(3)
    x = torch.randn(SAMPLES, 6)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    if name == "mse":
        return net, x, torch.randn(SAMPLES, 3), Task(loss="mse", metric="mae")
    if name == "bce":
        return net, x, torch.randint(2, (SAMPLES, 3)).float(), Task(loss="bce")
    if name == "weighted":
        targets = torch.randn(SAMPLES, 3), torch.arange(SAMPLES) / 3.0
        return net, x, targets, Task(loss="m:f", own_loss=weighted, metric="m:g", own_metric=worst)
    if name == "segmentation":
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
        labels = torch.randint(3, (SAMPLES, 5, 4))
        labels[torch.rand(labels.shape) < 0.3] = -100
        return net, torch.randn(SAMPLES, 2, 5, 4), labels, Task(padded=True)
    if name == "model":
        tokens = torch.randint(9, (SAMPLES, 6))
        labels = tokens.clone()
        labels[torch.arange(6) > torch.arange(SAMPLES)[:, None]] = -100
        labels[:, 1] = tokens[:, 1]  # every sample has a label
        return (
            TinyForCausalLM(),
            tokens,
            labels,
            Task(loss="model", metric="none", shifts_labels=True),
        )
    assert name == "heads"
    inputs = {"a": torch.randn(SAMPLES, 4), "b": torch.randn(SAMPLES, 3)}
    targets = {"value": torch.randn(SAMPLES), "label": torch.randint(5, (SAMPLES,))}
    return TwoInputs(), inputs, targets, Task(loss="m:f", own_loss=two_heads, metric="none")


def worst(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - targets[0]).abs().amax(1)


def expected(name: str) -> tuple[float, dict[str, Tensor], float, float | None]:
    """Return the loss, the updated parameters, the loss after the update, and the metric.

    These are formulas over all samples at once; no part of them comes from tutti.
    """
    net, inputs, targets, _ = case(name)
    net = net.double()
    inputs, targets = map_tensors(
        lambda t: t.double() if t.is_floating_point() else t, [inputs, targets]
    )

    def loss_and_metric() -> tuple[Tensor, Tensor | None]:
        if name == "model":
            return net(inputs, targets)["loss"], None
        outputs = call_with(net, inputs)
        if name == "mse":
            return F.mse_loss(outputs, targets), (outputs - targets).abs().mean()
        if name == "bce":
            right = (outputs.sigmoid() > 0.5) == (targets == 1)
            return F.binary_cross_entropy(outputs.sigmoid(), targets), right.double().mean()
        if name == "weighted":
            values, weights = targets
            loss = ((outputs - values) ** 2).mean(1) @ weights / weights.sum()
            return loss, (outputs - values).abs().max(1).values.mean()
        if name == "segmentation":
            right = (outputs.argmax(1) == targets).sum().double() / (targets != -100).sum()
            return F.cross_entropy(outputs, targets), right
        regression = F.mse_loss(outputs["value"][:, 0], targets["value"])
        return regression + F.cross_entropy(outputs["label"], targets["label"]), None

    loss, _ = loss_and_metric()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter -= LR * parameter.grad
        after, metric = loss_and_metric()
    updated = {n: p.detach() for n, p in net.named_parameters()}
    return loss.item(), updated, after.item(), None if metric is None else metric.item()


def errors(world: World, folder: str) -> dict[str, float]:
    found = {}
    for name in ("mse", "bce", "weighted", "segmentation", "heads", "model"):
        for layout in ("dp2", "shard2", "pp2"):
            if name in ("heads", "model") and layout == "pp2":
                continue  # a pipeline takes one tensor
            net, inputs, targets, task = case(name)
            samples = TensorSamples(inputs, targets)
            example = samples.batch([0])[0]
            engine = build_engine(
                net.double(),
                world,
                parallel=ParallelOptions(layout=layout),
                example=as_model_dtype(example, net.double()),
                microbatches=3,
                microbatch_size=3 if layout == "pp2" else 2,
            )
            optimizer = torch.optim.SGD(engine.model.parameters(), lr=LR, foreach=False)
            step = Step(engine, optimizer, task, Compute("float64"), example, accumulation=3)
            mesh = engine.mesh
            ranks = mesh.layout.data_ranks
            share = {"rank": mesh.data_rank, "ranks": ranks}
            # An evaluation takes batches of 4: the last batch is empty on rank 1 of dp2.
            batch = next(evaluation_loader(samples, 8 // ranks, **share).stream())
            loss = step(batch).double()
            torch.distributed.all_reduce(loss)
            score = evaluate(
                engine, evaluation_loader(samples, 2, **share), task, step.example, None
            )
            before, updated, after, metric = expected(name)
            worst_error = abs(loss.item() - before) + abs(score.loss - after)
            worst_error += abs((score.metric or 0.0) - (metric or 0.0))
            for path, parameter in engine.model.named_parameters():
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                worst_error = max(worst_error, float((value.detach() - updated[path]).abs().max()))
            found[f"{name} {layout}"] = worst_error if math.isfinite(worst_error) else 1e9
    found |= optimizers(world, folder)
    return found


def own_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Two groups with different learning rates."""
    return torch.optim.RMSprop(
        [{"params": parameters[:2], "lr": lr / 10}, {"params": parameters[2:]}], lr=lr
    )


def optimizers(world: World, folder: str) -> dict[str, float]:
    """Train a step in shard2, save, load in dp2, train a step there; compare with plain torch."""
    found = {}
    sys.path.insert(0, str(Path(__file__).parent))  # for --optimizer test_any_task:own_optimizer
    net, inputs, targets, task = case("mse")
    samples = TensorSamples(inputs, targets)
    start = copy.deepcopy(net.double().state_dict())
    for name in [*OPTIMIZERS, "test_any_task:own_optimizer"]:
        options = Optimization(name, momentum=0.9, betas=(0.8, 0.9), weight_decay=0.1)
        net.load_state_dict(start)
        plain = copy.deepcopy(net)
        reference = build_optimizer(plain, options, LR)
        for _ in range(2):
            F.mse_loss(plain(inputs.double()), targets.double()).backward()  # type: ignore
            reference.step()
            reference.zero_grad()
        layouts = ["dp2", "dp2"] if name in ("adafactor", "rprop") else ["shard2", "dp2"]
        for number, layout in enumerate(layouts):
            engine = build_engine(
                copy.deepcopy(net), world, parallel=ParallelOptions(layout=layout)
            )
            optimizer = build_optimizer(engine.model, options, LR)
            checkpoints = Checkpoints(Path(folder, name.replace(":", "-")))
            if number:
                checkpoints.load(engine.model, optimizer)
            step = Step(engine, optimizer, task, Compute("float64"), inputs[:1])
            share = {"rank": engine.mesh.data_rank, "ranks": 2}
            step(next(evaluation_loader(samples, 4, **share).stream()))
            if not number:
                checkpoints.save(1, engine.model, optimizer)
                checkpoints.wait()
            checkpoints.close()
        pairs = zip(engine.model.parameters(), plain.parameters(), strict=True)
        found[name] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return found


def test_losses_several_tensors_and_optimizers_equal_one_device_in_every_layout(
    tmp_path: Path,
) -> None:
    for rank in in_world(errors, 2, str(tmp_path)):
        assert len(rank) == 16 + len(OPTIMIZERS) + 1
        large = {name: error for name, error in rank.items() if error > 1e-12}
        # torch has mu_product in float32, and load_state_dict converts it to float64.
        assert large.pop("nadam", 0.0) <= 1e-8 and not large
