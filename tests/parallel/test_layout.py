"""Layouts: parsing, writing, and the error for a world with another number of ranks."""

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti import Layout, UsageError
from tutti.parallel.layout import layout_of

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
    ("text", "world", "message"),
    [
        ("dp4", 6, "layout dp4 needs 4 ranks, this world has 6: use --ranks 4 or dp6"),
        ("dp1", 2, "layout dp1 needs 1 rank, this world has 2: use --ranks 1 or dp2"),
        (
            "dp2.tp4",
            6,
            "layout dp2.tp4 needs 2 × 4 = 8 ranks, this world has 6: use --ranks 8 or dp3.tp2",
        ),
        (
            "tp2.pp2",
            3,
            "layout tp2.pp2 needs 2 × 2 = 4 ranks, this world has 3: use --ranks 4 or tp3 or pp3",
        ),
        (
            "dp2.tp2.pp2",
            4,
            "layout dp2.tp2.pp2 needs 2 × 2 × 2 = 8 ranks, this world has 4: use --ranks 8 or "
            "dp2.tp2 or dp2.pp2",
        ),
    ],
)
def test_another_world_size_is_refused_with_the_equation_and_the_cure(
    text: str, world: int, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        layout_of(text, world)
    assert str(refused.value) == message


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 32), st.integers(1, 32))
def test_the_layouts_that_are_offered_instead_fit_the_world(have: int, want: int) -> None:
    for layout in Layout.every(want):
        nearest = layout.nearest(have)
        assert nearest
        assert all(other.size == have for other in nearest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ep4", "layout 'ep4': there is no axis 'ep': use dp, shard, tp, pp"),
        ("dp", "layout 'dp': 'dp' is not an axis and its number of ranks: write dp2.tp2"),
        ("", "layout '': '' is not an axis and its number of ranks: write dp2.tp2"),
        ("dp2.dp2", "layout 'dp2.dp2' names the axis dp twice: write it once"),
        ("dp0", "layout axis dp has 0 ranks: it needs at least 1"),
    ],
)
def test_text_that_is_not_a_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Layout.parse(text)
    assert str(refused.value) == message


def test_layout_and_options_need_no_torch() -> None:
    program = (
        "import sys; from tutti.parallel import EngineOptions, Layout; EngineOptions(); "
        "Layout.parse('dp2.tp2').check(4); Layout.every(8); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
