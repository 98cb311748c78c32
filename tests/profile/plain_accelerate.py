"""An ordinary training script with Accelerate and without tutti."""

import sys

import torch
from accelerate import Accelerator


def main(steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    samples = torch.randn(16 * steps * accelerator.num_processes, 64)
    loader = torch.utils.data.DataLoader(samples, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    assert "tutti.profile" not in sys.modules


if __name__ == "__main__":
    main(int(sys.argv[1]))
