"""Test data whose reductions are exact in every dtype, and the expected results."""

import torch


def whole_numbers(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return small integers, whose sums and products are exact in every dtype."""
    return ((torch.arange(count) * 7 + rank * 3) % 3 + (dtype != torch.bool)).to(dtype)


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    wide = [part.double() if part.is_floating_point() else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = {
            "sum": torch.add,
            "mean": torch.add,
            "product": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
            "band": torch.bitwise_and,
            "bor": torch.bitwise_or,
            "bxor": torch.bitwise_xor,
        }[op](total, part)
    return (total / len(parts) if op == "mean" else total).to(parts[0].dtype)


def check_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(found, expected), f"{what}: {found[:8]} is not {expected[:8]}"
