"""Triton kernels on device memory of other ranks: signals on 64-bit words, atomic row additions.

Every synchronizing access is an atomic operation at system scope: a release if it publishes earlier
writes, an acquire if it reads what other ranks published. Writes by earlier kernels and copies on
the stream precede the kernel, so a release in the kernel also publishes these writes. A word is
passed as an address, because it may be in the memory of another rank.
"""
# Triton compiles these functions from their source: parameters have Triton's types, not Python's.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

WARPS = 1  # one warp is enough for one word

# Triton compiles a kernel again for some values of its integer arguments (1, multiples of 16).
# do_not_specialize prevents this.


@triton.jit(do_not_specialize=["address", "value"])
def set_word(address, value):
    word = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(word, value.to(tl.int64), sem="release", scope="sys")


@triton.jit(do_not_specialize=["address", "value", "before"])
def add_to_word(address, value, before):
    word = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    old = tl.atomic_add(word, value.to(tl.int64), sem="acq_rel", scope="sys")
    tl.store(before.to(tl.int64).to(tl.pointer_type(tl.int64)), old)


@triton.jit(do_not_specialize=["address", "expected", "desired", "before"])
def swap_word(address, expected, desired, before):
    word = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    old = tl.atomic_cas(
        word, expected.to(tl.int64), desired.to(tl.int64), sem="acq_rel", scope="sys"
    )
    tl.store(before.to(tl.int64).to(tl.pointer_type(tl.int64)), old)


@triton.jit
def _now():
    """Return the time in ns. All threads get the same time, so that they do not diverge."""
    return tl.max(tl.extra.cuda.globaltimer() + tl.arange(0, 32), axis=0)


@triton.jit
def _await(word, at_least, start, limit_ns):
    """Load the word until it reaches `at_least` or the time limit. Return the last value."""
    value = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while (value < at_least) & (_now() - start < limit_ns):
        value = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    return value


@triton.jit(do_not_specialize=["address", "at_least", "limit_ns", "failed", "number"])
def wait_for_word(address, at_least, limit_ns, failed, number):
    """Wait until a word is at least `at_least`.

    If the wait times out, the kernel writes `number` to the word at address `failed` and ends, so
    that the stream continues. The host identifies the wait by `number`.
    """
    word = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    wanted = at_least.to(tl.int64)
    start = _now()
    value = _await(word, wanted, start, limit_ns.to(tl.int64))
    if value < wanted:
        tl.store(failed.to(tl.int64).to(tl.pointer_type(tl.int64)), number.to(tl.int64))


@triton.jit(
    do_not_specialize=["bases", "rank", "size", "arrivals", "count", "limit_ns", "failed", "number"]
)
def stream_barrier(bases, rank, size, arrivals, count, limit_ns, failed, number):
    """Wait until all ranks have launched this kernel.

    `bases` is the address of a table with the base address of each rank's block. `arrivals` and
    `count` are offsets in a block. At `arrivals`, a block has one word per rank, and each rank
    writes its barrier count to its word in all blocks. At `count`, a rank keeps its own barrier
    count. This count is in device memory, so that the kernel can be part of a CUDA graph.
    """
    table = bases.to(tl.int64).to(tl.pointer_type(tl.int64))
    own_base = tl.load(table + rank)
    own_count = (own_base + count).to(tl.pointer_type(tl.int64))
    turn = tl.load(own_count) + 1
    tl.store(own_count, turn)
    for peer in range(size):
        word = (tl.load(table + peer) + arrivals + 8 * rank).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(word, turn, sem="release", scope="sys")
    start = _now()
    for peer in range(size):
        word = (own_base + arrivals + 8 * peer).to(tl.pointer_type(tl.int64))
        value = _await(word, turn, start, limit_ns.to(tl.int64))
        if value < turn:
            tl.store(failed.to(tl.int64).to(tl.pointer_type(tl.int64)), number.to(tl.int64))


_BLOCK = 256


@triton.jit
def _add_rows(table, rows, values, columns, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(values + tl.program_id(0).to(tl.int64) * columns + column, mask=inside)
    # torch's index_add_ is atomic only within one GPU, but peers may add from another GPU.
    tl.atomic_add(table + row * columns + column, value, mask=inside, sem="relaxed", scope="sys")


def add_rows(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add values[i] to table[rows[i]]. The addition of an element is atomic across all GPUs."""
    columns = table.shape[1]
    grid = (len(rows), triton.cdiv(columns, _BLOCK))
    _add_rows[grid](table, rows.contiguous(), values.contiguous(), columns, BLOCK=_BLOCK)
