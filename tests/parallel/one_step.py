"""One step of a small GPT in a plain loop and in an engine; both must give the same result.

Tolerance: float64 sums in another order differ by some units of 2⁻⁵³, here up to 3e-15 relative to
the largest gradient of a parameter; 1e-12 catches any wrong factor, sum or sign.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tutti.models import GPT, GPTConfig
from tutti.parallel.engine import Engine
from tutti.parallel.tensor import loss_context
from tutti.train.task import Task

TOLERANCE = 1e-12
SAMPLES, MICROBATCHES = 8, 2
TASK = Task()


def small_gpt(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=32, max_seq_len=16, layers=2, dim=32, heads=4, kv_heads=4, tied=tied
    )
    model = GPT(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones, which would hide errors
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def some_tokens(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(32, (SAMPLES, 17))
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def plain_step(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = TASK.loss_sums(model(inputs), targets)[0] / targets.numel()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def step_of(
    engine: Engine, inputs: torch.Tensor, targets: torch.Tensor, shares: list[int]
) -> torch.Tensor:
    """One step in which data rank r has `shares[r]` samples; the loss over all ranks."""
    rank, total = engine.mesh.data_rank, targets.numel()
    local = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    x, y = inputs[local], targets[local]
    sizes = [len(x) // MICROBATCHES + (n < len(x) % MICROBATCHES) for n in range(MICROBATCHES)]
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    with loss_context(engine.mesh.layout.tp > 1):
        loss = engine.run(
            parts,
            lambda outputs, labels: TASK.loss_sums(outputs, labels)[0] / total,
            example=inputs[:1],
        )
    torch.distributed.all_reduce(loss)
    return loss


def worst_error(engine: Engine, expected: dict[str, torch.Tensor]) -> float:
    worst = 0.0
    for name, parameter in engine.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        right = expected[engine.aliases.get(name, name)]
        worst = max(worst, float((whole - right).abs().max() / right.abs().max()))
    return worst
