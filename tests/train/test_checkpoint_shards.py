"""Which rank writes which shard: every element once, bytes balanced, for any sharding."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.parallel.mesh import Box
from tutti.train.checkpoint.format import coverage_error
from tutti.train.checkpoint.save import assign_writers
from tutti.world.errors import RanksDiffer

Described = dict[str, dict[str, Any]]


def held(buffers: tuple[str, ...] = (), **tensors: tuple[tuple[int, ...], Box | None]) -> Described:
    return {
        name: {
            "dtype": "F32",
            "shape": [*shape],
            "box": None if box is None else [[*box.offsets], [*box.sizes]],
            "buffer": name in buffers,
        }
        for name, (shape, box) in tensors.items()
    }


def whole(*shape: int) -> tuple[tuple[int, ...], Box]:
    return shape, Box((0,) * len(shape), shape)


def written(ranks: list[Described]) -> list[dict[str, int]]:
    """Return the bytes of each key in each rank's file."""
    files: list[dict[str, int]] = [{} for _ in ranks]
    for tensor in assign_writers(ranks).values():
        for chunk in tensor["chunks"]:
            rank = int(chunk["file"].removeprefix("rank").removesuffix(".safetensors"))
            files[rank][chunk["key"]] = math.prod(chunk["sizes"]) * 4  # float32
    return files


def test_replicas_are_divided_evenly() -> None:
    tensors = held(**{f"p{n}": whole(10 * n + 1, 3) for n in range(20)})
    files = written([tensors] * 3)
    assert sorted(key for file in files for key in file) == sorted(tensors)
    totals = [sum(file.values()) for file in files]
    assert max(totals) - min(totals) <= max(files[0].values())


def test_shards_on_a_mesh_are_written_by_one_of_their_holders() -> None:
    """A mesh of two replicas by two shards: ranks 0 and 2 hold one half, 1 and 3 the other."""
    top, bottom = ((4, 2), Box((0, 0), (2, 2))), ((4, 2), Box((2, 0), (2, 2)))
    files = written([held(a=top, b=top), held(a=bottom, b=bottom)] * 2)
    assert all(sum(file.values()) == 16 for file in files)
    assert {*files[0], *files[2]} == {"a[0:2,0:2]", "b[0:2,0:2]"}
    assert {*files[1], *files[3]} == {"a[2:4,0:2]", "b[2:4,0:2]"}


def test_pipeline_stages_hold_different_tensors() -> None:
    assert written([held(a=whole(2)), held(b=whole(3))]) == [{"a": 8}, {"b": 12}]


def test_empty_shards_and_empty_tensors_are_not_written() -> None:
    files = written([held(a=whole(2), none=((0, 3), None)), held(a=((2,), None))])
    assert files == [{"a": 8}, {}]


def test_buffers_are_written_by_the_first_rank_that_holds_them() -> None:
    tensors = held(("mean", "variance"), weight=whole(8), mean=whole(4), variance=whole(4))
    assert written([tensors, tensors])[0].keys() >= {"mean", "variance"}


def test_ranks_with_inconsistent_shards_are_refused() -> None:
    with pytest.raises(RanksDiffer, match=r"a is .* on rank 1"):
        assign_writers([held(a=whole(2)), held(a=whole(3))])
    half = ((4,), Box((0,), (2,)))
    with pytest.raises(RanksDiffer, match="do not cover dim 0 of size 4"):
        assign_writers([held(a=half), held(a=half)])
    with pytest.raises(RanksDiffer, match="do not cover dim 0 of size 4"):
        assign_writers([held(a=half), held(a=whole(4))])


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape divided into a grid of boxes by random cuts of each dim."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    spans = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        edges = [0, *cuts, size]
        spans.append([*zip(edges, (b - a for a, b in itertools.pairwise(edges)), strict=False)])
    boxes = [
        Box(tuple(offset for offset, _ in cell), tuple(size for _, size in cell))
        for cell in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(boxes))


@given(grids())
def test_a_grid_covers_its_tensor(grid: tuple[tuple[int, ...], list[Box]]) -> None:
    assert coverage_error(*grid) is None


@given(grids(), st.data())
def test_boxes_are_accepted_only_if_they_cover_every_element_once(
    grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
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
    assert (coverage_error(shape, moved) is None) == covers
    assert coverage_error(shape, [*boxes, boxes[0]]) is not None
    assert coverage_error(shape, boxes[1:]) is not None
