"""Checkpoints on a GPU: `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tutti.train.checkpoint import Checkpoints

pytestmark = pytest.mark.gpu


def model_on(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5), nn.Linear(512, 512)).to(device)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(8, 512, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}])
def test_a_resumed_run_continues_bit_for_bit_on_a_gpu(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    model = model_on("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train_step(model, optimizer)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizer)
        losses = [train_step(model, optimizer) for _ in range(3)]  # with dropout on the GPU
    resumed = model_on("cuda")
    again = torch.optim.AdamW(resumed.parameters(), **options)
    assert Checkpoints(tmp_path).load(resumed, again).notes == ()
    assert [train_step(resumed, again) for _ in range(3)] == losses
    for old, new in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert old["step"].device == new["step"].device


def test_a_snapshot_is_copied_before_later_work_on_the_stream(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, device="cuda")
    nn.init.constant_(model.weight, 1.0)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 4):
            checkpoints.save(step, model)
            assert checkpoints._snapshot["model.weight"].is_pinned()
            with torch.no_grad():
                model.weight.add_(1.0)  # queued on the stream behind the copy
        checkpoints.wait()
        for step in range(1, 4):
            checkpoints.load(model, step=step)
            assert bool((model.weight == step).all())


def test_a_checkpoint_moves_from_gpu_to_cpu_and_back(tmp_path: Path) -> None:
    first, second, third = model_on("cuda"), model_on("cpu"), model_on("cuda")
    optimizers = [
        torch.optim.AdamW(first.parameters(), fused=True),
        torch.optim.AdamW(second.parameters()),
        torch.optim.AdamW(third.parameters(), fused=True),
    ]
    train_step(first, optimizers[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, first, optimizers[0])
        checkpoints.wait()
        checkpoints.load(second, optimizers[1])
        checkpoints.save(2, second, optimizers[1])
        checkpoints.wait()
        checkpoints.load(third, optimizers[2])
    for a, b, c in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(a.cpu(), b) and torch.equal(a, c)
        assert optimizers[1].state[b]["step"].device.type == "cpu"
        assert optimizers[2].state[c]["step"].device.type == "cuda"
    assert train_step(first, optimizers[0]) > 0 and train_step(third, optimizers[2]) > 0
