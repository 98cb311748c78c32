"""Given a pool, when buffers are taken and given back, then memory is used again and never lost."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti import comm
from tutti.comm.pools import BufferPool, PinnedPool, step
from tutti.comm.unified import Managed, through_pinned_copies, through_unified_memory
from tutti.world.errors import UsageError


@given(st.integers(0, 1 << 40))
def test_a_size_is_rounded_up_by_at_most_an_eighth(size: int) -> None:
    rounded = step(size)
    assert rounded >= size
    assert rounded == 512 or rounded <= size * 1.125
    assert step(rounded) == rounded
    assert rounded % 64 == 0  # a cache line


def test_a_buffer_given_back_is_taken_again_by_any_shape_and_dtype_that_fits() -> None:
    pool = BufferPool()
    with pool.take((3, 5), torch.float64) as first:
        assert first.shape == (3, 5) and first.dtype == torch.float64
        where = first.data_ptr()
        with pool.take(7) as second:
            assert second.data_ptr() != where
    with pool.take((100,), torch.int8) as third, pool.take(0) as nothing:
        assert third.data_ptr() == where and third.dtype == torch.int8
        assert nothing.shape == (0,)
    stats = pool.stats()
    assert (stats.hits, stats.misses) == (2, 2)
    assert (stats.bytes_free, stats.bytes_in_use) == (1024, 0)


def test_an_exception_in_the_block_gives_the_buffer_back() -> None:
    pool = BufferPool()
    with pytest.raises(KeyError), pool.take(1000):
        raise KeyError
    lease = pool.take(1000)
    lease.release()
    lease.release()
    assert pool.stats().bytes_in_use == 0 and pool.stats().misses == 1


def test_a_limit_first_lets_go_of_what_is_free_then_refuses() -> None:
    pool = BufferPool(limit_bytes=10_000)
    with pool.take(8192, torch.uint8):
        pass
    assert pool.stats().bytes_free == 8192
    with pool.take(4096, torch.uint8), pool.take(4096, torch.uint8):
        assert pool.stats().bytes_free == 0
        with pytest.raises(UsageError, match="8192 bytes in use and 4096 more are asked for"):
            pool.take(4096, torch.uint8)
    assert pool.stats().bytes_free == 8192


def test_trim_lets_go_of_the_largest_first() -> None:
    pool = BufferPool()
    leases = [pool.take(size, torch.uint8) for size in (512, 1024, 65536)]
    for lease in leases:
        lease.release()
    assert pool.trim(to_bytes=2000) == 65536
    assert pool.stats().bytes_free == 1536
    assert pool.trim() == 1536 and pool.stats().bytes_free == 0


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool()
    wrong = []

    def work(mark: int) -> None:
        for _ in range(300):
            with pool.take(64, torch.int64) as tensor:
                tensor.fill_(mark)
                if not bool((tensor == mark).all()):
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    _ = [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert not wrong and pool.stats().bytes_in_use == 0
    assert pool.stats().hits + pool.stats().misses == 1200


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_pinned_memory_is_ordinary_and_says_so() -> None:
    pool = comm.PinnedPool()
    assert not pool.is_pinned and "no GPU is visible" in pool.reason
    with pool.take(10) as tensor:
        assert not tensor.is_pinned()
    with pytest.raises(UsageError, match="unified memory needs a GPU"):
        Managed((3,), torch.float32)


@pytest.mark.gpu
def test_pinned_memory_is_taken_again_only_when_its_copies_are_done() -> None:
    pool = PinnedPool()
    assert pool.is_pinned and "page-locked" in pool.reason
    gpu = torch.empty(1 << 22, device="cuda")
    for value in range(20):
        with pool.take(gpu.shape) as staged:
            assert staged.is_pinned()
            staged.fill_(value)
            torch.cuda._sleep(1_000_000)
            gpu.copy_(staged, non_blocking=True)
        assert gpu.double().sum().item() == value * gpu.numel()
    torch.cuda.synchronize()
    with pool.take(gpu.shape):
        pass
    assert pool.stats().hits > 0


@pytest.mark.gpu
def test_device_buffers_wait_for_the_stream_that_had_them_before() -> None:
    pool = BufferPool("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), pool.take(1 << 20) as tensor:
        where = tensor.data_ptr()
        torch.cuda._sleep(10_000_000)
        tensor.fill_(1)
    with pool.take(1 << 20) as tensor:
        assert tensor.data_ptr() == where
        tensor.fill_(2)
        assert tensor.sum().item() == 2 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unified_memory_and_pinned_copies_give_the_same(dtype: torch.dtype) -> None:
    data = torch.arange(100_003).to(dtype).view(-1, 1)

    def work(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cuda
        return (tensor * 2 + 1)[1:]

    expected = (data * 2 + 1)[1:]
    assert torch.equal(through_unified_memory(data, work), expected)
    assert torch.equal(through_unified_memory(data, work, prefetch=True), expected)
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
