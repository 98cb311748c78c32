"""Who writes what: every element once, whatever the ranks hold, and evenly."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.train.checkpoint_plan import Box, Holding, cover_problem, divide
from tutti.world.errors import RanksDiffer


def held(**tensors: tuple[tuple[int, ...], Box | None]) -> Holding:
    return Holding(
        {name: ("F32", shape) for name, (shape, _) in tensors.items()},
        {name: box for name, (_, box) in tensors.items() if box is not None},
        frozenset(),
    )


def whole(*shape: int) -> tuple[tuple[int, ...], Box]:
    return shape, Box((0,) * len(shape), shape)


def written(holdings: list[Holding]) -> list[dict[str, int]]:
    return [{piece.key: piece.bytes for piece in share} for share in divide(holdings)]


def test_replicas_are_spread_evenly() -> None:
    holding = held(**{f"p{n}": whole(10 * n + 1, 3) for n in range(20)})
    shares = written([holding] * 3)
    assert sorted(itertools.chain(*shares)) == sorted(holding.tensors)
    loads = [sum(share.values()) for share in shares]
    assert max(loads) - min(loads) <= max(shares[0].values())


def test_shards_on_a_grid_are_written_by_one_of_their_holders() -> None:
    """A mesh of two replicas by two shards: ranks 0 and 2 hold one half, 1 and 3 the other."""
    top, bottom = ((4, 2), Box((0, 0), (2, 2))), ((4, 2), Box((2, 0), (2, 2)))
    grid = [held(a=top, b=top), held(a=bottom, b=bottom)] * 2
    shares = written(grid)
    assert all(sum(share.values()) == 16 for share in shares)
    assert {*shares[0], *shares[2]} == {"a[0:2,0:2]", "b[0:2,0:2]"}
    assert {*shares[1], *shares[3]} == {"a[2:4,0:2]", "b[2:4,0:2]"}


def test_stages_of_a_pipeline_hold_different_tensors() -> None:
    assert written([held(a=whole(2)), held(b=whole(3))]) == [{"a": 8}, {"b": 12}]


def test_a_rank_without_rows_and_a_tensor_without_elements_write_nothing() -> None:
    shares = written([held(a=whole(2), none=((0, 3), None)), held(a=((2,), None))])
    assert shares == [{"a": 8}, {}]


def test_what_differs_between_ranks_comes_from_the_first_that_has_it() -> None:
    holding = held(weight=whole(8), mean=whole(4), variance=whole(4))
    uneven = Holding(holding.tensors, holding.boxes, frozenset({"mean", "variance"}))
    assert written([uneven, uneven])[0].keys() >= {"mean", "variance"}


def test_ranks_that_disagree_are_told() -> None:
    with pytest.raises(RanksDiffer, match=r"a is .* on rank 1"):
        divide([held(a=whole(2)), held(a=whole(3))])
    half = ((4,), Box((0,), (2,)))
    with pytest.raises(RanksDiffer, match="have 2 elements together, not 4"):
        divide([held(a=half), held(a=half)])
    with pytest.raises(RanksDiffer, match="have 6 elements together, not 4"):
        divide([held(a=half), held(a=whole(4))])


def test_a_holding_survives_the_journey() -> None:
    import json

    holding = held(a=whole(2, 3), b=((4,), Box((1,), (2,))), c=whole())
    back = Holding.from_json(json.loads(json.dumps(holding.to_json())))
    assert back == holding and back.digest == holding.digest


@st.composite
def cut_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, cut into boxes by random cuts, each through one box."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        first, second, shifted = list(box.sizes), list(box.sizes), list(box.offsets)
        first[dim], second[dim] = at, box.sizes[dim] - at
        shifted[dim] += at
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(shifted), tuple(second))]
    return shape, draw(st.permutations(boxes))


@given(cut_boxes())
def test_a_tensor_cut_in_any_way_is_covered(cut: tuple[tuple[int, ...], list[Box]]) -> None:
    assert cover_problem(*cut) is None


@given(cut_boxes(), st.data())
def test_boxes_are_accepted_only_if_they_cover_every_element_once(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    moved = list(boxes)
    victim = data.draw(st.integers(0, len(boxes) - 1))
    dims = len(shape)
    offsets = tuple(data.draw(st.lists(st.integers(0, 6), min_size=dims, max_size=dims)))
    moved[victim] = Box(offsets, boxes[victim].sizes)
    count = torch.zeros([size + 12 for size in shape])
    for box in moved:
        count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    inside = count[tuple(slice(0, size) for size in shape)]
    covers = bool((inside == 1).all()) and count.sum() == inside.sum()
    assert (cover_problem(shape, moved) is None) == covers
