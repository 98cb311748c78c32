"""Collectives give every rank the exact result, for every dtype, size, reduction and backend."""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutti import comm
from tutti.world.errors import UsageError
from tutti.world.world import World
from worlds import default_group, in_world

_FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
_INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
_SIZES = [0, 1, 3, 7, 8, 9, 1025]
_ARITHMETIC = ["sum", "product", "min", "max"]
_BITWISE = ["band", "bor", "bxor"]


def _values(
    rank: int, count: int, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return small integers, which are exact in every dtype, so the order of sums has no effect."""
    numbers = torch.arange(count, dtype=torch.int64, device=device) * 7 + rank * 3 + seed
    if dtype == torch.bool:
        return numbers % 3 == 0
    values = (numbers % 3 + 1).to(dtype)
    return values * (1 + 2j) if dtype.is_complex else values


def _expected(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(parts)
    if stacked.dtype == torch.bool:
        if op in ("sum", "max", "bor"):
            return stacked.any(0)
        if op in ("product", "min", "band"):
            return stacked.all(0)
        return stacked.sum(0) % 2 == 1
    result = {
        "sum": lambda: stacked.sum(0),
        "mean": lambda: stacked.sum(0) / len(parts),
        "product": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }
    if op in result:
        return result[op]().to(stacked.dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total = {"band": total & part, "bor": total | part, "bxor": total ^ part}[op]
    return total


def _same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        what,
        actual,
        expected,
    )
    assert torch.equal(actual, expected), (what, actual, expected)


def _every_reduction(world: World) -> None:
    cases = [(dtype, op) for dtype in _FLOATS for op in [*_ARITHMETIC, "mean"]]
    cases += [(dtype, op) for dtype in _INTEGERS for op in [*_ARITHMETIC, *_BITWISE]]
    cases += [(torch.bool, op) for op in [*_ARITHMETIC, *_BITWISE]]
    cases += [(torch.complex64, "sum"), (torch.complex64, "mean")]
    for number, (dtype, op) in enumerate(cases):
        count = _SIZES[number % len(_SIZES)]
        parts = [_values(rank, count, dtype, 0, world.device) for rank in range(world.size)]
        local, expected, what = parts[world.rank], _expected(op, parts), (dtype, op, count)

        in_place = local.clone()
        assert comm.all_reduce(in_place, op) is in_place
        _same(in_place, expected, ("all_reduce", what))

        out = torch.empty_like(local)
        assert comm.all_reduce(local, op, out=out) is out
        _same(out, expected, ("all_reduce out", what))
        _same(local, parts[world.rank], ("all_reduce out keeps its input", what))

        root = number % world.size
        tensor = local.clone()
        reduced = comm.reduce(tensor, root, op)
        assert (reduced is tensor) if world.rank == root else (reduced is None)
        _same(tensor, expected if world.rank == root else local, ("reduce", what))

        whole = [torch.cat([part] * world.size) for part in parts]
        _same(comm.reduce_scatter(whole[world.rank], op), expected, ("reduce_scatter", what))


def _every_move(world: World) -> None:
    dtypes = [*_FLOATS, *_INTEGERS, torch.bool, torch.complex64, torch.complex128]
    dtypes += [torch.uint16, torch.float8_e4m3fn]
    for number, dtype in enumerate(dtypes):
        raw = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        count = _SIZES[number % len(_SIZES)]
        root = number % world.size

        def part(rank: int, seed: int = 0, count: int = count, raw: Any = raw, dtype: Any = dtype):
            return _values(rank, count, raw, seed, world.device).view(dtype)

        def same(actual: torch.Tensor, expected: list[torch.Tensor], what: str, raw: Any = raw):
            _same(actual.view(raw), torch.cat([each.view(raw) for each in expected]), (what, raw))

        all_parts = [part(rank) for rank in range(world.size)]
        local = all_parts[world.rank]
        tensor = local.clone()
        assert comm.broadcast(tensor, root) is tensor
        same(tensor, [all_parts[root]], "broadcast")
        same(comm.broadcast(local, root, out=torch.empty_like(local)), [all_parts[root]], "out")
        same(comm.all_gather(local), all_parts, "all_gather")
        gathered = comm.gather(local, root)
        if world.rank == root:
            same(gathered, all_parts, "gather")
        else:
            assert gathered is None
        whole = torch.cat([each.view(raw) for each in all_parts]).view(dtype)
        if world.rank == root:
            same(comm.scatter(whole, root), [local], "scatter")
        else:
            same(comm.scatter(root=root, out=torch.empty_like(local)), [local], "scatter")
        mixed = torch.cat([part(world.rank, to).view(raw) for to in range(world.size)])
        swapped = comm.all_to_all(mixed.view(dtype))
        same(swapped, [part(rank, world.rank) for rank in range(world.size)], "all_to_all")


def _uneven(world: World) -> None:
    size, rank = world.size, world.rank
    for dtype in (torch.float32, torch.int16):
        # Rank r sends r + q rows to rank q.
        ins = [rank + to for to in range(size)]
        tensor = torch.stack(
            [torch.full((2,), rank * 10 + to) for to in range(size) for _ in range(rank + to)]
            or [torch.zeros(2)]
        )[: sum(ins)].to(dtype)
        expected = [
            [source * 10 + rank] * 2 for source in range(size) for _ in range(source + rank)
        ]
        reports = comm.all_to_all(tensor, in_splits=ins, out_splits=[s + rank for s in range(size)])
        asked = comm.all_to_all(tensor, in_splits=ins)
        assert reports.tolist() == asked.tolist() == expected
        rows = comm.all_gather_uneven(torch.full((rank, 2), rank, dtype=dtype))
        assert [row.tolist() for row in rows] == [[[r, r]] * r for r in range(size)]


def _with_gaps(world: World) -> None:
    size, rank = world.size, world.rank
    matrix = torch.full((4, 3), float(rank))
    comm.all_reduce(matrix[:, 1])
    comm.all_reduce(matrix[:, 2], "mean")
    total = sum(range(size))
    assert matrix.tolist() == [[rank, total, total / size]] * 4
    out = torch.zeros(2 * size, 2)
    comm.all_gather(torch.full((2, 2), rank + 1.0).t()[:, 0], out=out[:, 1])
    assert out[:, 1].tolist() == [float(r + 1) for r in range(size) for _ in range(2)]
    assert not out[:, 0].any()
    received = torch.zeros(3, 2, dtype=torch.int16)
    comm.broadcast(received[:, 0] if rank else torch.full((3,), 7, dtype=torch.int16))
    assert rank == 0 or received.tolist() == [[7, 0]] * 3
    # A scalar, and a parameter that requires a gradient.
    assert comm.all_gather(torch.tensor(rank)).tolist() == list(range(size))
    parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)).t())
    comm.all_reduce(parameter, "mean")
    assert parameter.tolist() == [[total / size] * 2] * 2


def _messages(world: World) -> None:
    size, rank = world.size, world.rank
    if size == 1:
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    outgoing = comm.send(torch.full((5,), rank, dtype=torch.int16), after, wait=False)
    incoming = torch.zeros(5, dtype=torch.int16)
    assert comm.recv(incoming, before) is incoming
    outgoing.wait()
    assert incoming.tolist() == [before] * 5
    if rank == 1:  # tags tell messages apart, whatever the order
        handles = [comm.send(torch.tensor([tag]), 0, tag=tag, wait=False) for tag in (1, 2)]
        _ = [handle.wait() for handle in handles]
    if rank == 0:
        second, first = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        comm.recv(second, 1, tag=2)
        comm.recv(first, 1, tag=1)
        assert (first.item(), second.item()) == (1, 2)
        handle = comm.recv(first, None, tag=3, wait=False)
        assert handle.source == 1 and handle.wait().item() == 3
    if rank == 1:
        comm.send(torch.tensor([3]), 0, tag=3)


def _subgroups(world: World) -> None:
    pairs = [[rank for rank in range(world.size) if rank % 2 == parity] for parity in (0, 1)]
    groups = [dist.new_group(ranks) for ranks in pairs if ranks]
    local = groups[world.rank % 2]
    ranks = pairs[world.rank % 2]
    assert comm.all_reduce(torch.tensor([world.rank]), group=local).item() == sum(ranks)
    # root is a rank in the group: its last one.
    last = len(ranks) - 1
    tensor = torch.tensor([world.rank])
    comm.broadcast(tensor, last, group=local)
    assert tensor.item() == ranks[last]
    gathered = comm.gather(torch.tensor([world.rank]), last, group=local)
    assert (gathered is not None) == (world.rank == ranks[last])
    assert gathered is None or gathered.tolist() == ranks
    comm.barrier(group=local)


def _handles(world: World) -> None:
    tensors = [torch.full((n + 1,), float(world.rank)) for n in range(20)]
    handles = [comm.all_reduce(tensor, "mean", wait=False) for tensor in tensors]
    mean = sum(range(world.size)) / world.size
    for tensor, handle in zip(reversed(tensors), reversed(handles), strict=True):
        assert handle.wait() is tensor and handle.wait() is tensor  # a second wait changes nothing
        assert handle.is_done() and handle.result is tensor
        assert tensor.tolist() == [mean] * len(tensor)
    handle = comm.barrier(wait=False)
    assert handle.wait() is None
    with pytest.raises(UsageError, match="is for CUDA tensors"):
        handle.event()
    # Only a wait copies into a column: a dropped handle warns.
    with pytest.warns(ResourceWarning, match="was dropped. Call wait"):
        handle = comm.all_reduce(torch.ones(2, 2)[:, 0], wait=False)
        handle.work.wait()
        del handle


def _mistakes(world: World) -> None:
    def refused(words: str, call: Callable[[], object]) -> None:
        with pytest.raises(UsageError, match=words):
            call()

    ints, floats = torch.ones(2, dtype=torch.int64), torch.ones(2)
    beyond = f"root={world.size} must be a rank in group default, 0 to {world.size - 1}"
    refused(beyond, lambda: comm.broadcast(ints, world.size))
    refused("op='average' is not a reduction", lambda: comm.all_reduce(floats, "average"))
    refused(
        "op='meen' is not a reduction: did you mean mean", lambda: comm.all_reduce(floats, "meen")
    )
    refused("mean' of int64 would truncate", lambda: comm.all_reduce(ints, "mean"))
    refused("band' is not defined for float32", lambda: comm.all_reduce(floats, "band"))
    refused("uint16 cannot be reduced", lambda: comm.all_reduce(ints.to(torch.uint16)))
    refused(r"out has shape \[3\]", lambda: comm.all_reduce(floats, out=torch.ones(3)))
    refused("this rank itself", lambda: comm.send(ints, world.rank))
    refused("group='all' is not a process group", lambda: comm.barrier(group="all"))  # type: ignore[arg-type]
    refused("this rank is not in the group", lambda: comm.barrier(group=-100))  # type: ignore[arg-type]
    if world.size > 1:
        uneven = torch.ones(world.size + 1)
        refused("cannot be split along dim 0", lambda: comm.reduce_scatter(uneven))
        refused(
            "sum must be 2", lambda: comm.all_to_all(ints, in_splits=[1] * world.size)
        ) if world.size != 2 else None


def _lazy_views(world: World) -> None:
    """Views whose memory holds the conjugates, or the negatives, of their values."""
    device, last = world.device, world.size - 1
    numbers = torch.tensor([1 + 2j, 3 - 4j], device=device)
    for view, plain in (
        (numbers.conj(), torch.tensor([1 - 2j, 3 + 4j], device=device)),
        (torch._neg_view(numbers.real), torch.tensor([-1.0, -3.0], device=device)),
    ):
        lazy = torch.zeros_like(plain)
        lazy = lazy.conj() if lazy.is_complex() else torch._neg_view(lazy)
        for target in (torch.zeros_like(plain), lazy):
            sent = comm.broadcast(view.clone() if world.rank else view, out=target)
            _same(sent.resolve_conj().resolve_neg(), plain, "broadcast of a lazy view")
        _same(comm.all_gather(view), torch.cat([plain] * world.size), "all_gather of a lazy view")
        whole = comm.all_reduce(view, "sum", out=torch.zeros_like(plain))
        _same(whole, plain * world.size, "sum of lazy views")
        if last and world.rank == 0:
            comm.send(view, last)
        elif last and world.rank == last:
            comm.recv(lazy, 0)
            _same(lazy.resolve_conj().resolve_neg(), plain, "send of a lazy view")
    negative = torch._neg_view(torch.tensor([1.0, 2.0], device=device) * (world.rank + 1))
    assert comm.all_reduce(negative, "max") is negative
    _same(negative.resolve_neg(), torch.tensor([-1.0, -2.0], device=device), "max of lazy views")


def _everything(world: World) -> str:
    warnings.simplefilter("error", FutureWarning)  # no name that torch deprecates
    for backend in ("shm", "gloo"):
        with default_group(backend):
            _every_reduction(world)
            _every_move(world)
            _uneven(world)
            _with_gaps(world)
            _lazy_views(world)
            _messages(world)
            _subgroups(world) if world.size > 1 else None
            _handles(world)
    _mistakes(world)
    return "right"


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_operation_gives_every_rank_the_exact_result(ranks: int) -> None:
    assert in_world(_everything, ranks) == ["right"] * ranks


def _streams(world: World) -> None:
    size, rank, device = world.size, world.rank, world.device
    tensor = torch.full((1 << 20,), float(rank), device=device)
    handle = comm.all_reduce(tensor, "mean", wait=False)
    side = torch.cuda.Stream()
    assert handle.wait(side) is tensor  # only the side stream waits
    with torch.cuda.stream(side):
        doubled = tensor * 2
    event = handle.event()
    torch.cuda.current_stream().wait_event(event)
    mean = sum(range(size)) / size
    assert tensor.double().sum().item() == mean * tensor.numel()
    side.synchronize()
    assert handle.is_done() and doubled.double().sum().item() == 2 * mean * tensor.numel()
    # An event before any wait.
    column = torch.full((1000, 3), float(rank), device=device)
    handle = comm.all_reduce(column[:, 1], wait=False)
    handle.event().synchronize()
    assert handle.is_done() and column[:, 1].eq(sum(range(size))).all().item()
    assert handle.wait() is not None
    with pytest.raises(UsageError, match="is for CUDA tensors"):
        comm.all_reduce(torch.ones(1), wait=False).wait(side)


def _everything_on_cuda(world: World) -> str:
    warnings.simplefilter("error", FutureWarning)
    _every_reduction(world)
    _every_move(world)
    _streams(world)
    return "right"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_nccl_every_operation_gives_the_exact_result(ranks: int) -> None:
    assert in_world(_everything_on_cuda, ranks, gpu=True, timeout=300) == ["right"] * ranks


def _traced(world: World) -> list[Any]:
    group = dist.new_group(list(range(world.size)), group_desc="mesh|dp")
    with torch.profiler.profile() as profiler:
        comm.all_reduce(torch.ones(256))
        comm.broadcast(torch.ones(3, dtype=torch.bool), 1, group=group)
        comm.all_gather(torch.ones(2, 2), wait=False).wait()
        comm.barrier()
    comm.barrier()  # not in the trace
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    tags = [comm.parse_tag(event.get("name", "")) for event in events if event.get("ph") == "X"]
    return [vars(tag) for tag in tags if tag is not None]


def test_a_trace_names_every_call_in_one_parsable_form() -> None:
    def tag(operation: str, sequence: int, group: str = "default", phase: str = "run", **rest: Any):
        about = {"operation": operation, "sequence": sequence, "group": group, "phase": phase}
        return {**about, "ranks": 2, **rest}

    for tags in in_world(_traced, 2):
        assert sorted(tags, key=lambda each: (each["group"], each["sequence"], each["phase"])) == [
            tag("all_reduce", 1, bytes=1024, dtype="float32"),
            tag("all_gather", 2, bytes=32, dtype="float32", phase="issue"),
            tag("all_gather", 2, bytes=32, dtype="float32", phase="wait"),
            tag("barrier", 3, bytes=0, dtype=""),
            tag("broadcast", 1, "mesh/dp", bytes=3, dtype="bool"),
        ]


@pytest.mark.parametrize("name", ["tutti::all_reduce", "gloo:all_reduce", "aten::add", ""])
def test_other_names_in_a_trace_are_not_parsed(name: str) -> None:
    assert comm.parse_tag(name) is None


def test_importing_comm_and_reading_ledgers_does_not_import_torch() -> None:
    look = "import sys, tutti, tutti.comm.ledger as r; tutti.comm; r.processes()"
    look += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], timeout=60).returncode == 0


def test_every_name_in_all_can_be_imported() -> None:
    assert all(getattr(comm, name) is not None for name in comm.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'allreduce'"):
        _ = comm.allreduce
