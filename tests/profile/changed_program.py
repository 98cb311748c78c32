"""A program of one rank that writes which settings of DDP and of its loader took effect."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

PASSES = 2


def main(folder: Path) -> None:
    store = dist.FileStore(str(folder / f"store-{torch.initial_seed()}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    sent: list[int] = []

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
    model.register_comm_hook(None, hook)
    loader = DataLoader(TensorDataset(torch.ones(400, 64)), 4)
    validation = DataLoader(TensorDataset(torch.ones(4, 64)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number, (inputs,) in enumerate(loader, 1):
        model(inputs).square().mean().backward()
        if number % PASSES == 0:
            seen = {
                "cap": model.bucket_bytes_cap,
                "view": model.gradient_as_bucket_view,
                "workers": [loader.num_workers, validation.num_workers],
                "sent": len(sent),
                "gradient": float(model.module[0].weight.grad.sum()),
            }
            print(json.dumps(seen), flush=True)
            sent.clear()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
