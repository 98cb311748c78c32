"""Training speed of tutti, plain PyTorch, Accelerate and Lightning on one GPU, in one run.

    python benchmarks/gpu_training.py --json benchmarks/gpu_training_DEVICE_DATE.json

There are three parts. In each round of a part, the systems take turns.
  lenet     seconds per epoch of LeNet at batch 256 on 60,000 samples of 28×28 pixels
  gpt       tokens per second of a model of the size of GPT-2 (124 M, sequence 1024, bf16)
  overhead  time per step in tutti's Trainer, compared with a plain loop over the same step
The results contain the test accuracy of every LeNet, and the difference between the GPT losses.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.data.loader import Batch
from tutti.data.sampler import Position
from tutti.machine.environment import describe_environment
from tutti.machine.hardware_catalogue import peak_flops
from tutti.models import GPT, GPTConfig, LeNet, LeNetConfig
from tutti.parallel.engine import Engine
from tutti.train.init import build_optimizer
from tutti.train.loop import Trainer
from tutti.train.recipe import RECIPES, Compute, Optimization, Recipe, with_values
from tutti.train.run_directory import RunDirectory
from tutti.train.step import Step
from tutti.train.task import Task

sys.path.insert(0, str(Path(__file__).parent))  # so that a recipe can name images() below
SAMPLES, BATCH, LR = 60_000, 256, 0.05
SEQ_LEN, GPT_BATCH = 1024, 32
Epoch = Callable[[], float]


def images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return 60,000 random images, labelled by a random linear model. Needs no download."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES + 1000, 1, 28, 28, generator=generator)
    y = (x.flatten(1) @ torch.randn(784, 10, generator=generator)).argmax(-1)
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:])


def plain(workers: int) -> tuple[Epoch, nn.Module]:
    """Return a function that trains an epoch in a plain loop with a DataLoader, and its model."""
    model, optimizer, loader = _lenet_parts(workers)
    model.cuda()

    def epoch() -> float:
        began = _now()
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return _now() - began

    return epoch, model


def accelerate() -> tuple[Epoch, nn.Module]:
    """Return the same as `plain`, with Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(*_lenet_parts(workers=0))

    def epoch() -> float:
        began = _now()
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        return _now() - began

    return epoch, model


def lightning() -> tuple[Epoch, nn.Module]:
    """Return the same as `plain`, with Lightning. Only the epoch is timed, not the set-up."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = _lenet()
            self.began = self.seconds = 0.0

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)

        def on_train_epoch_start(self) -> None:
            self.began = _now()

        def on_train_epoch_end(self) -> None:
            self.seconds = _now() - self.began

    module = Module()
    _, _, loader = _lenet_parts(workers=0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

    def epoch() -> float:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="gpu", devices=1, enable_model_summary=False, **quiet
        )
        trainer.fit(module, loader)
        return float(module.seconds)

    return epoch, module.model


def ours(
    world: tutti.World, folder: Path, graph: bool = False, compiled: bool = False
) -> tuple[Epoch, nn.Module]:
    """Return the same as `plain`, with tutti and all data on the device."""
    recipe = with_values(
        RECIPES["lenet"],
        {
            "data": {"dataset": "gpu_training:images", "data_on_device": True},
            "batching": {"batch": BATCH},
            "optimization": {"lr": LR, "schedule": "constant", "warmup": 0.0},
            "compute": {"cuda_graph": graph, "compile": compiled},
            "length": {"epochs": 100.0},
        },
    )
    trainer = _trainer(world, recipe, folder / f"lenet-{graph}-{compiled}")

    def epoch() -> float:
        began = _now()
        trainer.runner.run(trainer.schedule.steps_per_epoch).tolist()
        return _now() - began

    return epoch, trainer.model


def benchmark_lenet(world: tutti.World, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds per epoch and the test accuracy of each system."""
    best_of_ours = "tutti, data on device, CUDA graph, compiled"
    systems = {
        "plain loop": plain(workers=0),
        "plain loop, 4 workers": plain(workers=4),
        "accelerate": accelerate(),
        "lightning": lightning(),
        "tutti, data on device": ours(world, folder),
        "tutti, data on device, CUDA graph": ours(world, folder, graph=True),
        best_of_ours: ours(world, folder, graph=True, compiled=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, (epoch, _) in systems.items():
            taken = epoch()
            if number:  # the first round warms up
                seconds[name].append(taken)
    _, (x, y) = images()
    results: dict[str, Any] = {}
    for name, (_, model) in systems.items():
        with torch.no_grad():
            device = next(model.parameters()).device
            accuracy = (model(x.to(device)).argmax(-1).cpu() == y).float().mean().item()
        results[name] = {"seconds_per_epoch": _spread(seconds[name]), "test_accuracy": accuracy}
    medians = {name: result["seconds_per_epoch"]["p50"] for name, result in results.items()}
    best = min((name for name in medians if not name.startswith("tutti")), key=medians.__getitem__)
    return {
        "systems": results,
        "best_other": best,
        "speedup_over_best_other": medians[best] / medians[best_of_ours],
    }


def benchmark_gpt(world: tutti.World, rounds: int, steps: int) -> dict[str, Any]:
    """Return the tokens/s of a plain torch.compile loop and of tutti's step, on equal batches."""
    config = GPTConfig.gpt2()
    batches = torch.randint(0, 50_257, (8, GPT_BATCH, SEQ_LEN + 1), device="cuda")

    torch.manual_seed(0)
    bare_model = GPT(config).cuda()
    # The loss is inside of the compiled function, so that it is fused with the last layer.
    compiled_loss = torch.compile(
        lambda x, y: F.cross_entropy(bare_model(x).flatten(0, 1), y.flatten())
    )
    bare_optimizer = torch.optim.AdamW(
        bare_model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    def bare_step(tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled_loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(bare_model.parameters(), 1.0)
        bare_optimizer.step()
        bare_optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    model = GPT(config).cuda()
    step = Step(
        Engine(model, world, "one rank, no communication"),
        build_optimizer(model, Optimization(optimizer="adamw"), 3e-4),
        Task(),
        Compute(precision="bf16", compile=True),
        batches[0, :1, :-1],
        clip=1.0,
    )

    def our_step(tokens: Tensor) -> Tensor:
        return step(Batch(tokens[:, :-1], tokens[:, 1:], GPT_BATCH, Position(), Position()))

    loops = {"bare torch.compile loop": bare_step, "tutti's step": our_step}
    rates: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, run in loops.items():
            began = _now()
            kept = [run(batches[index % len(batches)]) for index in range(steps)]
            taken = _now() - began
            losses[name] += [loss.item() for loss in kept]
            if number:
                rates[name].append(steps * GPT_BATCH * SEQ_LEN / taken)
    bare, mine = (statistics.median(rates[name]) for name in loops)
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    return {
        "config": "gpt2: 12 layers, dim 768, vocabulary 50,304, sequence 1024, bf16 autocast",
        "batch": GPT_BATCH,
        "tokens_per_s": {name: _spread(values) for name, values in rates.items()},
        "ratio": mine / bare,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        "losses": [losses["tutti's step"][0], losses["tutti's step"][-1]],
        "mfu": mine * config.flops_per_token(SEQ_LEN) / peak[0] if peak else "unknown",
        "mfu_peak": peak[1] if peak else "unknown device",
    }


def benchmark_overhead(world: tutti.World, folder: Path, steps: int) -> dict[str, Any]:
    """Return the seconds per step in the Trainer, and in a plain loop over the same step."""
    recipe = with_values(
        Recipe(model="gpt", architecture=GPTConfig.gpt2()),
        {
            "data": {"dataset": "synthetic", "seq_len": SEQ_LEN},
            "batching": {"batch": GPT_BATCH},
            "optimization": {"optimizer": "adamw", "lr": 3e-4, "clip": 1.0},
            "compute": {"precision": "bf16", "compile": True},
            "length": {"steps": steps, "evaluate": False, "checkpoint_every": 10**9},
        },
    )
    trainer = _trainer(world, recipe, folder / "overhead")
    batch = next(trainer.loader.stream())
    trainer.loader.close()
    trainer.loader.position = Position()

    def bare() -> float:
        began = _now()
        losses = [trainer.stepper(batch) for _ in range(steps // 2)]
        torch.stack(losses).tolist()
        return (_now() - began) / len(losses)

    bare()  # compiles
    before = bare()
    began = _now()
    trainer.run()
    whole = (_now() - began) / steps
    after = bare()
    rows = [json.loads(line) for line in (folder / "overhead/metrics/rank0.jsonl").open()]
    inside = [row["seconds_per_step"] for row in rows if "seconds_per_step" in row][1:]
    return {
        "bare_seconds_per_step": [before, after],
        "trainer_seconds_per_step": statistics.median(inside),
        "overhead": statistics.median(inside) / ((before + after) / 2) - 1,
        "whole_run_with_final_checkpoint_seconds_per_step": whole,
    }


def _lenet() -> LeNet:
    torch.manual_seed(0)
    return LeNet(LeNetConfig())


def _lenet_parts(workers: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = _lenet()
    (x, y), _ = images()
    loader: DataLoader[Any] = DataLoader(
        TensorDataset(x, y),
        batch_size=BATCH,
        shuffle=True,
        pin_memory=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), loader


def _trainer(world: tutti.World, recipe: Recipe, folder: Path) -> Trainer:
    directory = RunDirectory(folder)
    directory.create()
    return Trainer(world, recipe, directory)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _spread(values: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Run all parts and write the results."""
    parser = argparse.ArgumentParser(description="How fast tutti trains on one GPU.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", default="lenet,gpt,overhead")
    options = parser.parse_args()
    results: dict[str, Any] = {"schema": "tutti.benchmarks.gpu_training/1", "command": sys.argv}
    with tutti.init(device="cuda") as world, tempfile.TemporaryDirectory() as folder:
        results["environment"] = describe_environment()
        results["device"] = torch.cuda.get_device_name()
        for part in options.parts.split(","):
            if part == "lenet":
                results[part] = benchmark_lenet(world, Path(folder), options.rounds)
            elif part == "gpt":
                results[part] = benchmark_gpt(world, options.rounds, steps=10)
            else:
                results[part] = benchmark_overhead(world, Path(folder), steps=120)
            print(json.dumps({part: results[part]}, indent=2), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
