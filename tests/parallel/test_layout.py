"""A layout reads and writes itself, and says what it needs when the world is another."""

import subprocess
import sys

import pytest

from tutti import Layout, UsageError


@pytest.mark.parametrize(("text", "dp"), [("dp1", 1), ("dp4", 4), ("dp512", 512)])
def test_a_layout_is_written_as_it_is_read(text: str, dp: int) -> None:
    layout = Layout.parse(text)
    assert layout == Layout(dp=dp)
    assert (str(layout), layout.size, layout.axes) == (text, dp, {"dp": dp})
    layout.check(dp)


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("dp4", 6, "layout dp4 needs 4 ranks, this world has 6: use --ranks 4 or dp6"),
        ("dp1", 2, "layout dp1 needs 1 rank, this world has 2: use --ranks 1 or dp2"),
    ],
)
def test_another_world_size_is_refused_with_the_equation_and_the_cure(
    text: str, world: int, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        Layout.parse(text).check(world)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ep4", "layout 'ep4': there is no axis 'ep': use dp"),
        ("dp", "layout 'dp': 'dp' is not an axis and its number of ranks: write dp4"),
        ("", "layout '': '' is not an axis and its number of ranks: write dp4"),
        ("dp2.dp2", "layout 'dp2.dp2' names the axis dp twice: write it once"),
        ("dp0", "layout axis dp has 0 ranks: it needs at least 1"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Layout.parse(text)
    assert str(refused.value) == message


def test_layout_and_options_need_no_torch() -> None:
    program = (
        "import sys; from tutti.parallel import EngineOptions, Layout; EngineOptions(); "
        "Layout.parse('dp2').check(2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
