"""Training programs that lose a known time in each step if they run with more than one rank.

    PLANT=input:0.04:/tmp/times torchrun --nproc-per-node 2 benchmarks/planted_programs.py ddp

PLANT has the cause, the seconds, and a folder in which each rank writes the seconds that it lost in
each step. The causes are

    input     the dataset sleeps
    gap       all ranks sleep in the training loop (tutti: in the model)
    compute   all ranks multiply matrices in the model
    wait      rank 1 sleeps in the model, and the other ranks wait for rank 1
    exposed   all ranks all-reduce tensors in the model while nothing computes

The kinds of program are plain DDP, FSDP2, Accelerate, Lightning, the Trainer of transformers, and
tutti's own training.
"""

import atexit
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, CLASSES, BATCH = 256, 16, 32
BLOCKS, LAYERS = 3, 4  # number of blocks, and of linear layers in a block
ROWS = 12  # rows of the hidden layers for each sample
MANY = 1_000_000


class Plant:
    """The planted cause. `lose` is called at each place where a cause may be planted."""

    def __init__(self) -> None:
        cause, seconds, folder = os.environ.get("PLANT", "nothing:0:").split(":", 2)
        self.rank = int(os.environ.get("RANK", "0"))
        self.cause = cause if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "nothing"
        self.seconds = float(seconds)
        self.messages = 0  # all-reduces of the cause `exposed`, 0 before they were timed
        self.lost: list[float] = []
        self.matrix, self.message = torch.randn(192, 192), torch.ones(250_000)
        if self.cause != "nothing" and (self.cause != "wait" or self.rank == 1):
            path = Path(folder) / f"{os.getpid()}.json"
            atexit.register(lambda: self.lost and path.write_text(json.dumps(self.lost)))

    def lose(self, *causes: str) -> None:
        if self.cause not in causes or (self.cause == "wait" and self.rank != 1):
            return
        if self.cause == "exposed":
            self._time_messages()
            dist.barrier()
        began = time.perf_counter()
        if self.cause == "compute":
            with torch.no_grad():
                while time.perf_counter() - began < self.seconds:
                    torch.mm(self.matrix, self.matrix)
        elif self.cause == "exposed":
            for _ in range(self.messages):
                dist.all_reduce(self.message)
        else:
            time.sleep(self.seconds)
        self.lost.append(time.perf_counter() - began)

    def _time_messages(self) -> None:
        """Set the number of messages that take about `seconds`, the same on all ranks."""
        if self.messages:
            return
        times = []
        for _ in range(30):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(self.message)
            times.append(time.perf_counter() - began)
        count = torch.tensor([self.seconds / median(times[10:])])
        dist.broadcast(count, 0)
        self.messages = max(1, round(count.item()))


plant = Plant()


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples. If the cause is `input`, reading the last sample of each batch takes long."""

    def __init__(self, length: int = MANY) -> None:
        self.length, self.read = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read += 1
        if self.read % BATCH == 0:
            plant.lose("input")
        return torch.full((WIDTH,), float(index % 7)), index % CLASSES


class Model(nn.Module):
    def __init__(self, plants: tuple[str, ...] = ("compute", "wait", "exposed")) -> None:
        super().__init__()
        self.plants = plants
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
                for _ in range(BLOCKS)
            )
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(inputs.repeat_interleave(ROWS, 0))
        if self.training:
            plant.lose(*self.plants)
        logits: torch.Tensor = self.head(hidden)
        return logits.unflatten(0, (-1, ROWS)).mean(1)


def model() -> nn.Module:
    """Return the model for tutti train. Gaps are in the model, because the loop is in tutti."""
    return Model(("gap", "compute", "wait", "exposed"))


def dataset() -> tuple[Samples, Samples]:
    return Samples(1 << 17), Samples(64)


def ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    _loop(DistributedDataParallel(Model()))


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = Model()
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    _loop(sharded)


def _loop(wrapped: nn.Module) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    for inputs, targets in DataLoader(Samples(), batch_size=BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        plant.lose("gap")


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    planted = Model()
    optimizer = torch.optim.SGD(planted.parameters(), lr=1e-4)
    loader = DataLoader(Samples(), batch_size=BATCH)
    wrapped, optimizer, loader = accelerator.prepare(planted, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(wrapped(inputs), targets))
        plant.lose("gap")
        optimizer.step()


def lightning() -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.cross_entropy(self.model(inputs), targets)

        def on_train_batch_end(self, *_: Any) -> None:
            plant.lose("gap")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(), batch_size=BATCH))


def hf_trainer() -> None:
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.model(inputs), labels)}

    class Gap(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            plant.lose("gap")

    def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        inputs, targets = zip(*samples, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.tensor(targets)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        Trainer(
            model=Loss(),
            args=arguments,
            train_dataset=Samples(),
            data_collator=collate,
            callbacks=[Gap()],
        ).train()


def tutti() -> None:
    from tutti.cli.train import main

    folder = os.environ["PLANT"].split(":", 2)[2]
    flags = ["--recipe", "own", "--model", "planted_programs:model", "--batch", str(BATCH)]
    flags += ["--dataset", "planted_programs:dataset", "--device", "cpu", "--no-evaluate"]
    flags += ["--steps", "1000", "--out", f"{folder}/../train-{os.environ['MASTER_PORT']}"]
    sys.exit(main(flags))


PROGRAMS = {
    program.__name__: program for program in (ddp, fsdp2, accelerate, lightning, hf_trainer, tutti)
}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]]()
