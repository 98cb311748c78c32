"""All-reduce, all-gather and reduce-scatter on GPUs, enqueued on the current stream.

Sums of float32 and bfloat16 use torch's own one-shot and two-shot kernels. All other cases (other
reductions and dtypes, rings, sizes that are not multiples of 4 bytes) use torch operators on views
of the peers' memory, with barriers, and need a few more kernel launches.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tutti.comm.symmetric.heap_collectives import check_reduction, out_must_be_symmetric, rank_parts
from tutti.comm.symmetric.symmetric_tensor import CHANNELS

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
# Up to this number of bytes, an out-of-place all_reduce uses one_shot, in which every rank reads
# the tensors of all ranks.
_ONE_SHOT_BYTES = 512 << 10
# The number of plain launches before a CUDA graph is captured. The capture takes time, so it is
# worthwhile only for a tensor that is summed often.
_CALLS_BEFORE_GRAPH = 3


class GraphedLaunch:
    """A repeated kernel launch. From the fourth call on, the launch replays a CUDA graph.

    The host enqueues the graph in 4 µs, and torch's operator in 12 µs (measured on one H200).
    """

    def __init__(self, launch: Callable[[], object]) -> None:
        self._launch = launch
        self._plain_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._launch()  # becomes a part of the caller's graph
        elif self._graph is not None:
            self._graph.replay()
        elif self._plain_calls < _CALLS_BEFORE_GRAPH:
            self._plain_calls += 1
            self._launch()
        else:
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):  # the default stream cannot be captured
                # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
                graph.capture_begin(capture_error_mode="thread_local")
                self._launch()
                graph.capture_end()
            self._graph = graph
            graph.replay()


class CudaCollectives:
    """The collectives of one heap. Only one collective can run at a time, on one stream."""

    def __init__(self, memory: "CudaMemory") -> None:
        self._memory, self._ranks = memory, range(memory.size)
        self._torch_two_shot = torch.ops.symm_mem.two_shot_all_reduce_.default
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
        self._memory.check()
        in_place = out is local
        check_reduction(local.dtype, op)
        shared = in_place or out_offset is not None
        if algorithm == "auto":
            # In place, two_shot is used at every size, because it needs one kernel and one_shot
            # needs two.
            small = local.nbytes <= _ONE_SHOT_BYTES
            algorithm = "two_shot" if in_place or (shared and not small) else "one_shot"
        if algorithm != "one_shot" and not shared:
            raise out_must_be_symmetric(algorithm)
        self.calls += 1
        if local.numel() == 0:
            return
        if algorithm == "one_shot":
            target = torch.empty_like(local) if in_place else out
            self._one_shot(local, offset, op, target)
            if in_place:
                local.copy_(target)
            return
        if not in_place:
            assert out_offset is not None
            out.copy_(local)
            offset = out_offset
        if algorithm == "two_shot":
            self._two_shot(out, offset, op)
        else:
            self._ring(out, offset, op)

    def sum_in_place(self, local: torch.Tensor) -> Callable[[], object] | None:
        """Return a function that sums this tensor over all ranks, in place.

        Return None if torch has no kernel for this tensor. The kernel is chosen once, in this
        method, and not in every call, because gradients are summed often.
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

    def _one_shot(self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor) -> None:
        if self._has_torch_kernel(local, op) and out.data_ptr() % 16 == 0:
            group_name = self._memory.group_name
            torch.ops.symm_mem.one_shot_all_reduce_out(local, "sum", group_name, out)
            return
        self._barrier()
        parts = self._parts(self._ranks, offset, local, 0, local.numel())
        out.copy_(_reduced(parts, op).view(out.shape))
        self._barrier()

    def _two_shot(self, tensor: torch.Tensor, offset: int, op: str) -> None:
        rank = self._memory.rank
        if self._has_torch_kernel(tensor, op):
            self._torch_two_shot(tensor, "sum", self._memory.group_name)
            return
        ends = rank_parts(tensor.numel(), self._memory.size, tensor.itemsize)
        self._barrier()
        parts = self._parts(self._ranks, offset, tensor, *ends[rank])
        parts[rank].copy_(_reduced(parts, op))
        self._barrier()
        for peer, (first, last) in enumerate(ends):
            if peer != rank:
                peer_part, own_part = self._parts((peer, rank), offset, tensor, first, last)
                own_part.copy_(peer_part)
        self._barrier()

    def _ring(self, tensor: torch.Tensor, offset: int, op: str) -> None:
        """Run the steps of CpuCollectives._ring with a barrier after each step.

        On the GPUs of one host, this algorithm is only a baseline for comparison.
        """
        size, rank = self._memory.size, self._memory.rank
        ends = rank_parts(tensor.numel(), size, tensor.itemsize)
        self._barrier()
        for step in range(2 * (size - 1)):
            lap = step - (size - 1)  # negative in the reduce-scatter phase, >= 0 in all-gather
            first, last = ends[(rank - 1 - step) % size if lap < 0 else (rank - lap) % size]
            neighbours = ((rank - 1) % size, rank)
            left_part, own_part = self._parts(neighbours, offset, tensor, first, last)
            if lap < 0:
                total = _OPS[op](left_part, own_part)
                own_part.copy_(total / size if op == "mean" and lap == -1 else total)
            else:
                own_part.copy_(left_part)
            self._barrier()

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str
    ) -> None:
        """Reduce `tensor` in place, through `buffer`.

        `buffer` has the shape of `tensor` and is at `offset` of the heap.
        """
        self._memory.check()
        check_reduction(tensor.dtype, op)
        self.calls += 1
        # torch's fused kernel, which also copies the tensor into the buffer, requires that tensor
        # and buffer have the same alignment.
        aligned = tensor.data_ptr() % 16 == 0
        aligned = aligned and tensor.storage_offset() * tensor.itemsize % 16 == 0
        fused = getattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", None)
        if fused is not None and aligned and self._has_torch_kernel(tensor, op):
            fused(buffer, tensor, "sum", self._memory.group_name, tensor)
            return
        buffer.copy_(tensor)
        if tensor.numel() > 0:
            self._one_shot(buffer, offset, op, tensor)

    def all_gather(self, local: torch.Tensor, offset: int, out: torch.Tensor) -> None:
        memory = self._memory
        memory.check()
        self.calls += 1
        rows = out.view(memory.size, -1)
        self._barrier()
        for turn in range(memory.size):
            rank = (memory.rank + turn) % memory.size
            rows[rank].copy_(memory.view(rank, offset, (local.numel(),), local.dtype))
        self._barrier()

    def reduce_scatter(self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor) -> None:
        self._memory.check()
        check_reduction(local.dtype, op)
        self.calls += 1
        first = out.numel() * self._memory.rank
        self._barrier()
        parts = self._parts(self._ranks, offset, local, first, first + out.numel())
        out.copy_(_reduced(parts, op).view(out.shape))
        self._barrier()

    def _parts(
        self, ranks: Iterable[int], offset: int, like: torch.Tensor, first: int, last: int
    ) -> list[torch.Tensor]:
        """Return a flat view of elements [first, last) of each rank's tensor at `offset`."""
        view, shape = self._memory.view, (like.numel(),)
        return [view(rank, offset, shape, like.dtype)[first:last] for rank in ranks]

    def _has_torch_kernel(self, tensor: torch.Tensor, op: str) -> bool:
        # torch's kernels need signals that torch does not set up with NVSHMEM.
        usable = self._memory.size > 1 and self._memory.backend == "cuda"
        fits = tensor.dtype in _TORCH_DTYPES and tensor.nbytes > 0 and tensor.nbytes % 4 == 0
        return op == "sum" and usable and fits

    def _barrier(self) -> None:
        self._memory.stream_barrier(CHANNELS, f"collective {self.calls}")


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of the parts in rank order.

    16-bit floats are reduced in float32 and rounded once.
    """
    short = parts[0].dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if short else parts[0]
    for part in parts[1:]:
        total = _OPS[op](total, part.float() if short else part)
    if op == "mean":
        total = total / len(parts)
    return total.to(parts[0].dtype)
