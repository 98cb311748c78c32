"""All-reduce, all-gather and reduce-scatter on the CPU. Ranks read each other's tensors in place.

all_reduce runs in the C core, unless the caller requests an algorithm. The algorithms are
implemented here in Python, as a readable reference and for comparison. Each collective begins with
a barrier, so that all inputs are written, and ends with a barrier, so that all ranks have read the
inputs before a caller overwrites them. Between the barriers, each rank publishes its progress in
one word. Only this rank writes the word, with a release store. The other ranks load the word with
acquire.
"""

import ctypes
import json
import os
import secrets
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from tutti.comm.ledger import DTYPES, REDUCTIONS
from tutti.comm.shm import native
from tutti.comm.symmetric.heap_collectives import check_reduction, out_must_be_symmetric, rank_parts
from tutti.comm.symmetric.heap_rendezvous import Timeout
from tutti.world.errors import RanksDiffer, UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.cpu_heap import CpuMemory

# The dtypes that the core reduces, in the order of the core's enum. The enum's last entry, `bytes`,
# is omitted, because it is not a dtype of torch.
_DTYPES = tuple(getattr(torch, name) for name in DTYPES[:-1])
# two_shot processes this number of bytes per rank at a time, so that a part is still in its owner's
# cache when the peers read the part.
_CHUNK_BYTES = 512 << 10
_CACHED_OPERATIONS = 256  # the number of prepared operations that are kept for later calls


class CpuCollectives:
    """The collectives of one heap. Only one collective can run at a time.

    In all methods, `codes` is (dtype, reduction), as numbers in the enums of the C core.
    """

    def __init__(self, memory: "CpuMemory") -> None:
        self._memory = memory
        self._core, self._core_holding_gil = native.core(), native.core_holding_gil()
        self._wait = memory.wait_for_peer
        self._peers, self._words = memory.peers, memory.progress_words
        self._own_word = self._words[memory.rank]
        self._progress = 0  # between collectives, all ranks have the same value
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._group: Any = None  # the core's group, created by the first all_reduce
        self._run = self._core.tutti_run
        self._operations: dict[tuple[int, int, int, tuple[int, int]], Any] = {}
        self.calls = 0

    def all_reduce(
        self,
        local: torch.Tensor,
        offset: int,
        op: str,
        algorithm: str,
        out: torch.Tensor,
        out_offset: int | None,
    ) -> None:
        """Reduce `local`, which is at `offset` of the heap, over all ranks into `out`.

        `out` is `local` itself, another tensor in the heap (at `out_offset`), or a tensor outside
        the heap (`out_offset` is None).
        """
        self._memory.check()
        codes = _codes(local.dtype, op)
        self.calls += 1
        if algorithm == "auto":
            self._run_in_core(local.data_ptr(), out.data_ptr(), local.nbytes, codes)
        elif algorithm == "one_shot":
            self._one_shot(local, offset, out, codes)
        else:
            shared = offset if out is local else out_offset  # where peers read this rank's result
            if shared is None:
                raise out_must_be_symmetric(algorithm)
            if algorithm == "two_shot":
                self._two_shot(local, offset, shared, codes)
                return
            if shared != offset:
                self._core.tutti_put(out.data_ptr(), local.data_ptr(), local.nbytes)
            self._ring(out, shared, codes)

    def sum_in_place(self, local: torch.Tensor) -> None:
        """Return None: unlike on CUDA, no function is prepared for each tensor."""

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str
    ) -> None:
        """Reduce `tensor` in place, through `buffer`.

        `buffer` has the shape of `tensor` and is at `offset` of the heap.
        """
        self._memory.check()
        buffer.copy_(tensor)
        self.all_reduce(buffer, offset, op, "auto", tensor, None)

    def _one_shot(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, codes: tuple[int, int]
    ) -> None:
        """Every rank reduces all ranks' values in rank order, so results are bitwise equal."""
        bytes, target = local.nbytes, out.data_ptr()
        self._barrier("all_reduce")
        if out is local:  # peers are still reading `local`
            if bytes > self._scratch.numel():
                self._scratch = torch.empty(bytes, dtype=torch.uint8)
            target = self._scratch.data_ptr()
        self._reduce(target, self._memory.addresses(offset), local.numel(), codes)
        self._barrier("all_reduce")
        if out is local:
            self._core_holding_gil.tutti_put(local.data_ptr(), target, bytes)

    def _two_shot(
        self, local: torch.Tensor, source: int, target: int, codes: tuple[int, int]
    ) -> None:
        """Each rank reduces its part of every chunk, then copies the other ranks' reduced parts.

        Only rank p reads part p of the inputs. It then publishes its progress. The other ranks wait
        for this progress before they overwrite part p in their memory. Therefore an in-place
        reduction needs no further barriers.
        """
        memory, itemsize = self._memory, local.itemsize
        chunk = _CHUNK_BYTES * memory.size // itemsize
        self._barrier("all_reduce")
        for start in range(0, local.numel(), chunk):
            count = min(chunk, local.numel() - start)
            parts = rank_parts(count, memory.size, itemsize)
            first, last = parts[memory.rank]
            at = (start + first) * itemsize
            sources = memory.addresses(source + at)
            self._reduce(memory.address(memory.rank, target + at), sources, last - first, codes)
            self._publish_progress()
            for peer in self._peers:
                first, last = parts[peer]
                at = target + (start + first) * itemsize
                self._wait(peer, self._words[peer], self._progress, "all_reduce")
                here, there = memory.address(memory.rank, at), memory.address(peer, at)
                self._core.tutti_put(here, there, (last - first) * itemsize)
        self._barrier("all_reduce")

    def _ring(self, tensor: torch.Tensor, offset: int, codes: tuple[int, int]) -> None:
        """Pass partial sums around the ring, then results, in 2 (n - 1) steps for n ranks.

        Each part is summed once, so results are bitwise equal on all ranks. The sum of each part
        starts at a different rank, so results may differ in rounding from one_shot and two_shot. On
        one host, this algorithm is only a baseline for comparison.
        """
        memory, itemsize = self._memory, tensor.itemsize
        size, rank = memory.size, memory.rank
        left, right = (rank - 1) % size, (rank + 1) % size
        averaging = codes[1] == REDUCTIONS.index("mean")
        if averaging:
            codes = (codes[0], REDUCTIONS.index("sum"))
        parts = rank_parts(tensor.numel(), size, itemsize)
        self._barrier("all_reduce")
        before = self._progress
        for step in range(2 * (size - 1)):
            lap = step - (size - 1)  # negative in the reduce-scatter phase, >= 0 in all-gather
            first, last = parts[(rank - 1 - step) % size if lap < 0 else (rank - lap) % size]
            own_part = memory.address(rank, offset + first * itemsize)
            left_part = memory.address(left, offset + first * itemsize)
            # Wait until the left neighbour has completed its previous step, which wrote this part.
            self._wait(left, self._words[left], before + step, "all_reduce")
            if lap < 0:
                self._reduce(own_part, [left_part, own_part], last - first, codes)
                if averaging and lap == -1:  # this step completes the sum of the part
                    tensor.view(-1)[first:last].div_(size)
            else:
                # Wait until the right neighbour has read the partial sum, before overwriting it.
                self._wait(right, self._words[right], before + lap + 1, "all_reduce")
                self._core.tutti_put(own_part, left_part, (last - first) * itemsize)
            self._publish_progress()
        self._barrier("all_reduce")

    def all_gather(self, local: torch.Tensor, offset: int, out: torch.Tensor) -> None:
        """Every rank copies the tensors of all ranks to its `out`."""
        self._memory.check()
        self.calls += 1
        memory, bytes = self._memory, local.nbytes
        self._barrier("all_gather")
        # Each rank starts with its own tensor, so that the ranks do not all read the same tensor.
        for turn in range(memory.size):
            rank = (memory.rank + turn) % memory.size
            self._core.tutti_put(out.data_ptr() + rank * bytes, memory.address(rank, offset), bytes)
        self._barrier("all_gather")

    def reduce_scatter(self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor) -> None:
        """Every rank reduces its own part of all ranks' tensors."""
        self._memory.check()
        self.calls += 1
        codes = _codes(local.dtype, op)
        self._barrier("reduce_scatter")
        sources = self._memory.addresses(offset + self._memory.rank * out.nbytes)
        self._reduce(out.data_ptr(), sources, out.numel(), codes)
        self._barrier("reduce_scatter")

    # ---- The core's own all_reduce ----

    def _run_in_core(self, source: int, target: int, bytes: int, codes: tuple[int, int]) -> None:
        """Reduce `bytes` from `source` to `target`, in one call into C without staging buffers."""
        if self._group is None:
            self._group = self._create_group()
        key = (source, target, bytes, codes)
        operation = self._operations.get(key)
        if operation is None:
            if len(self._operations) >= _CACHED_OPERATIONS:
                self._operations.clear()
            ins, outs = [(source, bytes)], [(target, bytes)]
            new = native.operation(
                native.ALL_REDUCE, ins=ins, outs=outs, dtype=codes[0], reduce=codes[1]
            )
            operation = self._operations[key] = ctypes.byref(new)
        code = self._run(self._group, operation, self._memory.timeout)
        if code == 0:
            return
        text = self._core.tutti_error().decode(errors="replace")
        error: Exception
        if code == native.TIMEOUT:
            error = Timeout(text)
        elif code == native.MISMATCH:
            error = RanksDiffer(text)
        else:
            error = self._memory.lost_peer_error("all_reduce") or native.error_for(code, text)
        self._memory.mark_unusable(error)
        raise error

    def _create_group(self) -> Any:
        """Create the core's group on all ranks together. On failure, all ranks raise an error."""
        memory, core = self._memory, self._core

        def exchange(text: str) -> list[str]:
            return memory.exchange(text, "all_reduce")

        token = int(exchange(str(secrets.randbits(62)))[0])
        name = f"heap {memory.number}".encode()
        group = core.tutti_group_create(name, memory.rank, memory.size, 0, token)
        failure = "" if group else str(native.last_error())
        try:
            segment = [os.getpid(), 0, 0]
            if group:
                segment[1:] = core.tutti_group_fd(group), core.tutti_group_bytes(group)
            for rank, text in enumerate(exchange(json.dumps(segment))):
                pid, fd, bytes = json.loads(text)
                if failure or not bytes or rank == memory.rank:
                    continue
                if core.tutti_group_connect(group, rank, pid, fd, bytes) != 0:
                    failure = str(native.last_error())
            bases = pointers(memory.addresses(0))
            if not failure and core.tutti_group_add_block(group, 1, bases, memory.bytes) != 0:
                failure = str(native.last_error())
            for rank, text in enumerate(exchange(failure)):
                if text:
                    raise UsageError(f"rank {rank} cannot join the heap's collectives: {text}")
        except BaseException:
            if group:
                core.tutti_group_close(group)
            raise
        return group

    def close(self) -> None:
        """Leave the core's group. This call is not collective."""
        if self._group is not None:
            self._core.tutti_group_close(self._group)
            self._group = None

    # ---- Steps of the algorithms ----

    def _barrier(self, collective: str) -> None:
        self._publish_progress()
        for peer in self._peers:
            self._wait(peer, self._words[peer], self._progress, collective)

    def _publish_progress(self) -> None:
        """Publish, with a release store, that this rank has completed one more step."""
        self._progress += 1
        self._memory.store(self._own_word, self._progress)

    def _reduce(self, target: int, sources: list[int], count: int, codes: tuple[int, int]) -> None:
        core = self._core_holding_gil if count * len(sources) < 8192 else self._core
        code = core.tutti_reduce_into(target, pointers(sources), len(sources), count, *codes)
        if code != 0:
            raise UsageError(self._core.tutti_error().decode())


def pointers(addresses: list[int]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return a C array of addresses."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


@cache
def _codes(dtype: torch.dtype, op: str) -> tuple[int, int]:
    check_reduction(dtype, op)
    if dtype not in _DTYPES:
        names = ", ".join(str(entry).removeprefix("torch.") for entry in _DTYPES)
        raise UsageError(f"{dtype} cannot be reduced: convert the tensor to one of {names}")
    return _DTYPES.index(dtype), REDUCTIONS.index(op)
