"""The operations of a process group written in Python: torch's many methods, turned into Calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from tutti.comm.shm import native
from tutti.comm.shm.call import REDUCTIONS, Call
from tutti.comm.shm.sparse import sum_sparse
from tutti.comm.shm.torch_group import TorchGroup, on_cuda_by
from tutti.comm.shm.works import Finished, Together

FLAT_BYTES = 1 << 20  # small tensors up to this sum travel as one message


class PythonGroup(TorchGroup):
    """What the plain front and the hierarchical one have in common; they define `begin`."""

    # ---- Collectives ----

    @on_cuda_by("allreduce")
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or AllreduceOptions()
        tensor = _only(tensors, "all_reduce")
        if tensor.is_sparse and tensor.is_cpu:
            return self._allreduce_sparse(tensor, opts)
        call = Call(native.ALL_REDUCE, opts.asyncOp, opts.timeout)
        call.updates(tensor)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    @on_cuda_by("allreduce_coalesced")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or AllreduceCoalescedOptions()
        if not _fits_flat(tensors):
            return Together([self.allreduce([tensor], opts) for tensor in tensors])
        call = Call(native.ALL_REDUCE, opts.asyncOp, opts.timeout)
        with torch.no_grad():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        call.updates(flat)
        pieces = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
        call.stand_ins = list(zip(tensors, pieces, strict=True))
        call.results = list(tensors)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    @on_cuda_by("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or BroadcastOptions()
        tensor = _only(tensors, "broadcast")
        call = Call(native.BROADCAST, opts.asyncOp, opts.timeout, self._root(opts, "broadcast"))
        if call.root == self._own_rank:
            call.reads(tensor)
            call.results.append(tensor)
        else:
            call.writes(tensor)
        return self._issue(call)

    @on_cuda_by("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or ReduceOptions()
        tensor = _only(tensors, "reduce")
        call = Call(native.REDUCE, opts.asyncOp, opts.timeout, self._root(opts, "reduce"))
        if call.root == self._own_rank:
            call.updates(tensor)
        else:
            call.reads(tensor)
            call.results.append(tensor)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    @on_cuda_by("allgather")
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        tensor = _only(inputs, "all_gather")
        call = Call(native.ALL_GATHER, opts.asyncOp, opts.timeout)
        call.reads(tensor)
        for output in self._list(outputs, "all_gather"):
            call.writes(output)
        call.check_place(call.inputs[0], call.outputs[self._own_rank], self._own_rank)
        return self._issue(call)

    @on_cuda_by("_allgather_base")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        call = Call(native.ALL_GATHER, opts.asyncOp, opts.timeout)
        call.reads(tensor)
        call.writes_cut(output, self._own_size)
        call.check_place(call.inputs[0], call.outputs[self._own_rank], self._own_rank)
        return self._issue(call)

    @on_cuda_by("allgather_coalesced")
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        works = [
            self.allgather([[of_rank[i] for of_rank in outputs]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        ]
        return Together(works)

    @on_cuda_by("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return Together([self.all_gather_single(out, tensor, opts) for out, tensor in pairs])

    @on_cuda_by("reduce_scatter")
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        output = _only(outputs, "reduce_scatter")
        call = Call(native.REDUCE_SCATTER, opts.asyncOp, opts.timeout)
        for tensor in self._list(inputs, "reduce_scatter"):
            call.reads(tensor)
        return self._reduce_scatter(call, output, opts)

    @on_cuda_by("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        opts = opts or ReduceScatterOptions()
        call = Call(native.REDUCE_SCATTER, opts.asyncOp, opts.timeout)
        call.reads_cut(tensor, self._own_size)
        return self._reduce_scatter(call, output, opts)

    @on_cuda_by("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return Together([self.reduce_scatter_single(out, each, opts) for out, each in pairs])

    @on_cuda_by("gather")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or GatherOptions()
        tensor = _only(inputs, "gather")
        call = Call(native.GATHER, opts.asyncOp, opts.timeout, self._root(opts, "gather"))
        call.reads(tensor)
        if call.root == self._own_rank:
            for output in self._list(outputs, "gather"):
                call.writes(output)
            call.check_place(call.inputs[0], call.outputs[self._own_rank], self._own_rank)
        return self._issue(call)

    @on_cuda_by("scatter")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or ScatterOptions()
        output = _only(outputs, "scatter")
        call = Call(native.SCATTER, opts.asyncOp, opts.timeout, self._root(opts, "scatter"))
        call.writes(output)
        if call.root == self._own_rank:
            for tensor in self._list(inputs, "scatter"):
                call.reads(tensor)
            call.check_place(call.inputs[self._own_rank], call.outputs[0], self._own_rank)
        return self._issue(call)

    @on_cuda_by("alltoall")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or AllToAllOptions()
        call = Call(native.ALL_TO_ALL, opts.asyncOp, opts.timeout)
        for tensor in self._list([inputs], "all_to_all"):
            call.reads(tensor)
        for output in self._list([outputs], "all_to_all"):
            call.writes(output)
        return self._issue(call)

    @on_cuda_by("alltoall_base")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        call = Call(native.ALL_TO_ALL, opts.asyncOp, opts.timeout)
        call.reads_cut(tensor, self._own_size, input_rows)
        call.writes_cut(output, self._own_size, output_rows)
        return self._issue(call)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or BarrierOptions()
        if opts.device is not None and opts.device.type == "cuda":
            work: Work = self._nccl().barrier(opts)
            return work
        return self._issue(Call(native.BARRIER, opts.asyncOp, opts.timeout))

    # torch 2.11 and 2.12 call these by the names on the left, later ones by those on the right.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- Messages ----

    @on_cuda_by("send")
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        tensor = _only(tensors, "send")
        call = Call(native.SEND, peer=to, tag=tag)
        call.reads(tensor)
        call.dtype = native.BYTES  # may be received as another dtype of the same size
        return self._issue(call)

    @on_cuda_by("recv")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        tensor = _only(tensors, "recv")
        call = Call(native.RECV, peer=source, tag=tag)
        call.writes(tensor)
        call.dtype = native.BYTES
        return self._issue(call)

    @on_cuda_by("recv_anysource")
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    # ---- Inside ----

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        name = REDUCTIONS[int(getattr(opts.reduceOp, "op", opts.reduceOp))]
        if name not in ("SUM", "AVG"):
            raise ValueError("shm all_reduce: sparse tensors can be summed or averaged only")

        def gather(mine: Tensor, outs: list[Tensor]) -> None:
            within = AllgatherOptions()
            within.timeout, within.asyncOp = opts.timeout, False
            self.allgather([outs], [mine], within).wait()

        sum_sparse(tensor, self._own_size, name == "AVG", gather)
        return Finished([tensor])

    def _reduce_scatter(self, call: Call, output: Tensor, opts: Any) -> Work:
        call.writes(output)
        call.check_place(call.inputs[self._own_rank], call.outputs[0], self._own_rank)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    def _root(self, opts: Any, name: str) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self._own_size:
            raise ValueError(
                f"shm {name}: root {root} is not a rank of a group of {self._own_size}"
            )
        return root

    def _list(self, lists: list[list[Tensor]], name: str) -> list[Tensor]:
        if len(lists) != 1 or len(lists[0]) != self._own_size:
            shape = " + ".join(str(len(each)) for each in lists) or "no"
            raise ValueError(f"shm {name}: {shape} tensors for {self._own_size} ranks")
        return lists[0]


def _only(tensors: list[Tensor], name: str) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"shm {name} takes one tensor, got {len(tensors)}")
    return tensors[0]


def _fits_flat(tensors: list[Tensor]) -> bool:
    alike = len({(tensor.dtype, tensor.device.type, tensor.layout) for tensor in tensors}) == 1
    if len(tensors) < 2 or not alike or tensors[0].is_sparse:
        return False
    return sum(tensor.nbytes for tensor in tensors) <= FLAT_BYTES
