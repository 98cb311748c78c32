"""Sizes, counts, bandwidths and payloads: what nccl-tests publishes, and what must always hold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.formulas import OPERATIONS, bandwidth, uneven_parts
from tutti.bench.payload import DTYPES, payload
from tutti.bench.pinning import share_of
from tutti.bench.sizes import format_bytes, format_size, parse_size, parse_sizes
from tutti.bench.spread import percentile, spread_us
from tutti.world.errors import UsageError


@pytest.mark.parametrize(
    ("name", "count", "factor"),
    [  # for 8 ranks and S = 1 MiB of float32; the factors are those of doc/PERFORMANCE.md
        ("all_reduce", 262144, 2 * 7 / 8),
        ("all_gather", 32768, 7 / 8),
        ("reduce_scatter", 32768, 7 / 8),
        ("all_to_all", 32768, 7 / 8),
        ("all_to_all_uneven", 32768, 7 / 8),
        ("all_gather_uneven", 32768, 7 / 8),
        ("gather", 32768, 7 / 8),
        ("scatter", 32768, 7 / 8),
        ("broadcast", 262144, 1.0),
        ("reduce", 262144, 1.0),
        ("send_recv", 262144, 1.0),
    ],
)
def test_counts_and_bus_factors_are_those_of_nccl_tests(
    name: str, count: int, factor: float
) -> None:
    operation = OPERATIONS[name]
    assert operation.count(1 << 20, 4, 8) == count
    assert operation.bytes(count, 4, 8) == 1 << 20
    assert operation.bus_factor(8) == factor


def test_a_published_line_of_nccl_tests_comes_out() -> None:
    # 8 GPUs, all_reduce of 128 MiB in 619.2 µs: algbw 216.76, busbw 379.32 GB/s
    algorithm, bus = bandwidth(OPERATIONS["all_reduce"], 134217728, 8, 619.2e-6)
    assert (round(algorithm, 2), round(bus, 2)) == (216.76, 379.33)


@given(
    st.sampled_from(list(OPERATIONS.values())),
    st.integers(1, 1 << 28),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 512),
)
def test_a_count_is_never_larger_than_asked_unless_it_is_one(op, size, element, ranks) -> None:
    count = op.count(size, element, ranks)
    if op.name == "barrier":
        assert count == 0
    else:
        assert count >= 1
        assert op.bytes(count, element, ranks) <= size or count == 1


def test_one_rank_moves_nothing_over_a_bus() -> None:
    assert OPERATIONS["all_reduce"].bus_factor(1) == 0


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", [4]),
        ("1K,4", [4, 1024]),
        ("64KB,64kib,65536", [65536]),
        ("1K:64K:x4", [1024, 4096, 16384, 65536]),
        ("1K:4K", [1024, 2048, 4096]),
        ("1K:100K:x8", [1024, 8192, 65536]),
        ("1K:3K:+1K,1M", [1024, 2048, 3072, 1 << 20]),
    ],
)
def test_lists_of_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "0", "1.5K", "-4", "x", "4:", "4K:1K", "1:4:x1", "1:4:+0", "1:2:3:4", "1:1G:+1"]
)
def test_a_list_that_means_nothing_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--sizes"):
        parse_sizes(text)


@given(st.integers(1, 1 << 40))
def test_a_size_is_read_as_it_was_written(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((4, "4 B"), (1023, "1023 B"), (4096, "4 KB"), (5000, "4.88 KB"), (517_552, "505 KB")),
        *(((1 << 20) - 1, "1 MB"), (25 << 20, "25 MB"), (3 << 40, "3072 GB")),
    ],
)
def test_sizes_that_were_measured_have_three_digits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 1 << 20), st.integers(0, 12), st.integers(2, 9))
def test_a_range_holds_its_first_size_and_nothing_above_its_last(first, more, factor) -> None:
    last = first * factor**more
    sizes = parse_sizes(f"{first}:{last}:x{factor}")
    assert sizes[0] == first and sizes[-1] == last and len(sizes) == more + 1


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=50))
def test_percentiles_lie_between_the_extremes_and_rise(samples: list[float]) -> None:
    ordered = sorted(samples)
    p50, p95 = percentile(ordered, 50), percentile(ordered, 95)
    assert ordered[0] <= p50 <= p95 <= ordered[-1] or math.isclose(p50, p95)


def test_the_spread_of_known_samples() -> None:
    assert spread_us([1e-6, 2e-6, 3e-6]) == {
        "p50": 2.0, "p95": 2.9, "p99": 2.98, "min": 1.0, "mean": 2.0, "cv": 0.4082
    }  # fmt: skip


@given(st.integers(1, 64), st.integers(1, 64))
def test_pinned_ranks_share_no_cpu_unless_they_outnumber_them(cpus: int, ranks: int) -> None:
    shares = [share_of(tuple(range(cpus)), rank, ranks) for rank in range(ranks)]
    used = [cpu for share in shares for cpu in share]
    assert all(shares) and set(used) == set(range(min(cpus, max(ranks, cpus))))
    if ranks <= cpus:
        assert len(used) == len(set(used))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_payloads_are_exact_in_any_order_and_never_zero(dtype: torch.dtype, ranks: int) -> None:
    parts = [payload(OPERATIONS["all_reduce"], 9000, dtype, rank, ranks) for rank in range(ranks)]
    forwards, backwards = parts[0].sent.clone(), parts[-1].sent.clone()
    for part in parts[1:]:
        forwards += part.sent
    for part in reversed(parts[:-1]):
        backwards += part.sent
    assert torch.equal(forwards, backwards)
    assert parts[0].wrong_in(forwards) == 0
    assert parts[0].wrong_in(torch.zeros_like(forwards)) == 9000
    if ranks > 1:
        assert not torch.equal(parts[0].sent, parts[1].sent)


@pytest.mark.parametrize("count", [1, 3, 8191, 10000])
def test_shares_fit_together(count: int) -> None:
    ranks, kind = 3, torch.float32
    whole = [payload(OPERATIONS["reduce_scatter"], count, kind, rank, ranks) for rank in range(3)]
    total = sum(part.sent for part in whole)
    assert torch.equal(torch.cat([part.expected for part in whole]), total)
    turned = [payload(OPERATIONS["all_to_all"], count, kind, rank, ranks) for rank in range(3)]
    for receiver in range(ranks):
        pieces = [turned[sender].sent.chunk(ranks)[receiver] for sender in range(ranks)]
        assert torch.equal(turned[receiver].expected, torch.cat(pieces))


@pytest.mark.parametrize("count", [1, 3, 8191])
def test_uneven_shares_fit_together_and_differ(count: int) -> None:
    ranks, kind = 3, torch.float32
    shares = uneven_parts(count, ranks)
    assert sum(shares) == count * ranks and (len(set(shares)) == ranks or count == 1)
    gathered = [payload(OPERATIONS["all_gather_uneven"], count, kind, r, ranks) for r in range(3)]
    assert [len(part.sent) for part in gathered] == shares
    assert torch.equal(gathered[1].expected, torch.cat([part.sent for part in gathered]))
    turned = [payload(OPERATIONS["all_to_all_uneven"], count, kind, r, ranks) for r in range(3)]
    for receiver in range(ranks):
        pieces = []
        for sender, part in enumerate(turned):
            splits = [shares[(sender + each) % ranks] for each in range(ranks)]
            pieces.append(part.sent.split(splits)[receiver])
        assert torch.equal(turned[receiver].expected, torch.cat(pieces))


def test_wrong_elements_are_counted_one_by_one() -> None:
    part = payload(OPERATIONS["all_reduce"], 100, torch.float32, 0, 2)
    received = part.expected.clone()
    received[7] += 1
    received[9] = float("nan")
    assert part.wrong_in(received) == 2
