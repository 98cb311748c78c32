"""Your own training loop, on one device or many. The lines that tutti adds are marked with # tutti.

    python examples/own_loop.py                       # one process
    tutti run -n 2 --device cpu examples/own_loop.py  # two ranks
    torchrun --nproc-per-node 2 examples/own_loop.py  # or any other launcher

Stop it with Ctrl-C and start it again, with any number of ranks: it continues from its last
checkpoint in runs/own_loop. Remove that directory to train from the beginning.
"""

import torch
import torch.nn.functional as F
from torch import nn

import tutti  # tutti
from tutti.data import digits_dataset

EPOCHS = 12

with tutti.init() as world, tutti.Checkpoints("runs/own_loop", keep=2) as checkpoints:  # tutti
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    model = tutti.parallelize(model, world=world)  # tutti
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = digits_dataset(size=8)
    loader = tutti.loader(data.train, batch=32, world=world)  # tutti
    if checkpoints.steps():  # tutti
        loader.load_state_dict(checkpoints.load(model, optimizer).state["data"])  # tutti
    if world.is_first and loader.position.epoch >= EPOCHS:  # tutti
        print(f"all {EPOCHS} epochs are done: remove runs/own_loop to train from the beginning")

    meter = tutti.Meter(world)  # tutti
    while loader.position.epoch < EPOCHS:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.add(loss.detach() * len(x), len(x))  # tutti
        reading = meter.read()  # tutti: over all samples of all ranks
        checkpoints.save(loader.position.epoch, model, optimizer, {"data": loader.state_dict()})
        if world.is_first:  # tutti
            speed = f"{reading.per_second:,.0f} samples/s"
            print(f"epoch {loader.position.epoch}: loss {reading.mean:.4f}, {speed}")
