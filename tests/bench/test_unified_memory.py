"""Unified memory of the `unified` pair: the result of pinned copies, freed with its last tensor."""

import pytest
import torch

from tutti.bench.pairs.memory_pairs import (
    Managed,
    through_pinned_copies,
    through_unified_memory,
)
from tutti.world.errors import UsageError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_unified_memory_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        Managed((3,), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unified_memory_and_pinned_copies_give_the_same(dtype: torch.dtype) -> None:
    data = torch.arange(100_003).to(dtype).view(-1, 1)

    def work(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cuda
        return (tensor * 2 + 1)[1:]

    expected = (data * 2 + 1)[1:]
    assert torch.equal(through_unified_memory(data, work), expected)
    assert torch.equal(through_pinned_copies(data, work), expected)


@pytest.mark.gpu
def test_unified_memory_is_freed_with_its_last_tensor() -> None:
    torch.cuda.init()
    free_before, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        memory = Managed((1 << 24,), torch.uint8)
        view = memory.on_gpu[5:]
        del memory
        view.fill_(3)
        assert view.sum(dtype=torch.int64).item() == 3 * ((1 << 24) - 5)
    del view
    torch.cuda.synchronize()
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 256 << 20
