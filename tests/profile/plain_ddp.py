"""An ordinary DDP training script without tutti.

Environment variables plant faults: rank `LATE` sleeps before backward, rank `UNEVEN` has three
times the batch, rank `SLOW_INPUT` waits for every batch, `BUCKET_MB` is DDP's bucket size.
"""

import os
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LATE = int(os.environ.get("LATE", -1))
SLEEP_S = 0.03
UNEVEN = int(os.environ.get("UNEVEN", -1))
SLOW_INPUT = int(os.environ.get("SLOW_INPUT", -1))
BUCKET_MB = float(os.environ.get("BUCKET_MB", 0.1))
LAYERS = int(os.environ.get("LAYERS", 4))
WIDTH = int(os.environ.get("WIDTH", 128))
WIDE = int(os.environ.get("WIDE", WIDTH))  # of the middle layer
BATCH = int(os.environ.get("BATCH", 16))


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.values = torch.randn(count, WIDTH)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        if dist.get_rank() == SLOW_INPUT and index % BATCH == 0:
            time.sleep(0.06)
        return self.values[index]


def main(backend: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    side = dist.new_group(backend=backend)
    widths = [WIDE if n == LAYERS // 2 else WIDTH for n in range(LAYERS + 1)]
    model = nn.Sequential(*(nn.Linear(*each) for each in pairwise(widths)))
    model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = BATCH * (3 if dist.get_rank() == UNEVEN else 1)
    for inputs in DataLoader(Samples(batch * steps), batch_size=batch):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if dist.get_rank() == LATE:
            time.sleep(SLEEP_S)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach(), group=side)  # to print it
    assert "tutti.profile" not in sys.modules
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
