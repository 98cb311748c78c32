"""A plain DDP script without tutti that trains for a long time.

With two ranks, rank 1 sleeps in each step, or both with SLEEPS=all.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, WIDTH = 16, 256
SLEEP_S = 0.1


def main(epochs: int) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(BATCH, WIDTH)), batch_size=BATCH)
    sleeps = dist.get_rank() == 1 or os.environ.get("SLEEPS") == "all"
    for _ in range(epochs):  # of one step
        for (inputs,) in loader:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            if sleeps and dist.get_world_size() == 2:
                time.sleep(SLEEP_S)
            loss.backward()
            optimizer.step()
    assert "tutti.profile" not in sys.modules


if __name__ == "__main__":
    main(int(sys.argv[1]))
