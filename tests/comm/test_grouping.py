"""comm.group(): a block of operations has the same results in fewer messages."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutti import comm
from tutti.comm.grouping import flat_batches
from tutti.comm.ledger import read_process
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.world import World
from worlds import default_group, in_world


def _tensors(world: World, seed: int) -> list[torch.Tensor]:
    """Return tensors of several dtypes, sizes and strides, with different integers on each rank."""
    base = torch.arange(12) % 5 + world.rank + seed
    return [
        base.float(),
        base[:7].double(),
        base.view(3, 4).float().t(),
        base[:0].float(),
        base[0].float(),
        base.to(torch.int16),
        base[:5].float(),
        base % 2 == 0,
        torch.full((70_000,), float(world.rank + seed)),
    ]


def _calls(world: World) -> list[Callable[[], Any]]:
    """Return every kind of operation, several of each, as functions to call in a block or alone."""
    size, last = world.size, world.size - 1
    calls: list[Callable[[], Any]] = []
    for tensor in _tensors(world, 0):
        calls.append(lambda t=tensor: comm.all_reduce(t))
    for tensor in _tensors(world, 1):
        calls.append(lambda t=tensor: comm.broadcast(t, last))
    for tensor in _tensors(world, 2):
        calls.append(lambda t=tensor: comm.all_gather(t))
    for tensor in _tensors(world, 3):
        calls.append(lambda t=tensor: comm.reduce(t, 0, "max"))
    for tensor in _tensors(world, 4)[:3]:
        calls.append(lambda t=tensor: comm.all_reduce(t, "mean"))
        whole = torch.cat([tensor] * size)
        calls.append(lambda t=whole: comm.reduce_scatter(t, "mean"))
        again, one = whole.clone(), tensor.clone()
        calls.append(lambda t=again: comm.all_to_all(t))
        calls.append(lambda t=one: comm.gather(t, last))
    return calls


def _every_kind(world: World) -> list[Any]:
    def plain(result: Any) -> Any:
        return None if result is None else (str(result.dtype), result.tolist())

    one_by_one = [plain(call()) for call in _calls(world)]
    with comm.group() as block:
        results = [call() for call in _calls(world)]
    assert [plain(result) for result in results] == one_by_one
    with comm.group(small=0) as unpacked:
        results = [call() for call in _calls(world)]
    assert [plain(result) for result in results] == one_by_one
    assert unpacked.summary.messages == unpacked.summary.operations == len(results)
    assert unpacked.summary.bytes == block.summary.bytes
    return [block.summary.operations, block.summary.messages, str(block.summary)]


def _blocks(world: World) -> dict[str, Any]:
    size, rank = world.size, world.rank
    reports: dict[str, Any] = {}
    # Messages between ranks, any number in any order.
    inbox = [torch.zeros(3) for _ in range(2)]
    with comm.group() as block:
        for number, incoming in enumerate(inbox):
            comm.recv(incoming, (rank - 1) % size)
            comm.send(torch.full((3,), rank * 10.0 + number), (rank + 1) % size)
    assert [each[0].item() for each in inbox] == [(rank - 1) % size * 10.0 + n for n in range(2)]
    reports["messages"] = str(block.summary)

    # Handles are valid after the block, and not before.
    with comm.group():
        handle = comm.all_reduce(torch.ones(2), "mean", wait=False)
        assert not handle.is_done()
        with pytest.raises(UsageError, match="after the block"):
            handle.wait()
    assert handle.is_done() and handle.wait().tolist() == [1, 1]

    # A nested block belongs to the outer one; the ledger shows one message.
    with comm.group() as outer:
        comm.all_reduce(torch.ones(1))
        with comm.group() as inner:
            comm.all_reduce(torch.ones(2))
        comm.all_reduce(torch.ones(3))
    assert inner.summary is outer.summary and outer.summary.messages == 1
    account = read_process(os.getpid())
    assert account is not None and account.records[-1].bytes == 24
    reports["where"] = account.records[-1].where

    # Subgroups and the world in one block.
    pair = dist.new_group([0, 1])
    tensors = [torch.ones(2) for _ in range(4)]
    with comm.group() as block:
        for number, tensor in enumerate(tensors):
            if number % 2 == 0:
                comm.all_reduce(tensor)
            elif rank < 2:
                comm.all_reduce(tensor, group=pair)
    assert [t[0].item() for t in tensors] == [size, 2 if rank < 2 else 1] * 2
    assert block.summary.messages == (2 if rank < 2 else 1)

    # An empty block sends nothing.
    with comm.group() as block:
        pass
    assert block.summary.messages == 0
    return reports


def _exceptions(world: World) -> str:
    tensor = torch.ones(2)
    # An error on every rank: nothing is sent, and the world stays usable.
    with pytest.raises(KeyError), comm.group():
        handle = comm.all_reduce(tensor, wait=False)
        raise KeyError
    with pytest.raises(UsageError, match="was not completed"):
        handle.wait()
    assert tensor.tolist() == [1, 1]

    # An error on one rank: the others raise BlockAbandoned with agree=True.
    expected: Any = KeyError if world.rank == 1 else comm.BlockAbandoned
    with pytest.raises(expected) as caught, comm.group(agree=True):
        comm.all_reduce(tensor)
        if world.rank == 1:
            raise KeyError
    assert tensor.tolist() == [1, 1]
    with comm.group(agree=True):
        comm.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 2

    # Calls that need values from other ranks are refused in a block.
    with pytest.raises(UsageError, match="before the block"), comm.group():
        comm.all_gather_uneven(tensor)
    # Two operations on the same memory have no order.
    view = torch.ones(10)
    for second in (lambda: comm.all_reduce(view[4:]), lambda: comm.all_gather(view)):
        with pytest.raises(UsageError, match="uses the memory of all_reduce at"), comm.group():
            comm.all_reduce(view[:5])
            second()
    with comm.group():  # adjacent memory, and two reads of the same memory, are allowed
        comm.all_reduce(view[:5])
        comm.all_reduce(view[5:])
        comm.all_gather(tensor)
        comm.all_gather(tensor)
    assert view.tolist() == [world.size] * 10

    # In debug mode the whole block is compared first.
    comm.debug(True, timeout=20)
    with pytest.raises(RanksDiffer) as differ, comm.group():
        comm.all_reduce(torch.ones(3))
        if world.rank == 0:
            comm.all_reduce(torch.ones(4))
    assert "rank 0: all_reduce of [4] float32, sum at" in str(differ.value)
    assert "no further call in this block" in str(differ.value)
    with comm.group():
        comm.all_reduce(tensor)
    comm.debug(False)
    return str(caught.value)


_BACKENDS = ["shm", "gloo"]


def _everything(world: World) -> dict[str, Any]:
    reports = {}
    for backend in _BACKENDS:
        with default_group(backend):
            reports[backend] = [_every_kind(world), _blocks(world), _exceptions(world)]
    return reports


@pytest.fixture(scope="module")
def worlds_outcomes() -> list[Any]:
    """Return the results of all cases on three ranks of one world, as starting a world is slow."""
    return in_world(_everything, 3)


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def outcomes(worlds_outcomes: list[Any], backend: str) -> list[Any]:
    return [reports[backend] for reports in worlds_outcomes]


# all_reduce 6 (4 dtypes, empty, large), broadcast and all_gather 3 each (bytes, empty, large),
# reduce 6, reduce_scatter 2 (2 dtypes), all_to_all and gather 3 each. On gloo a mean is a sum
# and travels with the others; shm divides while it reduces, so the means of 2 dtypes are separate.
_MESSAGES = {"gloo": 26, "shm": 28}


def test_a_block_gives_the_same_results_as_separate_operations(
    outcomes: list[Any], backend: str
) -> None:
    for (operations, messages, text), _, _ in outcomes:
        assert operations == 48
        assert messages == _MESSAGES[backend]
        assert text.startswith("48 operations (12 all_reduce, 9 broadcast, ")
        assert f" in {messages} messages, " in text


def test_blocks_support_messages_handles_subgroups_and_nested_blocks(outcomes: list[Any]) -> None:
    for _, reports, _ in outcomes:
        assert reports["messages"] == "4 operations (2 recv, 2 send) in 4 messages, 48 bytes"
        assert reports["where"].endswith(" in _blocks")


def test_an_exception_in_a_block_leaves_nothing_half_sent(outcomes: list[Any]) -> None:
    texts = [text for _, _, text in outcomes]
    assert texts[0] == texts[2]
    assert "rank 1 of group default left" in texts[0]


def _alone(world: World) -> dict[str, int]:
    reports = {}
    for backend in _BACKENDS:
        with default_group(backend):
            _, reports[backend], _ = _every_kind(world)
    return reports


def test_a_block_works_in_a_world_of_one() -> None:
    assert in_world(_alone, 1) == [_MESSAGES]


def test_a_flat_message_has_a_maximum_size() -> None:
    class Call:  # the attributes that flat_batches() uses
        kind, root, reduction = "all_reduce", -1, "sum"
        comm_group = object()
        bytes = 1 << 20
        target = torch.empty(1)

    calls: list[Any] = [Call() for _ in range(20)]
    assert [len(batch) for batch in flat_batches(calls, small=1 << 20)] == [8, 8, 4]
    assert [len(batch) for batch in flat_batches(calls, small=1000)] == [1] * 20


def _nccl(world: World) -> str:
    size, rank, device = world.size, world.rank, world.device
    tensors = [torch.full((n + 1,), float(rank), device=device) for n in range(6)]
    with comm.group() as block:
        for tensor in tensors:
            comm.all_reduce(tensor, "mean")
        gathered = [comm.all_gather(torch.full((2,), rank, device=device)) for _ in range(3)]
        incoming = torch.zeros(2, device=device)
        comm.send(torch.full((2,), float(rank), device=device), (rank + 1) % size)
        comm.recv(incoming, (rank - 1) % size)
        handle = comm.broadcast(torch.full((4,), rank, device=device), 1, wait=False)
    mean = sum(range(size)) / size
    assert all(tensor.tolist() == [mean] * len(tensor) for tensor in tensors)
    assert all(g.tolist() == [r for r in range(size) for _ in range(2)] for g in gathered)
    assert incoming.tolist() == [(rank - 1) % size] * 2
    other = torch.cuda.Stream()
    assert handle.wait(other) is not None
    with torch.cuda.stream(other):
        assert handle.result.tolist() == [1] * 4
    assert handle.event().query() in (True, False)
    return str(block.summary)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_nccl_operations_of_a_kind_are_one_group(ranks: int) -> None:
    for text in in_world(_nccl, ranks, gpu=True):
        assert text.startswith("12 operations") and " in 4 messages, " in text, text
