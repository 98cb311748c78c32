"""Debug mode: different calls on different ranks raise on all ranks before anything is sent."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tutti import comm
from tutti.comm import operation
from tutti.world.errors import RanksDiffer
from tutti.world.world import World
from worlds import in_world


def _differs(call: Callable[[], object]) -> str:
    with pytest.raises(RanksDiffer) as caught:
        call()
    return str(caught.value)


def _compare(world: World) -> dict[str, str]:
    first = world.rank == 0
    comm.debug(True)
    reports = {}
    shape = 4 if first else 5
    reports["shape"] = _differs(lambda: comm.all_reduce(torch.ones(shape)))
    dtype = torch.float32 if first else torch.float64
    reports["dtype"] = _differs(lambda: comm.all_gather(torch.ones(3, dtype=dtype)))
    reports["op"] = _differs(lambda: comm.all_reduce(torch.ones(3), "sum" if first else "mean"))
    reports["root"] = _differs(lambda: comm.broadcast(torch.ones(3), 0 if first else 1))
    call = comm.all_reduce if first else comm.all_gather
    reports["kind"] = _differs(lambda: call(torch.ones(3)))
    reports["barrier"] = _differs(
        lambda: comm.barrier() if first else comm.all_reduce(torch.ones(1))
    )
    ins = [1] * world.size
    outs = [1] * (world.size - 1) + [2 if world.rank == 1 else 1]
    rows = torch.ones(world.size, 2)
    reports["splits"] = _differs(lambda: comm.all_to_all(rows, in_splits=ins, out_splits=outs))
    # Nothing was sent so far: the next results are correct.
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 3
    comm.all_to_all(rows, in_splits=ins, out_splits=ins)
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        reports["group"] = _differs(lambda: comm.broadcast(torch.ones(1), world.rank, group=pair))
        comm.all_reduce(tensor, group=pair)
    store = dist.distributed_c10d._get_default_store()
    kept = [n for n in range(1, 9) if store.check([f"default_pg/tutti/compare/{n}/0"])]
    assert len(kept) <= 1
    comm.debug(False)
    if first:
        comm.all_reduce(tensor, wait=False)
        comm.barrier()
    else:
        comm.all_reduce(tensor)
        comm.barrier(wait=False).wait()
    return reports


def test_a_difference_names_the_ranks_both_calls_and_both_lines() -> None:
    everyone = in_world(_compare, 3)
    assert everyone[1] == everyone[0] and "group" not in everyone[2]
    reports = everyone[0]
    here = "test_debug_mode.py:"
    assert "rank 0: all_reduce of [4] float32, sum at " in reports["shape"]
    assert "ranks 1, 2: all_reduce of [5] float32, sum at " in reports["shape"]
    assert reports["shape"].count(here) == 2 and reports["shape"].count(" in <lambda>") == 2
    assert "rank 0: all_gather of [3] float32 at" in reports["dtype"]
    assert "ranks 1, 2: all_gather of [3] float64 at" in reports["dtype"]
    assert "float32, sum at" in reports["op"] and "float32, mean at" in reports["op"]
    assert "rank 0: broadcast of [3] float32, root 0" in reports["root"]
    assert "rank 0: all_reduce of [3] float32, sum" in reports["kind"]
    assert "ranks 1, 2: all_gather of [3] float32" in reports["kind"]
    assert "rank 0: barrier at" in reports["barrier"]
    assert "rank 2 sends 2 elements to rank 1" in reports["splits"]
    assert "expects 4 (out_splits at" in reports["splits"]
    assert "ranks of group group-1 call different" in reports["group"]


def _absent(world: World) -> str:
    comm.barrier()
    comm.debug(True, timeout=2)
    if world.rank == 1:
        _elsewhere()
        return ""
    with pytest.raises(comm.CollectiveTimeout) as caught:
        comm.all_reduce(torch.ones(2))
    _get_default_store().set("raised", "")
    return str(caught.value)


def _elsewhere() -> None:
    import time

    store = _get_default_store()
    while not store.check(["raised"]):
        time.sleep(0.02)


def test_a_rank_that_does_not_arrive_is_named_with_its_location() -> None:
    text = in_world(_absent, 2)[0]
    assert text.startswith("all_reduce of [2] float32, sum of group default, at ")
    assert "has waited 2 s to compare" in text and "rank 1 has not arrived (pid " in text
    assert "last barrier 1, done " in text and " in _elsewhere, seen " in text
    assert "comm.debug(True)" in text and "every rank" in text


def test_debug_mode_is_off_by_default() -> None:
    warnings.simplefilter("error")
    assert operation.compare_calls is None
    comm.debug(True)
    assert operation.compare_calls is not None
    comm.debug(False)
    assert operation.compare_calls is None
