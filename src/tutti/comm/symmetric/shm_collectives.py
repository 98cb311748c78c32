"""All-reduce, all-gather and reduce-scatter on CPU, on tensors that all ranks can read in place.

All-reduce is the core's, in C, unless one algorithm is asked for: these stand here in Python, to be
read and compared. Each collective begins with a meeting (all inputs are written) and ends with one
(all have read, so that the callers may write again). In between ranks tell each other how far they
are by one word each, stored with release and loaded with acquire; each word has one writer.
"""

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from tutti.comm.shm import native
from tutti.comm.symmetric.memory import Algorithm
from tutti.comm.symmetric.reduction import OPS, check_reduction, must_be_shared, pieces
from tutti.comm.symmetric.shm_group import ShmGroup
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.shm import ShmMemory

# The order of `enum tutti_dtype` in tutti_shm.h; OPS has that of `enum tutti_reduce`.
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# A two-shot goes in chunks of this size per rank, so that a piece is still in the cache of its
# owner when the peers fetch it.
_CHUNK_BYTES = 512 << 10


class ShmCollectives:
    """The collectives of one heap; one at a time."""

    def __init__(self, memory: "ShmMemory") -> None:
        self._memory = memory
        self._core = native.core()
        self._quick = native.core_holding_gil()
        self._wait = memory.control.wait_for_peer
        self._peers = [rank for rank in range(memory.size) if rank != memory.rank]
        self._words = [memory.control.progress(rank) for rank in range(memory.size)]
        self._own_word = self._words[memory.rank]
        self._progress = 0  # the same on all ranks between collectives
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._group: ShmGroup | None = None  # made by the first all_reduce that needs it
        self.calls = 0

    def all_reduce(
        self,
        local: torch.Tensor,
        offset: int,
        op: str,
        algorithm: Algorithm,
        out: torch.Tensor,
        out_offset: int | None,
        timeout: float,
    ) -> None:
        codes = _codes(local.dtype, op)
        bytes = local.nbytes
        self.calls += 1
        if algorithm == "auto":
            if self._group is None:
                self._group = ShmGroup(self._memory, timeout)
            self._group.all_reduce(local.data_ptr(), out.data_ptr(), bytes, *codes, timeout)
        elif algorithm == "one_shot":
            self._one_shot(local, offset, out, codes, timeout)
        else:
            shared = offset if out is local else out_offset  # where peers find this rank's result
            if shared is None:
                raise must_be_shared(algorithm)
            if algorithm == "two_shot":
                self._two_shot(local, offset, shared, codes, timeout)
                return
            if shared != offset:
                self._core.tutti_put(out.data_ptr(), local.data_ptr(), bytes)
            self._ring(out, shared, codes, timeout)

    def _one_shot(
        self,
        local: torch.Tensor,
        offset: int,
        out: torch.Tensor,
        codes: tuple[int, int],
        timeout: float,
    ) -> None:
        """Every rank reads all ranks' values, in rank order, so that all get the same bits."""
        memory = self._memory
        bytes = local.numel() * local.itemsize
        what = "all_reduce"
        target = out.data_ptr()
        self._step(what, timeout)
        if out is local:  # peers still read it
            if bytes > self._scratch.numel():
                self._scratch = torch.empty(bytes, dtype=torch.uint8)
            target = self._scratch.data_ptr()
        parts = [memory.address(rank, offset) for rank in range(memory.size)]
        self._reduce(target, parts, local.numel(), codes)
        self._step(what, timeout)
        if out is local:
            self._quick.tutti_put(local.data_ptr(), target, bytes)

    def _two_shot(
        self, local: torch.Tensor, source: int, target: int, codes: tuple[int, int], timeout: float
    ) -> None:
        """Each rank reduces its piece of every chunk in place, then fetches the others' pieces.

        A piece of a rank's memory is read only by the piece's owner, before the owner tells that it
        is done, and is overwritten only after that: in place is safe without further meetings.
        """
        memory, itemsize = self._memory, local.itemsize
        what = "all_reduce"
        chunk = _CHUNK_BYTES * memory.size // itemsize
        self._step(what, timeout)
        for start in range(0, local.numel(), chunk):
            count = min(chunk, local.numel() - start)
            parts_of = pieces(count, memory.size, itemsize)
            first, last = parts_of[memory.rank]
            at = (start + first) * itemsize
            parts = [memory.address(rank, source + at) for rank in range(memory.size)]
            self._reduce(memory.address(memory.rank, target + at), parts, last - first, codes)
            self._tell()
            for peer in self._peers:
                first, last = parts_of[peer]
                at = target + (start + first) * itemsize
                self._wait(peer, self._words[peer], self._progress, timeout, what)
                self._core.tutti_put(
                    memory.address(memory.rank, at),
                    memory.address(peer, at),
                    (last - first) * itemsize,
                )
        self._step(what, timeout)

    def _ring(
        self, tensor: torch.Tensor, offset: int, codes: tuple[int, int], timeout: float
    ) -> None:
        """Sums travel around the ring, then results do: 2 (n - 1) steps between neighbours only.

        Each piece is summed once, starting at another rank: all ranks get the same bits, which need
        not be those of one-shot and two-shot. On one host this is the baseline, not the fast way.
        """
        memory, itemsize = self._memory, tensor.itemsize
        size, rank = memory.size, memory.rank
        left, right = (rank - 1) % size, (rank + 1) % size
        what = "all_reduce"
        averaging = codes[1] == OPS.index("mean")
        if averaging:
            codes = (codes[0], OPS.index("sum"))
        parts_of = pieces(tensor.numel(), size, itemsize)
        self._step(what, timeout)
        begun = self._progress
        for step in range(2 * (size - 1)):
            lap = step - (size - 1)  # from 0 on: results travel
            piece = (rank - 1 - step) % size if lap < 0 else (rank - lap) % size
            first, last = parts_of[piece]
            mine = memory.address(rank, offset + first * itemsize)
            theirs = memory.address(left, offset + first * itemsize)
            # The left neighbour has finished its step before, which was on this piece.
            self._wait(left, self._words[left], begun + step, timeout, what)
            if lap < 0:
                self._reduce(mine, [theirs, mine], last - first, codes)
                if averaging and lap == -1:  # with this step the sum of the piece is complete
                    tensor.view(-1)[first:last].div_(size)
            else:
                # The right neighbour has read the partial sum that is overwritten here.
                self._wait(right, self._words[right], begun + lap + 1, timeout, what)
                self._core.tutti_put(mine, theirs, (last - first) * itemsize)
            self._tell()
        self._step(what, timeout)

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None:
        """Everybody copies everybody's tensor."""
        self.calls += 1
        memory, bytes = self._memory, local.numel() * local.itemsize
        what = "all_gather"
        self._step(what, timeout)
        # Each begins with itself and goes on to its neighbours, so that not all read one rank.
        for turn in range(memory.size):
            rank = (memory.rank + turn) % memory.size
            self._core.tutti_put(out.data_ptr() + rank * bytes, memory.address(rank, offset), bytes)
        self._step(what, timeout)

    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        """Everybody reduces its own piece of all ranks' tensors."""
        self.calls += 1
        memory, bytes = self._memory, out.numel() * out.itemsize
        what = "reduce_scatter"
        codes = _codes(local.dtype, op)
        self._step(what, timeout)
        parts = [memory.address(rank, offset + memory.rank * bytes) for rank in range(memory.size)]
        self._reduce(out.data_ptr(), parts, out.numel(), codes)
        self._step(what, timeout)

    def close(self) -> None:
        """Leave; not collective."""
        if self._group is not None:
            self._group.close()

    def _step(self, what: str, timeout: float) -> None:
        """A meeting of all ranks."""
        self._tell()
        for peer in self._peers:
            self._wait(peer, self._words[peer], self._progress, timeout, what)

    def _tell(self) -> None:
        """This rank has come one step further (release)."""
        self._progress += 1
        self._memory.store(self._own_word, self._progress)

    def _reduce(self, target: int, parts: list[int], count: int, codes: tuple[int, int]) -> None:
        pointers = (ctypes.c_void_p * len(parts))(*parts)
        core = self._quick if count * len(parts) < 8192 else self._core
        code = core.tutti_reduce_into(target, pointers, len(parts), count, *codes)
        if code != 0:
            raise UsageError(self._core.tutti_error().decode())


@cache
def _codes(dtype: torch.dtype, op: str) -> tuple[int, int]:
    check_reduction(dtype, op)
    if dtype not in _DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise UsageError(f"{dtype} cannot be reduced: convert it to one of {names}")
    return _DTYPES.index(dtype), OPS.index(op)
