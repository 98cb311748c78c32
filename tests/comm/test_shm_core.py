"""The core's collectives and messages, between processes without torch."""

import itertools
import os

import numpy as np
import pytest

from shm_ranks import Group, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core

COUNTS = (0, 1, 3, 1023, 1025, 16385, 70001, 300007)  # of float32: one-shot, two-shot, many chunks


def private(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank * 1000003 + count).standard_normal(count).astype(np.float32)


def in_rank_order(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def cut(array: np.ndarray, n: int) -> list[np.ndarray]:
    """Split into n uneven parts, some of them empty for small counts."""
    marks = [len(array) * i * i // (n * n) for i in range(n + 1)]
    return [array[a:b] for a, b in itertools.pairwise(marks)]


def reductions(g: Group, count: int) -> None:
    everyone = [private(rank, count) for rank in range(g.size)]
    want, local = in_rank_order(everyone), everyone[g.rank]
    settings = {"dtype": native.F32, "reduce": native.SUM}
    out = np.empty_like(local)
    g.run(native.ALL_REDUCE, [local], [out], **settings)
    np.testing.assert_array_equal(out, want)
    same = local.copy()
    g.run(native.ALL_REDUCE, [same], [same], **settings)
    np.testing.assert_array_equal(same, want)
    for root in range(g.size):
        out = np.empty_like(local)
        g.run(native.REDUCE, [local], [out] if g.rank == root else [], root=root, **settings)
        if g.rank == root:
            np.testing.assert_array_equal(out, want)
    part = np.empty_like(cut(want, g.size)[g.rank])
    g.run(native.REDUCE_SCATTER, cut(local, g.size), [part], **settings)
    np.testing.assert_array_equal(part, cut(want, g.size)[g.rank])


def moves(g: Group, count: int) -> None:
    everyone = [private(rank, count) for rank in range(g.size)]
    local = everyone[g.rank]
    shares = [cut(everyone[rank], g.size)[rank] for rank in range(g.size)]
    for root in range(g.size):
        is_root = g.rank == root
        out = np.empty_like(local)
        g.run(native.BROADCAST, [local] if is_root else [], [] if is_root else [out], root=root)
        np.testing.assert_array_equal(local if is_root else out, everyone[root])
        outs = [np.empty_like(share) for share in shares] if is_root else []
        g.run(native.GATHER, [shares[g.rank]], outs, root=root)
        for got, want in zip(outs, shares, strict=False):
            np.testing.assert_array_equal(got, want)
        own = np.empty_like(cut(everyone[root], g.size)[g.rank])
        g.run(native.SCATTER, cut(local, g.size) if is_root else [], [own], root=root)
        np.testing.assert_array_equal(own, cut(everyone[root], g.size)[g.rank])
    outs = [np.empty_like(share) for share in shares]
    g.run(native.ALL_GATHER, [shares[g.rank]], outs)
    for got, want in zip(outs, shares, strict=True):
        np.testing.assert_array_equal(got, want)
    outs = [np.empty_like(cut(everyone[rank], g.size)[g.rank]) for rank in range(g.size)]
    g.run(native.ALL_TO_ALL, cut(local, g.size), outs)
    for rank, got in enumerate(outs):
        np.testing.assert_array_equal(got, cut(everyone[rank], g.size)[g.rank])
    g.barrier()


def everything(g: Group) -> None:
    for count in COUNTS:
        reductions(g, count)
        moves(g, count)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_given_uneven_sizes_then_every_collective_is_exact(size: int) -> None:
    results(everything, size)


def test_given_small_staging_then_every_collective_is_exact() -> None:
    results(everything, 4, staging=16384)


def test_given_four_times_as_many_ranks_as_cores_then_all_collectives_work() -> None:
    results(reductions, 8, 5000)
    results(moves, 8, 5000)


def many_at_once(g: Group) -> None:
    arrays = [np.full(1 + 997 * (i % 7), g.rank + i, np.int64) for i in range(300)]
    settings = {"dtype": native.I64, "reduce": native.SUM}
    works = [g.submit(native.ALL_REDUCE, [a], [a], **settings) for a in arrays]
    last = np.array([g.rank], np.int64)
    g.run(native.ALL_REDUCE, [last], [last], **settings)  # runs after the queued ones
    assert last[0] == sum(range(g.size))
    for work in reversed(works):
        work.wait()
    for i, array in enumerate(arrays):
        assert (array == sum(rank + i for rank in range(g.size))).all()


def test_given_many_operations_in_flight_then_they_run_in_the_order_called() -> None:
    results(many_at_once, 3)


def soak(g: Group) -> int:
    one = np.array([1.0], np.float32)
    made = g.operation(
        native.ALL_REDUCE, [one], [one], dtype=native.F32, reduce=native.AVG, where="soak"
    )
    run = core().tutti_run
    for _ in range(100_000):
        assert run(g.handle, made, 60) == 0
    return int(one[0])


def test_given_100000_small_operations_then_all_succeed() -> None:
    assert results(soak, 2) == [1, 1]


def messages(g: Group) -> None:
    right, left = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    big = np.full(3_000_000, g.rank, np.int32)  # many times the ring
    from_left, from_right = np.empty_like(big), np.empty_like(big)
    sends = [g.submit(native.SEND, [big], peer=peer, tag=1) for peer in (left, right)]
    g.barrier()  # collectives are not blocked by messages
    recvs = [
        g.submit(native.RECV, [], [from_right], peer=right, tag=1),
        g.submit(native.RECV, [], [from_left], peer=left, tag=1),
    ]
    for work in sends + recvs:
        work.wait()
    assert (from_left == left).all() and (from_right == right).all()
    # Tags pick messages out of order; equal tags keep the order; empty ones count.
    for tag in (5, 6, 6, 7):
        g.run(native.SEND, [np.array([g.rank, tag, tag == 6])], peer=right, tag=tag)
    g.run(native.SEND, [np.empty(0)], peer=right, tag=8)
    for tag in (7, 6, 5, 6):
        got = np.empty(3, np.int64)
        g.run(native.RECV, [], [got], peer=left, tag=tag)
        assert got.tolist() == [left, tag, tag == 6]
    g.run(native.RECV, [], [np.empty(0)], peer=left, tag=8)
    # From any source.
    others = [rank for rank in range(g.size) if rank != g.rank]
    for other in others:
        g.run(native.SEND, [np.array([g.rank])], peer=other, tag=9)
    sources = []
    for _ in others:
        got = np.empty(1, np.int64)
        source = g.submit(native.RECV, [], [got], peer=-1, tag=9).wait()
        assert got[0] == source
        sources.append(source)
    assert sorted(sources) == others
    with pytest.raises(ValueError, match=f"peer {g.rank} is not another rank"):
        g.run(native.SEND, [big], peer=g.rank)


@pytest.mark.parametrize("size", [2, 3])
def test_given_messages_in_any_order_then_none_blocks_another(size: int) -> None:
    results(messages, size)


def on_symmetric_memory(g: Group) -> None:
    """Ranks exchange descriptors of their blocks with an all_gather, as a heap does."""
    length = 1 << 20
    own = core().tutti_segment_create(b"heap", length)
    card = np.array([os.getpid(), core().tutti_segment_fd(own)], np.int64)
    cards = [np.empty_like(card) for _ in range(g.size)]
    g.run(native.ALL_GATHER, [card], cards)
    heaps = [
        own if rank == g.rank else core().tutti_segment_open(*map(int, cards[rank]), length)
        for rank in range(g.size)
    ]
    assert all(heaps)
    g.barrier()
    bases = (native.c_void_p * g.size)(*map(core().tutti_segment_base, heaps))
    native.raise_for(core().tutti_group_add_block(g.handle, 1, bases, length))
    block = np.frombuffer((native.ctypes.c_char * length).from_address(bases[g.rank]), np.uint8)
    for who in ("all", "some"):  # when some ranks' tensors are private, all stage
        for count in (10, 20001, 100003):
            everyone = [private(rank, count) for rank in range(g.size)]
            want = in_rank_order(everyone)
            symmetric = who == "all" or g.rank % 2 == 0
            local = np.empty(count, np.float32)
            if symmetric:
                local = block[256 * g.rank : 256 * g.rank + 4 * count].view(np.float32)
            local[:] = everyone[g.rank]
            g.run(native.ALL_REDUCE, [local], [local], dtype=native.F32)
            np.testing.assert_array_equal(local, want)
            local[:] = everyone[g.rank]
            outs = [np.empty_like(local) for _ in range(g.size)]
            g.run(native.ALL_GATHER, [local], outs)
            local[:] = everyone[g.rank]  # at once: no peer may still be reading it
            for got, expected in zip(outs, everyone, strict=True):
                np.testing.assert_array_equal(got, expected)
            part = np.empty_like(cut(want, g.size)[g.rank])
            g.run(native.REDUCE_SCATTER, cut(local, g.size), [part], dtype=native.F32)
            local[:] = -1
            np.testing.assert_array_equal(part, cut(want, g.size)[g.rank])
            for root in range(g.size):
                local[:] = everyone[g.rank]
                is_root, out = g.rank == root, np.empty_like(local)
                sides = ([local], []) if is_root else ([], [out])
                g.run(native.BROADCAST, *sides, root=root)
                local[:] = -1
                if not is_root:
                    np.testing.assert_array_equal(out, everyone[root])
    native.raise_for(core().tutti_group_remove_block(g.handle, 1))
    g.barrier()
    for heap in heaps:
        core().tutti_segment_close(heap)


@pytest.mark.parametrize("size", [2, 3])
def test_given_symmetric_memory_then_results_have_the_same_bits_as_staged_ones(size: int) -> None:
    results(on_symmetric_memory, size)


def one_sided(g: Group) -> list[int]:
    own = core().tutti_segment_create(b"words", 8192)
    card = np.array([os.getpid(), core().tutti_segment_fd(own)], np.int64)
    cards = [np.empty_like(card) for _ in range(g.size)]
    g.run(native.ALL_GATHER, [card], cards)
    zero = own if g.rank == 0 else core().tutti_segment_open(*map(int, cards[0]), 8192)
    base = core().tutti_segment_base(zero)
    for _ in range(1000):
        core().tutti_fetch_add(base, 1)
    g.barrier()
    total = core().tutti_load(base)
    if g.rank == 1:
        payload = np.arange(100, dtype=np.int64)
        core().tutti_put_signal(base + 1024, payload.ctypes.data, payload.nbytes, base + 64, 3, 0)
    native.raise_for(core().tutti_wait_signal(base + 64, 3, 30.0, zero))
    got = np.frombuffer((native.ctypes.c_char * 800).from_address(base + 1024), np.int64)
    assert got.tolist() == list(range(100))
    swapped = core().tutti_compare_swap(base + 128, 0, g.rank + 1)
    with pytest.raises(native.ShmTimeout, match="should reach 4 but is at 3"):
        native.raise_for(core().tutti_wait_signal(base + 64, 4, 0.05, zero))
    g.barrier()
    core().tutti_segment_close(zero)
    if g.rank:
        core().tutti_segment_close(own)
    return [total, swapped]


def test_given_one_sided_words_then_atomics_count_and_signals_follow_their_bytes() -> None:
    got = results(one_sided, 3)
    assert [total for total, _ in got] == [3000] * 3
    assert sorted(swapped == 0 for _, swapped in got) == [False, False, True]
