"""All-reduce, all-gather and reduce-scatter on GPUs, enqueued on the current stream.

Sums of float32 and bfloat16 use torch's own one-shot and two-shot kernels; everything else (other
reductions and dtypes, rings, sizes that are not multiples of 4 bytes) is built from peer views,
torch operators and barriers, which works everywhere but needs a few more kernel launches.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tutti.comm.symmetric.symmetric_tensor import (
    CHANNELS,
    Algorithm,
    check_reduction,
    out_must_be_symmetric,
    rank_parts,
)

if TYPE_CHECKING:
    from tutti.comm.symmetric.cuda_heap import CudaMemory

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
# Up to this size, an all_reduce out of place uses one_shot: every rank reads all ranks' tensors.
_ONE_SHOT_BYTES = 512 << 10
# Capturing a graph saves time only for a tensor that is summed often.
_CALLS_BEFORE_GRAPH = 3


class GraphedLaunch:
    """A launch that is repeated. From the fourth time on it replays a CUDA graph, which the host
    enqueues in 4 µs, compared with 12 µs for torch's operator (measured on one H200)."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self._launch = launch
        self._plain_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if (
            torch.cuda.is_current_stream_capturing()
        ):  # the launch becomes part of the caller's graph
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
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):  # the default stream cannot be captured
            # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
            graph.capture_begin(capture_error_mode="thread_local")
            self._launch()
            graph.capture_end()
        return graph


class CudaCollectives:
    """The collectives of one heap, which can run only one at a time, on one stream at a time."""

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
        self._memory.check()
        in_place = out is local
        check_reduction(local.dtype, op)
        shared = in_place or out_offset is not None
        if algorithm == "auto":
            # In place, at every size, two_shot needs one kernel and one_shot needs two.
            small = local.nbytes <= _ONE_SHOT_BYTES
            algorithm = "two_shot" if in_place or (shared and not small) else "one_shot"
        if algorithm != "one_shot" and not shared:
            raise out_must_be_symmetric(algorithm)
        self.calls += 1
        if local.numel() == 0:
            return
        if algorithm == "one_shot":
            target = torch.empty_like(local) if in_place else out
            self._one_shot(local, offset, op, target, timeout)
            if in_place:
                local.copy_(target)
            return
        if not in_place:
            assert out_offset is not None
            out.copy_(local)
            offset = out_offset
        if algorithm == "two_shot":
            self._two_shot(out, offset, op, timeout)
        else:
            self._ring(out, offset, op, timeout)

    def sum_in_place(self, local: torch.Tensor) -> Callable[[], object] | None:
        """A function that sums this tensor in place; None if torch has no kernel for the tensor.

        All choices are made in advance, because gradients are summed often.
        """
        if not self._has_torch_kernel(local, "sum"):
            return None
        kernel = GraphedLaunch(partial(self._torch_two_shot, local, "sum", self._memory.group_name))
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
        if self._has_torch_kernel(local, op) and out.data_ptr() % 16 == 0:
            torch.ops.symm_mem.one_shot_all_reduce_out(local, "sum", memory.group_name, out)
            return
        self._barrier(timeout)
        views = [
            memory.view(rank, offset, tuple(local.shape), local.dtype)
            for rank in range(memory.size)
        ]
        out.copy_(_reduced(views, op))
        self._barrier(timeout)

    def _two_shot(self, tensor: torch.Tensor, offset: int, op: str, timeout: float) -> None:
        memory = self._memory
        if self._has_torch_kernel(tensor, op):
            self._torch_two_shot(tensor, "sum", memory.group_name)
            return
        parts = rank_parts(tensor.numel(), memory.size, tensor.itemsize)
        first, last = parts[memory.rank]
        self._barrier(timeout)
        mine = [self._part(rank, offset, first, last, tensor) for rank in range(memory.size)]
        mine[memory.rank].copy_(_reduced(mine, op))
        self._barrier(timeout)
        for peer in range(memory.size):
            if peer != memory.rank:
                first, last = parts[peer]
                theirs = self._part(peer, offset, first, last, tensor)
                self._part(memory.rank, offset, first, last, tensor).copy_(theirs)
        self._barrier(timeout)

    def _ring(self, tensor: torch.Tensor, offset: int, op: str, timeout: float) -> None:
        """The same steps as on the CPU, with a barrier after each step: a baseline."""
        memory = self._memory
        size, rank = memory.size, memory.rank
        parts = rank_parts(tensor.numel(), size, tensor.itemsize)
        self._barrier(timeout)
        for step in range(2 * (size - 1)):
            lap = step - (size - 1)  # below 0 sums are passed on; from 0 on, results
            first, last = parts[(rank - 1 - step) % size if lap < 0 else (rank - lap) % size]
            mine = self._part(rank, offset, first, last, tensor)
            theirs = self._part((rank - 1) % size, offset, first, last, tensor)
            if lap < 0:
                total = _OPS[op](theirs, mine)
                mine.copy_(total / size if op == "mean" and lap == -1 else total)
            else:
                mine.copy_(theirs)
            self._barrier(timeout)

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str, timeout: float
    ) -> None:
        """Reduce `tensor` in place through `buffer`, which has its shape and is at `offset`."""
        self._memory.check()
        check_reduction(tensor.dtype, op)
        self.calls += 1
        # torch's kernel that includes the copy into the buffer requires the same alignment of both.
        fits = tensor.data_ptr() % 16 == 0 and tensor.storage_offset() * tensor.itemsize % 16 == 0
        fused = getattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", None)
        if fused is not None and fits and self._has_torch_kernel(tensor, op) and tensor.numel() > 0:
            fused(buffer, tensor, "sum", self._memory.group_name, tensor)
            return
        buffer.copy_(tensor)
        if tensor.numel() > 0:
            self._one_shot(buffer, offset, op, tensor, timeout)

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None:
        self._memory.check()
        self.calls += 1
        memory = self._memory
        rows = out.view(memory.size, -1)
        self._barrier(timeout)
        for turn in range(memory.size):
            rank = (memory.rank + turn) % memory.size
            rows[rank].copy_(memory.view(rank, offset, (local.numel(),), local.dtype))
        self._barrier(timeout)

    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        self._memory.check()
        check_reduction(local.dtype, op)
        self.calls += 1
        memory = self._memory
        first = out.numel() * memory.rank
        self._barrier(timeout)
        parts = [
            self._part(rank, offset, first, first + out.numel(), local)
            for rank in range(memory.size)
        ]
        out.copy_(_reduced(parts, op).view(out.shape))
        self._barrier(timeout)

    def _part(
        self, rank: int, offset: int, first: int, last: int, like: torch.Tensor
    ) -> torch.Tensor:
        return self._memory.view(rank, offset, (like.numel(),), like.dtype)[first:last]

    def _has_torch_kernel(self, tensor: torch.Tensor, op: str) -> bool:
        bytes = tensor.nbytes
        return (
            op == "sum"
            and tensor.dtype in _TORCH_DTYPES
            and bytes > 0
            and bytes % 4 == 0
            and self._memory.size > 1
            and self._memory.backend
            == "cuda"  # with NVSHMEM, the signals that torch's kernels use are not set up
        )

    def _barrier(self, timeout: float) -> None:
        self._memory.stream_barrier(CHANNELS, timeout, f"collective {self.calls}")


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce the parts in rank order; 16-bit floats are reduced in float32 and rounded once."""
    short = parts[0].dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if short else parts[0]
    for part in parts[1:]:
        total = _OPS[op](total, part.float() if short else part)
    if op == "mean":
        total = total / len(parts)
    return total.to(parts[0].dtype)
