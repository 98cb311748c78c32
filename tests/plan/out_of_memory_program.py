"""A program of several ranks. With one loader worker, only rank 1 runs out of memory in step 3."""

import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.ones(4000, 8)), batch_size=4)
    for step, (inputs,) in enumerate(loader):
        if step == 3 and loader.num_workers == 1 and dist.get_rank() == 1:
            used = 2**20 * 64
            with open("/proc/self/statm") as file:
                used += int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, used))
            torch.ones(2**28)  # 1 GiB: the other rank waits for this rank in the next all-reduce
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
