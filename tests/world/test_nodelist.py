"""Slurm's compressed lists, against hand-made expectations and against scontrol itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.world.errors import UsageError
from tutti.world.launchers import expand_hosts, expand_tasks_per_node


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4],login", ["n1", "n3", "n4", "login"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("gpu-a[100].cluster,b", ["gpu-a100.cluster", "b"]),
    ],
)
def test_a_list_expands_to_its_hosts_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[1-2", "n[2-1]", "n[a-b]", "", "a,,b", "n[[1]]"]
)
def test_a_list_that_does_not_parse_is_named_with_the_cure(text: str) -> None:
    with pytest.raises(UsageError, match=r"SLURM_STEP_NODELIST=.* does not parse.*MASTER_ADDR"):
        expand_hosts(text, "SLURM_STEP_NODELIST")


@given(
    prefix=st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z]", fullmatch=True),
    numbers=st.lists(st.integers(0, 10**4), min_size=1, max_size=8, unique=True),
    width=st.integers(1, 6),
)
def test_any_padded_set_of_numbers_survives_compression(
    prefix: str, numbers: list[int], width: int
) -> None:
    names = [f"{prefix}{n:0{width}d}" for n in numbers]
    items = ",".join(f"{n:0{width}d}" for n in numbers)
    assert expand_hosts(f"{prefix}[{items}]") == names


def test_tasks_per_node_expand_to_one_count_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]
    with pytest.raises(UsageError, match="does not parse at 'x'"):
        expand_tasks_per_node("2,x")
