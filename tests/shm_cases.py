"""Operations with exact expected results: every rank can compute the inputs of all ranks."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.shm.registration import register

SIZES = (0, 1, 3, 7, 9, 63, 65, 1023, 1025)
LARGE = (65535, 65537)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
MOVED = (*FLOATS, *INTS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)

# torch 2.13 has new names for these functions, and warns if the old names are used.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_of(ranks: list[int] | None = None) -> Any:
    register()
    return dist.new_group(ranks, backend="shm")


def valid(dtype: torch.dtype, op: str) -> bool:
    if op in ("BAND", "BOR", "BXOR"):
        return not dtype.is_floating_point and not dtype.is_complex
    if op == "AVG":
        return dtype.is_floating_point or dtype.is_complex
    return op == "SUM" or not dtype.is_complex


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Return a rank's input: small integers, whose sum is exact in any order of addition."""
    numbers = (torch.arange(count) * 7 + rank * 3 + salt) % 5
    if dtype == torch.bool:
        return numbers % 2 == 0
    if dtype.is_complex:
        return torch.complex(numbers.float(), (numbers + 1).float()).to(dtype)
    if dtype.is_floating_point or dtype == torch.uint16:
        return numbers.to(torch.float32).to(dtype)
    return numbers.to(dtype)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    dtype = parts[0].dtype
    stack = torch.stack(parts)
    if dtype == torch.bool:
        if op in ("SUM", "MAX", "BOR"):
            return stack.any(0)
        if op in ("PRODUCT", "MIN", "BAND"):
            return stack.all(0)
        return stack.sum(0) % 2 == 1
    wide = stack.to(torch.complex128 if dtype.is_complex else torch.float64)
    if not dtype.is_floating_point and not dtype.is_complex:
        wide = stack.to(torch.int64)
    if op == "SUM":
        return wide.sum(0).to(dtype)
    if op == "AVG":
        return (wide.sum(0) / len(parts)).to(dtype)
    if op == "PRODUCT":
        return wide.prod(0).to(dtype)
    if op in ("MIN", "MAX"):
        return (wide.amin(0) if op == "MIN" else wide.amax(0)).to(dtype)
    result = wide[0]
    for other in wide[1:]:
        result = {"BAND": result & other, "BOR": result | other, "BXOR": result ^ other}[op]
    return result.to(dtype)


class Checks:
    """Runs operations on one group and collects the wrong results."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.wrong: list[str] = []
        self.count = 0

    def same(self, got: Tensor, expected: Tensor, *what: object) -> None:
        self.count += 1
        if got.dtype != expected.dtype or got.shape != expected.shape:
            self.wrong.append(f"{what}: {got.dtype} {got.shape}, not {expected.dtype}")
            return
        raw = [
            t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (got, expected)
        ]
        if not torch.equal(*raw):
            self.wrong.append(f"{what}: {got.flatten()[:4]}, not {expected.flatten()[:4]}")

    def inputs(self, count: int, dtype: torch.dtype, salt: int = 0) -> list[Tensor]:
        return [values(rank, count, dtype, salt) for rank in range(self.size)]

    def all_reduce(self, count: int, dtype: torch.dtype, op: str) -> None:
        parts = self.inputs(count, dtype)
        tensor = parts[self.rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=self.group)
        self.same(tensor, reduced(parts, op), "all_reduce", count, dtype, op)

    def reduce(self, count: int, dtype: torch.dtype, op: str, root: int) -> None:
        parts = self.inputs(count, dtype)
        tensor = parts[self.rank].clone()
        reduce_op = getattr(dist.ReduceOp, op)
        dist.reduce(tensor, self.ranks[root], reduce_op, group=self.group)
        expected = reduced(parts, op) if self.rank == root else parts[self.rank]
        self.same(tensor, expected, "reduce", count, dtype, op, root)

    def reduce_scatter(self, count: int, dtype: torch.dtype, op: str) -> None:
        parts = [self.inputs(count, dtype, salt) for salt in range(self.size)]
        mine = [part[self.rank] for part in parts]
        expected = reduced(parts[self.rank], op)
        reduce_op = getattr(dist.ReduceOp, op)
        out = torch.empty_like(mine[0])
        dist.reduce_scatter(out, mine, reduce_op, group=self.group)
        self.same(out, expected, "reduce_scatter", count, dtype, op)
        out = torch.empty_like(mine[0])
        reduce_scatter_flat(out, torch.cat(mine), reduce_op, group=self.group)
        self.same(out, expected, "reduce_scatter_tensor", count, dtype, op)

    def broadcast(self, count: int, dtype: torch.dtype, root: int) -> None:
        tensor = values(self.rank, count, dtype)
        dist.broadcast(tensor, self.ranks[root], group=self.group)
        self.same(tensor, values(root, count, dtype), "broadcast", count, dtype, root)

    def all_gather(self, count: int, dtype: torch.dtype) -> None:
        parts = self.inputs(count, dtype)
        outs = [torch.empty_like(part) for part in parts]
        dist.all_gather(outs, parts[self.rank], group=self.group)
        for rank, out in enumerate(outs):
            self.same(out, parts[rank], "all_gather", count, dtype, rank)
        flat = torch.empty(self.size * count, dtype=dtype)
        all_gather_flat(flat, parts[self.rank], group=self.group)
        for rank, out in enumerate(flat.view(self.size, count)):
            self.same(out, parts[rank], "all_gather_into_tensor", count, dtype, rank)

    def gather(self, count: int, dtype: torch.dtype, root: int) -> None:
        parts = self.inputs(count, dtype)
        outs = [torch.empty_like(part) for part in parts] if self.rank == root else None
        dist.gather(parts[self.rank], outs, self.ranks[root], group=self.group)
        for rank, out in enumerate(outs or []):
            self.same(out, parts[rank], "gather", count, dtype, root, rank)

    def scatter(self, count: int, dtype: torch.dtype, root: int) -> None:
        parts = self.inputs(count, dtype)
        out = torch.empty_like(parts[0])
        given = parts if self.rank == root else None
        dist.scatter(out, given, self.ranks[root], group=self.group)
        self.same(out, parts[self.rank], "scatter", count, dtype, root)

    def all_to_all(self, count: int, dtype: torch.dtype) -> None:
        mine = [values(self.rank, count, dtype, salt) for salt in range(self.size)]
        expected = [values(rank, count, dtype, self.rank) for rank in range(self.size)]
        outs = [torch.empty_like(part) for part in mine]
        dist.all_to_all(outs, mine, group=self.group)
        for rank, out in enumerate(outs):
            self.same(out, expected[rank], "all_to_all", count, dtype, rank)
        flat = torch.empty(self.size * count, dtype=dtype)
        dist.all_to_all_single(flat, torch.cat(mine), group=self.group)
        self.same(flat, torch.cat(expected), "all_to_all_single", count, dtype)

    def all_to_all_uneven(self, count: int, dtype: torch.dtype) -> None:
        def rows(source: int, target: int) -> int:
            return (source * 2 + target * 3) % 4 * (1 + count % 5)

        sent = [rows(self.rank, rank) for rank in range(self.size)]
        got = [rows(rank, self.rank) for rank in range(self.size)]
        tensor = values(self.rank, sum(sent) * 3, dtype).view(-1, 3)
        out = torch.empty(sum(got), 3, dtype=dtype)
        dist.all_to_all_single(out, tensor, got, sent, group=self.group)
        for rank, piece in enumerate(out.split(got)):
            theirs = [rows(rank, each) for each in range(self.size)]
            whole = values(rank, sum(theirs) * 3, dtype).view(-1, 3)
            expected = whole.split(theirs)[self.rank]
            self.same(piece, expected, "all_to_all_uneven", count, dtype, rank)

    def ring(self, count: int, dtype: torch.dtype) -> None:
        """Every rank sends to the next and receives from the previous rank, in both call orders."""
        if self.size == 1:
            return
        after = self.ranks[(self.rank + 1) % self.size]
        before = (self.rank - 1) % self.size
        mine, out = values(self.rank, count, dtype), torch.empty(count, dtype=dtype)
        send = dist.isend(mine, after, group=self.group, tag=count % 7)
        dist.recv(out, self.ranks[before], group=self.group, tag=count % 7)
        send.wait()
        self.same(out, values(before, count, dtype), "send and recv", count, dtype)

    def everything(self, sizes: tuple[int, ...] = SIZES) -> None:
        """Check every operation, dtype and reduction with each of these sizes."""
        roots = itertools.cycle(range(self.size))
        for dtype, op in itertools.product((*FLOATS, *INTS, torch.bool, torch.complex64), OPS):
            if not valid(dtype, op):
                continue
            for count in sizes:
                self.all_reduce(count, dtype, op)
                self.reduce(count, dtype, op, next(roots))
                self.reduce_scatter(count, dtype, op)
        for dtype, count in itertools.product(MOVED, sizes):
            self.move_everything(count, dtype, next(roots))
        dist.barrier(self.group)

    def move_everything(self, count: int, dtype: torch.dtype, root: int) -> None:
        for move in self.movers():
            move(count, dtype)
        for move in (self.broadcast, self.gather, self.scatter):
            move(count, dtype, root)

    def large(self, sizes: tuple[int, ...] = LARGE) -> None:
        """Check each operation with large tensors, each time with the next dtype."""
        dtypes = itertools.cycle((*FLOATS, *INTS, torch.bool))
        ops = itertools.cycle(("SUM", "MIN", "PRODUCT", "MAX"))
        for count in sizes:
            for dtype in (torch.float32, next(dtypes), next(dtypes)):
                self.all_reduce(count, dtype, next(ops))
                self.reduce(count, dtype, next(ops), self.size - 1)
                self.reduce_scatter(count, dtype, next(ops))
            self.move_everything(count, next(dtypes), self.size - 1)

    def movers(self) -> Iterator[Callable[[int, torch.dtype], None]]:
        yield from (self.all_gather, self.all_to_all, self.all_to_all_uneven, self.ring)
