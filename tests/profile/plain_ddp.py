"""A training script as people have it: plain DDP, nothing of tutti. Rank `LATE` sleeps."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

LATE = int(os.environ.get("LATE", -1))
SLEEP_S = 0.03
WIDTH, BATCH = (int(os.environ.get(name, size)) for name, size in (("WIDTH", 128), ("BATCH", 16)))


def main(backend: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    side = dist.new_group(backend=backend)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(BATCH * steps, WIDTH)), batch_size=BATCH)
    for (inputs,) in loader:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if dist.get_rank() == LATE:
            time.sleep(SLEEP_S)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach(), group=side)  # as one does to print it
    assert "tutti.profile" not in sys.modules
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
