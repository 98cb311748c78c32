"""Layouts: parsing, writing, world sizes that do not fit; options that exclude each other."""

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti import Layout, UsageError
from tutti.parallel import EngineOptions
from tutti.parallel.layout import ParallelOptions, ScheduleName, flag_of, layout_of, leave_out

WRITTEN = [
    ("dp1", Layout()),
    ("dp512", Layout(dp=512)),
    ("shard4", Layout(shard=4)),
    ("dp2.shard2.tp2.pp2", Layout(dp=2, shard=2, tp=2, pp=2)),
    ("tp8.pp16", Layout(tp=8, pp=16)),
]


@pytest.mark.parametrize(("text", "layout"), WRITTEN)
def test_a_parsed_layout_is_written_as_the_same_text(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout
    assert str(layout) == text
    layout.check(layout.size)


def test_the_axes_may_be_written_in_any_order() -> None:
    assert Layout.parse("pp2.dp3") == Layout(dp=3, pp=2)


@settings(deadline=None)
@given(st.integers(1, 64))
def test_every_lists_each_layout_of_a_number_of_ranks_once(ranks: int) -> None:
    layouts = Layout.every(ranks)
    assert len(set(layouts)) == len(layouts)
    assert all(layout.size == ranks for layout in layouts)
    assert all(Layout.parse(str(layout)) == layout for layout in layouts)
    # The number of ways to distribute the powers of each prime over four axes.
    expected, rest = 1, ranks
    for prime in range(2, ranks + 1):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        expected *= math.comb(power + 3, 3)
    assert len(layouts) == expected


@pytest.mark.parametrize(
    ("text", "world", "equation", "cure"),
    [
        ("dp4", 6, "needs 4 ranks", "--ranks 4 or dp6"),
        ("dp1", 2, "needs 1 rank,", "--ranks 1 or dp2"),
        ("dp2.tp4", 6, "2 × 4 = 8 ranks", "--ranks 8 or dp3.tp2"),
        ("tp2.pp2", 3, "2 × 2 = 4 ranks", "--ranks 4 or tp3 or pp3"),
        ("dp2.tp2.pp2", 4, "2 × 2 × 2 = 8 ranks", "--ranks 8 or dp2.tp2 or dp2.pp2"),
    ],
)
def test_another_world_size_is_refused_with_the_equation_and_the_cure(
    text: str, world: int, equation: str, cure: str
) -> None:
    with pytest.raises(UsageError) as refused:
        layout_of(text, world)
    message = str(refused.value)
    assert equation in message
    assert f"world has {world}" in message
    assert message.endswith(cure)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 32), st.integers(1, 32))
def test_suggested_layouts_have_the_size_of_the_world(have: int, want: int) -> None:
    for layout in Layout.every(want):
        nearest = layout.nearest(have)
        assert nearest
        assert all(other.size == have for other in nearest)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("ep4", ["axis 'ep'", "dp, shard, tp, pp"]),
        ("dp", ["'dp'", "dp2.tp2"]),
        ("", ["''", "dp2.tp2"]),
        ("dp2.dp2", ["axis dp twice"]),
        ("dp0", ["axis dp", "at least 1", "got 0"]),
    ],
)
def test_text_that_is_not_a_layout_is_refused(text: str, facts: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        Layout.parse(text)
    assert all(fact in str(refused.value) for fact in facts)


def test_layout_and_options_need_no_torch() -> None:
    program = (
        "import sys; from tutti.parallel import EngineOptions, Layout; EngineOptions(); "
        "Layout.parse('dp2.tp2').check(4); Layout.every(8); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "single"},
        {"engine": "dataparallel"},
        {"engine": "scratch", "scratch_reduce": "each", "sync_batchnorm": True},
        {"engine": "scratch", "find_unused": True},
        {"overlap": False, "find_unused": True, "bucket_mb": 0.5},
        {"static_graph": True, "compress": "bf16", "gradient_as_bucket_view": False},
        {"compress": "powersgd", "powersgd_rank": 4},
    ],
)
def test_compatible_options_are_accepted(options: dict[str, Any]) -> None:
    accepted = EngineOptions(**options)
    assert {name: getattr(accepted, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"compress": "bf16", "overlap": False}, ["--compress bf16", "--no-overlap"]),
        ({"static_graph": True, "overlap": False}, ["--static-graph", "--no-overlap"]),
        ({"static_graph": True, "find_unused": True}, ["--static-graph", "--find-unused"]),
        ({"powersgd_rank": 4}, ["--powersgd-rank 4", "--compress none"]),
        ({"engine": "scratch", "compress": "fp16"}, ["--compress fp16", "--engine scratch"]),
        ({"engine": "scratch", "overlap": False}, ["--no-overlap", "--engine scratch"]),
        ({"engine": "single", "bucket_mb": 1.0}, ["--bucket-mb 1.0", "--engine single"]),
        ({"engine": "single", "find_unused": True}, ["--find-unused", "--engine ddp or scratch"]),
        ({"engine": "dataparallel", "sync_batchnorm": True}, ["--sync-batchnorm", "dataparallel"]),
        ({"scratch_reduce": "each"}, ["--scratch-reduce each", "--engine scratch"]),
        ({"bucket_mb": 0.0}, ["--bucket-mb", "got 0"]),
        ({"compress": "powersgd", "powersgd_rank": 0}, ["--powersgd-rank", "got 0"]),
    ],
)
def test_incompatible_options_are_refused_with_both_flags(
    options: dict[str, Any], flags: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        EngineOptions(**options)
    for flag in flags:
        assert flag in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "stages", "cure"),
    [("1f1b", 2, "interleaved"), ("interleaved", 1, "1f1b"), ("zbv", 3, "interleaved")],
)
def test_a_schedule_limits_the_stages_per_rank(
    schedule: ScheduleName, stages: int, cure: str
) -> None:
    with pytest.raises(UsageError, match=rf"{schedule}.*--stages-per-rank {stages}:.*{cure}"):
        ParallelOptions(pipeline_schedule=schedule, stages_per_rank=stages)


def test_suggested_flags_exist() -> None:
    assert flag_of("overlap", False) == "--no-overlap"
    assert flag_of("reshard", False) == "--no-reshard"
    assert "None" not in leave_out("reshard", None)  # no flag sets this value
