"""All-reduce, all-gather and reduce-scatter on GPUs, enqueued on the current stream.

Sums of float32 and bfloat16 are torch's own one- and two-shot kernels; the rest (other operations
and dtypes, rings, sizes that are no multiple of 4 bytes) is made of peer views, torch operators and
barriers: right everywhere, with a few launches more.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tutti.comm.symmetric.memory import CHANNELS, Algorithm
from tutti.comm.symmetric.reduction import check_reduction, must_be_shared, pieces

if TYPE_CHECKING:
    from tutti.comm.symmetric.cuda import CudaMemory

_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_TORCH_DTYPES = (torch.float32, torch.bfloat16)
# Up to here, out of place, every rank reads everything.
_ONE_SHOT_BYTES = 512 << 10
# A tensor that is summed now and then is not worth a graph.
_CALLS_BEFORE_GRAPH = 3


class Repeated:
    """A launch that is made over and over: from the fourth time on as a CUDA graph, which takes the
    host 4 µs to enqueue where torch's operator takes 12 (measured on one H200)."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self._launch = launch
        self._plain_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if torch.cuda.is_current_stream_capturing():  # it becomes part of the caller's graph
            self._launch()
        elif self._graph is not None:
            self._graph.replay()
        elif self._plain_calls < _CALLS_BEFORE_GRAPH:
            self._plain_calls += 1
            self._launch()
        else:
            self._graph = self._captured()
            self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside):  # the default stream cannot be captured
            # Other threads, such as NCCL's watchdog, may go on calling CUDA meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            self._launch()
            graph.capture_end()
        return graph


class CudaCollectives:
    """The collectives of one heap; one at a time, on one stream at a time."""

    def __init__(self, memory: "CudaMemory") -> None:
        self._memory = memory
        self._torch_two_shot = torch.ops.symm_mem.two_shot_all_reduce_.default
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
        in_place = out is local
        check_reduction(local.dtype, op)
        shared = in_place or out_offset is not None
        if algorithm == "auto":
            # In place, two_shot is one kernel and one_shot two, at every size.
            small = local.nbytes <= _ONE_SHOT_BYTES
            algorithm = "two_shot" if in_place or (shared and not small) else "one_shot"
        if algorithm != "one_shot" and not shared:
            raise must_be_shared(algorithm)
        self.calls += 1
        if local.numel() == 0:
            return
        if algorithm == "one_shot":
            target = torch.empty_like(local) if in_place else out
            self._one_shot(local, offset, op, target, timeout)
            if in_place:
                local.copy_(target)
            return
        place = offset
        if not in_place:
            assert out_offset is not None
            out.copy_(local)
            place = out_offset
        if algorithm == "two_shot":
            self._two_shot(out, place, op, timeout)
        else:
            self._ring(out, place, op, timeout)

    def sum_in_place(self, local: torch.Tensor) -> Callable[[], object] | None:
        """Torch's kernel for this tensor with nothing left to decide: small gradients are many."""
        if not self._torch_can(local, "sum"):
            return None
        kernel = Repeated(partial(self._torch_two_shot, local, "sum", self._memory.group_name))
        check = self._memory.check

        def run() -> None:
            check()
            self.calls += 1
            kernel()

        return run

    def _one_shot(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        memory = self._memory
        if self._torch_can(local, op) and out.data_ptr() % 16 == 0:
            torch.ops.symm_mem.one_shot_all_reduce_out(local, "sum", memory.group_name, out)
            return
        self._meet(timeout)
        views = [
            memory.view(rank, offset, tuple(local.shape), local.dtype)
            for rank in range(memory.size)
        ]
        out.copy_(_reduced(views, op))
        self._meet(timeout)

    def _two_shot(self, tensor: torch.Tensor, offset: int, op: str, timeout: float) -> None:
        memory = self._memory
        if self._torch_can(tensor, op):
            self._torch_two_shot(tensor, "sum", memory.group_name)
            return
        parts = pieces(tensor.numel(), memory.size, tensor.itemsize)
        first, last = parts[memory.rank]
        self._meet(timeout)
        mine = [self._piece(rank, offset, first, last, tensor) for rank in range(memory.size)]
        mine[memory.rank].copy_(_reduced(mine, op))
        self._meet(timeout)
        for peer in range(memory.size):
            if peer != memory.rank:
                first, last = parts[peer]
                theirs = self._piece(peer, offset, first, last, tensor)
                self._piece(memory.rank, offset, first, last, tensor).copy_(theirs)
        self._meet(timeout)

    def _ring(self, tensor: torch.Tensor, offset: int, op: str, timeout: float) -> None:
        """The same steps as on CPU, with a barrier after each: a baseline to compare with."""
        memory = self._memory
        size, rank = memory.size, memory.rank
        parts = pieces(tensor.numel(), size, tensor.itemsize)
        self._meet(timeout)
        for step in range(2 * (size - 1)):
            lap = step - (size - 1)  # from 0 on: results travel
            first, last = parts[(rank - 1 - step) % size if lap < 0 else (rank - lap) % size]
            mine = self._piece(rank, offset, first, last, tensor)
            theirs = self._piece((rank - 1) % size, offset, first, last, tensor)
            if lap < 0:
                total = _OPS[op](theirs, mine)
                mine.copy_(total / size if op == "mean" and lap == -1 else total)
            else:
                mine.copy_(theirs)
            self._meet(timeout)

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str, timeout: float
    ) -> None:
        """`tensor` through `buffer`, which lies in the heap at `offset` and has its shape."""
        check_reduction(tensor.dtype, op)
        self.calls += 1
        # The copy into the buffer as part of torch's kernel asks for the same alignment of both.
        fits = tensor.data_ptr() % 16 == 0 and tensor.storage_offset() * tensor.itemsize % 16 == 0
        fused = getattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", None)
        if fused is not None and fits and self._torch_can(tensor, op) and tensor.numel() > 0:
            fused(buffer, tensor, "sum", self._memory.group_name, tensor)
            return
        buffer.copy_(tensor)
        if tensor.numel() > 0:
            self._one_shot(buffer, offset, op, tensor, timeout)

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None:
        self.calls += 1
        memory = self._memory
        rows = out.view(memory.size, -1)
        self._meet(timeout)
        for turn in range(memory.size):
            rank = (memory.rank + turn) % memory.size
            rows[rank].copy_(memory.view(rank, offset, (local.numel(),), local.dtype))
        self._meet(timeout)

    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        check_reduction(local.dtype, op)
        self.calls += 1
        memory = self._memory
        first = out.numel() * memory.rank
        self._meet(timeout)
        parts = [
            self._piece(rank, offset, first, first + out.numel(), local)
            for rank in range(memory.size)
        ]
        out.copy_(_reduced(parts, op).view(out.shape))
        self._meet(timeout)

    def _piece(
        self, rank: int, offset: int, first: int, last: int, like: torch.Tensor
    ) -> torch.Tensor:
        return self._memory.view(rank, offset, (like.numel(),), like.dtype)[first:last]

    def _torch_can(self, tensor: torch.Tensor, op: str) -> bool:
        bytes = tensor.nbytes
        return (
            op == "sum"
            and tensor.dtype in _TORCH_DTYPES
            and bytes > 0
            and bytes % 4 == 0
            and self._memory.size > 1
            and self._memory.backend == "cuda"  # with NVSHMEM its kernels' signals are not wired
        )

    def _meet(self, timeout: float) -> None:
        self._memory.meet(CHANNELS, timeout, f"collective {self.calls}")


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order; 16-bit numbers are added up in float32 and rounded once."""
    short = parts[0].dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if short else parts[0]
    for part in parts[1:]:
        total = _OPS[op](total, part.float() if short else part)
    if op == "mean":
        total = total / len(parts)
    return total.to(parts[0].dtype)
