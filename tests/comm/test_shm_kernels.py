"""The core's reductions: every dtype and operation, odd counts, 1 to 5 sources, one rounding."""

import ctypes
import itertools

import pytest
import torch

from tutti.comm.shm import native
from tutti.comm.shm.native import core

DTYPES = {
    native.F64: torch.float64,
    native.F32: torch.float32,
    native.F16: torch.float16,
    native.BF16: torch.bfloat16,
    native.I64: torch.int64,
    native.I32: torch.int32,
    native.I16: torch.int16,
    native.I8: torch.int8,
    native.U8: torch.uint8,
    native.BOOL: torch.bool,
}
FLOATS = (native.F64, native.F32, native.F16, native.BF16)
BITS = (native.BAND, native.BOR, native.BXOR)
COUNTS = (0, 1, 3, 15, 17, 511, 513, 1500)


def reduced(parts: list[torch.Tensor], dtype: int, reduce: int, out: torch.Tensor) -> torch.Tensor:
    addresses = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    native.raise_for(
        core().tutti_reduce_into(out.data_ptr(), addresses, len(parts), out.numel(), dtype, reduce)
    )
    return out


def expected(parts: list[torch.Tensor], dtype: int, reduce: int) -> torch.Tensor:
    """Combine in rank order; 16-bit floats are combined in float32 and rounded once."""
    narrow = dtype in (native.F16, native.BF16)
    wide = [part.float() for part in parts] if narrow else parts
    if dtype == native.BOOL:
        combine = {
            native.SUM: torch.logical_or,
            native.MAX: torch.logical_or,
            native.BOR: torch.logical_or,
            native.PRODUCT: torch.logical_and,
            native.MIN: torch.logical_and,
            native.BAND: torch.logical_and,
            native.BXOR: torch.logical_xor,
        }[reduce]
    else:
        combine = {
            native.SUM: torch.add,
            native.AVG: torch.add,
            native.PRODUCT: torch.mul,
            native.MIN: torch.minimum,
            native.MAX: torch.maximum,
            native.BAND: torch.bitwise_and,
            native.BOR: torch.bitwise_or,
            native.BXOR: torch.bitwise_xor,
        }[reduce]
    total = wide[0]
    for part in wide[1:]:
        total = combine(total, part)
    if reduce == native.AVG and len(parts) > 1:
        total = total / len(parts)
    return total.to(parts[0].dtype)


def sources(dtype: int, n: int, count: int, offset: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dtype * 1000 + n * 100 + count)
    made = []
    for _ in range(n):
        if dtype in FLOATS:
            data = torch.randn(count + offset, generator=generator).to(DTYPES[dtype])
        elif dtype == native.BOOL:
            data = torch.rand(count + offset, generator=generator) < 0.5
        else:
            data = torch.randint(-(2**40), 2**40, (count + offset,), generator=generator).to(
                DTYPES[dtype]
            )
        made.append(data[offset:])
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_any_reduction_then_the_bits_are_those_of_torch_in_rank_order(dtype: int) -> None:
    for reduce in range(8):
        defined = (reduce not in BITS) if dtype in FLOATS else reduce != native.AVG
        if not defined:
            part = torch.ones(4).to(DTYPES[dtype])
            with pytest.raises(ValueError, match="is not defined"):
                reduced([part], dtype, reduce, part)
            continue
        for n in range(1, 6):
            for count in COUNTS:
                parts = sources(dtype, n, count, offset=count % 3)
                want = expected(parts, dtype, reduce)
                got = reduced(parts, dtype, reduce, torch.empty_like(parts[0]))
                assert torch.equal(got, want), (reduce, n, count)
                for place in range(n):  # in place: the result replaces one of the sources
                    again = [part.clone() for part in parts]
                    assert torch.equal(reduced(again, dtype, reduce, again[place]), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_given_nan_and_infinity_when_reduced_then_min_and_max_propagate_nan(dtype: int) -> None:
    values = [float("nan"), float("inf"), -float("inf"), 0.0, 1.5, 60000.0, -60000.0, 1e-7]
    grid = torch.tensor(list(itertools.product(values, values)), dtype=DTYPES[dtype])
    a, b = grid[:, 0].contiguous(), grid[:, 1].contiguous()
    for reduce in (native.MIN, native.MAX, native.SUM, native.PRODUCT, native.AVG):
        got = reduced([a, b], dtype, reduce, torch.empty_like(a))
        want = expected([a, b], dtype, reduce)
        assert torch.equal(torch.isnan(got), torch.isnan(want))
        assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want))


def test_given_every_float16_and_bfloat16_when_copied_through_a_sum_with_zero_then_unchanged() -> (
    None
):
    for dtype in (native.F16, native.BF16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
        every = every[~torch.isnan(every)]
        got = reduced([every, torch.zeros_like(every)], dtype, native.SUM, torch.empty_like(every))
        assert torch.equal(got, every)


def test_the_vector_code_in_use_is_named() -> None:
    assert core().tutti_vector_code().decode() in {"sse2", "avx2", "avx512", "neon", "plain"}
