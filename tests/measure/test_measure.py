"""Units, statistics, collective formulas and terminal output that all measuring commands share."""

import math
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.measure.collective_bandwidth import OPERATIONS, bandwidth, uneven_shards
from tutti.measure.files import write_atomically
from tutti.measure.spread import (
    percentile,
    relative_mad,
    relative_range,
    round_significant,
    summarize,
    summarize_us,
)
from tutti.measure.terminal import wrap_line
from tutti.measure.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_size,
    parse_size,
    parse_sizes,
)

# ---- Collective formulas ----


@pytest.mark.parametrize(
    ("name", "count", "factor"),
    [  # for 8 ranks and S = 1 MiB of float32; factors from nccl-tests doc/PERFORMANCE.md
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


def test_bandwidths_of_a_published_nccl_tests_line() -> None:
    # 8 GPUs, all_reduce of 128 MiB in 619.2 µs: algbw 216.76, busbw 379.32 GB/s
    algorithm, bus = bandwidth(OPERATIONS["all_reduce"], 134217728, 8, 619.2e-6)
    assert (round(algorithm, 2), round(bus, 2)) == (216.76, 379.33)


@given(
    st.sampled_from(list(OPERATIONS.values())),
    st.integers(1, 1 << 28),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 512),
)
def test_a_count_never_exceeds_the_requested_size_unless_it_is_one(
    op, size, element, ranks
) -> None:
    count = op.count(size, element, ranks)
    if op.name == "barrier":
        assert count == 0
    else:
        assert count >= 1
        assert op.bytes(count, element, ranks) <= size or count == 1


def test_one_rank_has_no_bus_traffic() -> None:
    assert OPERATIONS["all_reduce"].bus_factor(1) == 0


@given(st.integers(2, 1000), st.integers(2, 16))
def test_uneven_shards_sum_to_the_whole_and_ascend(count: int, ranks: int) -> None:
    shards = uneven_shards(count, ranks)
    assert sum(shards) == count * ranks and len(shards) == ranks
    assert all(after >= before - 1 for before, after in pairwise(shards))


# ---- Units ----


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
def test_lists_and_ranges_of_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "0", "1.5K", "-4", "x", "4:", "4K:1K", "1:4:x1", "1:4:+0", "1:2:3:4", "1:1G:+1"]
)
def test_an_invalid_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_sizes(text)


@given(st.integers(1, 1 << 40))
def test_a_formatted_size_parses_to_the_same_size(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 1 << 20), st.integers(0, 12), st.integers(2, 9))
def test_a_range_starts_at_its_first_size_and_ends_at_its_last(first, more, factor) -> None:
    last = first * factor**more
    sizes = parse_sizes(f"{first}:{last}:x{factor}")
    assert sizes[0] == first and sizes[-1] == last and len(sizes) == more + 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((4, "4 B"), (1023, "1023 B"), (4096, "4 KiB"), (5000, "4.88 KiB"), (517_552, "505 KiB")),
        *(((1 << 20) - 1, "1 MiB"), (25 << 20, "25 MiB"), (3 << 40, "3 TiB"), (0, "0 B")),
    ],
)
def test_measured_sizes_have_three_digits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.25 s"), (0.0351, "35.1 ms"), (820e-6, "820 µs"), (90e-9, "90 ns"), (150, "150 s")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_are_decimal() -> None:
    assert format_rate(12.5e9) == "12.5 GB/s" and format_rate(94e7) == "940 MB/s"


# ---- Statistics ----


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=50))
def test_percentiles_lie_between_the_extremes_and_ascend(samples: list[float]) -> None:
    p50, p95 = percentile(samples, 50), percentile(samples, 95)
    assert min(samples) <= p50 <= p95 <= max(samples) or math.isclose(p50, p95)


def test_summaries_of_known_samples() -> None:
    assert summarize_us([3e-6, 1e-6, 2e-6]) == {
        "p50": 2.0, "p95": 2.9, "p99": 2.98, "min": 1.0, "mean": 2.0, "cv": 0.4082
    }  # fmt: skip
    assert summarize([3, 1, 8]) == {"mean": 4, "p50": 3, "min": 1, "max": 8}


def test_relative_spreads_of_known_samples() -> None:
    assert math.isclose(relative_mad([9, 10, 11, 1000]), 1.4826 * 1 / 10.5)
    assert relative_mad([5]) == 0 and relative_mad([0, 0]) == 0
    assert relative_range([1, 3]) == 1 and relative_range([]) is None
    assert round_significant(0.0246123456) == 0.024612


# ---- Terminal and files ----


def test_a_long_line_is_wrapped_at_words_with_an_indent() -> None:
    assert list(wrap_line("# short", 60)) == ["# short"]
    text = "# " + " ".join(["word"] * 30) + " /a/path/that/is/longer/than/all/the/rest/of/the/line"
    lines = list(wrap_line(text, 40))
    assert all(line.startswith("#   ") for line in lines[1:]) and max(map(len, lines[:-1])) <= 40
    assert " ".join(line.lstrip("# ") for line in lines) == text[2:]


def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_text() == "new"


def test_writing_to_a_pipe_or_device_does_not_replace_it_with_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)
