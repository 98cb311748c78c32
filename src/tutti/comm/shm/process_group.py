"""A torch.distributed process group written in Python: torch's many methods, turned into Calls.

torch hands out such an object in place of the whole process group of all devices. Where the group
was asked for as "cpu:shm,cuda:nccl", CUDA tensors must be served as well: NCCL then works behind
it, started with the first CUDA tensor.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tutti.comm.shm import native
from tutti.comm.shm.call import Call

Work = dist.distributed_c10d.Work
FLAT_BYTES = 1 << 20  # small tensors up to this sum travel as one message


class Finished(Work):
    """What an operation returns that is over already."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result([])
        return future


class Together(Work):
    """Several operations as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def get_future(self) -> Future[Any]:
        if not self.works:
            return Finished().get_future()
        every = torch.futures.collect_all([work.get_future() for work in self.works])
        return every.then(lambda done: [t for each in done.value() for t in each.value()])


class PythonGroup(dist.ProcessGroup):
    """What the plain front and the hierarchical one have in common; they define `begin`."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, timeout: timedelta):
        super().__init__(rank, size)
        self._store, self._own_rank, self._own_size = store, rank, size
        self._name, self._description = name, "undefined"
        self._timeout = timeout
        self._finished = Finished()
        self._coalesced: list[Work] | None = None
        self._cuda: dist.ProcessGroup | None = None

    def begin(self, call: Call) -> Work:
        """Run or queue one operation."""
        raise NotImplementedError

    def seconds(self, call: Call) -> float:
        """The timeout of a call: its own, else the group's."""
        given = call.timeout.total_seconds()
        return given if given >= 0 else self._timeout.total_seconds()

    # ---- Collectives ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        tensor = _only(tensors, "all_reduce")
        if tensor.is_cuda:
            return self._nccl(tensor).allreduce(tensors, opts)
        call = Call(native.ALL_REDUCE, opts.asyncOp, opts.timeout)
        call.updates(tensor)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        if tensors and tensors[0].is_cuda:
            return self._nccl(tensors[0]).allreduce_coalesced(tensors, opts)
        if not _fits_flat(tensors):
            return self._together([self.allreduce([tensor], opts) for tensor in tensors])
        call = Call(native.ALL_REDUCE, opts.asyncOp, opts.timeout)
        with torch.no_grad():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        call.updates(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        call.stand_ins = list(zip(tensors, pieces, strict=True))
        call.results = list(tensors)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        tensor = _only(tensors, "broadcast")
        if tensor.is_cuda:
            return self._nccl(tensor).broadcast(tensors, opts)
        call = Call(native.BROADCAST, opts.asyncOp, opts.timeout, self._root(opts, "broadcast"))
        if call.root == self._own_rank:
            call.reads(tensor)
            call.results.append(tensor)
        else:
            call.writes(tensor)
        return self._issue(call)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        tensor = _only(tensors, "reduce")
        if tensor.is_cuda:
            return self._nccl(tensor).reduce(tensors, opts)
        call = Call(native.REDUCE, opts.asyncOp, opts.timeout, self._root(opts, "reduce"))
        if call.root == self._own_rank:
            call.updates(tensor)
        else:
            call.reads(tensor)
            call.results.append(tensor)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        opts = opts or dist.AllgatherOptions()
        tensor = _only(inputs, "all_gather")
        if tensor.is_cuda:
            return self._nccl(tensor).allgather(outputs, inputs, opts)
        call = Call(native.ALL_GATHER, opts.asyncOp, opts.timeout)
        call.reads(tensor)
        for output in self._list(outputs, "all_gather"):
            call.writes(output)
        call.check_place(call.inputs[0], call.outputs[self._own_rank], self._own_rank)
        return self._issue(call)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        opts = opts or dist.AllgatherOptions()
        if tensor.is_cuda:
            return self._nccl(tensor)._allgather_base(output, tensor, opts)
        call = Call(native.ALL_GATHER, opts.asyncOp, opts.timeout)
        call.reads(tensor)
        call.writes_cut(output, self._own_size)
        call.check_place(call.inputs[0], call.outputs[self._own_rank], self._own_rank)
        return self._issue(call)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        if inputs and inputs[0].is_cuda:
            opts = opts or dist.AllgatherOptions()
            return self._nccl(inputs[0]).allgather_coalesced(outputs, inputs, opts)
        works = [
            self.allgather([[of_rank[i] for of_rank in outputs]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        ]
        return self._together(works)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        if inputs and inputs[0].is_cuda:
            opts = opts or dist.AllgatherOptions()
            return self._nccl(inputs[0]).allgather_into_tensor_coalesced(outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.all_gather_single(out, tensor, opts) for out, tensor in pairs])

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        output = _only(outputs, "reduce_scatter")
        if output.is_cuda:
            return self._nccl(output).reduce_scatter(outputs, inputs, opts)
        call = Call(native.REDUCE_SCATTER, opts.asyncOp, opts.timeout)
        for tensor in self._list(inputs, "reduce_scatter"):
            call.reads(tensor)
        return self._reduce_scatter(call, output, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        if output.is_cuda:
            return self._nccl(output)._reduce_scatter_base(output, tensor, opts)
        call = Call(native.REDUCE_SCATTER, opts.asyncOp, opts.timeout)
        call.reads_cut(tensor, self._own_size)
        return self._reduce_scatter(call, output, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        if inputs and inputs[0].is_cuda:
            opts = opts or dist.ReduceScatterOptions()
            return self._nccl(inputs[0]).reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.reduce_scatter_single(out, each, opts) for out, each in pairs])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        tensor = _only(inputs, "gather")
        if tensor.is_cuda:
            return self._nccl(tensor).gather(outputs, inputs, opts)
        call = Call(native.GATHER, opts.asyncOp, opts.timeout, self._root(opts, "gather"))
        call.reads(tensor)
        if call.root == self._own_rank:
            for output in self._list(outputs, "gather"):
                call.writes(output)
            call.check_place(call.inputs[0], call.outputs[self._own_rank], self._own_rank)
        return self._issue(call)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        output = _only(outputs, "scatter")
        if output.is_cuda:
            return self._nccl(output).scatter(outputs, inputs, opts)
        call = Call(native.SCATTER, opts.asyncOp, opts.timeout, self._root(opts, "scatter"))
        call.writes(output)
        if call.root == self._own_rank:
            for tensor in self._list(inputs, "scatter"):
                call.reads(tensor)
            call.check_place(call.inputs[self._own_rank], call.outputs[0], self._own_rank)
        return self._issue(call)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllToAllOptions()
        if inputs and inputs[0].is_cuda:
            return self._nccl(inputs[0]).alltoall(outputs, inputs, opts)
        call = Call(native.ALL_TO_ALL, opts.asyncOp, opts.timeout)
        for tensor in self._list([inputs], "all_to_all"):
            call.reads(tensor)
        for output in self._list([outputs], "all_to_all"):
            call.writes(output)
        return self._issue(call)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
    ) -> Work:
        opts = opts or dist.AllToAllOptions()
        if tensor.is_cuda:
            nccl = self._nccl(tensor)
            return nccl.alltoall_base(output, tensor, list(output_rows), list(input_rows), opts)
        call = Call(native.ALL_TO_ALL, opts.asyncOp, opts.timeout)
        call.reads_cut(tensor, self._own_size, input_rows)
        call.writes_cut(output, self._own_size, output_rows)
        return self._issue(call)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._issue(Call(native.BARRIER, opts.asyncOp, opts.timeout))

    # torch 2.11 and 2.12 call these by the names on the left, 2.13 by those on the right.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- Messages ----

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        tensor = _only(tensors, "send")
        if tensor.is_cuda:
            return self._nccl(tensor).send(tensors, to, tag)
        call = Call(native.SEND, peer=to, tag=tag)
        call.reads(tensor)
        call.dtype = native.BYTES  # may be received as another dtype of the same size
        return self._issue(call)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        tensor = _only(tensors, "recv")
        if tensor.is_cuda:
            return self._nccl(tensor).recv(tensors, source, tag)
        call = Call(native.RECV, peer=source, tag=tag)
        call.writes(tensor)
        call.dtype = native.BYTES
        return self._issue(call)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    # ---- Several as one ----

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._nccl(torch.empty(0, device=device))._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        if device.type == "cuda":
            return self._nccl(torch.empty(0, device=device))._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return self._together(works)

    # ---- What else torch asks a group ----

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "shm"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def _device_types(self) -> list[torch.device]:
        types = [torch.device("cpu")]
        return [*types, torch.device("cuda")] if self._cuda else types

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda":
            return self._nccl(torch.empty(0, device=device))._get_backend(device)
        return self

    def _has_hooks(self) -> bool:
        return False

    # ---- Inside ----

    def _issue(self, call: Call) -> Work:
        if self._coalesced is None:
            return self.begin(call)
        call.asynchronous = True
        work = self.begin(call)
        self._coalesced.append(work)
        return work

    def _together(self, works: list[Work]) -> Work:
        return Together(works)

    def _reduce_scatter(self, call: Call, output: Tensor, opts: Any) -> Work:
        call.writes(output)
        call.check_place(call.inputs[self._own_rank], call.outputs[0], self._own_rank)
        call.reduces(opts.reduceOp)
        return self._issue(call)

    def _nccl(self, tensor: Tensor) -> dist.ProcessGroup:
        """The group that serves CUDA tensors; its first use connects, as NCCL always does."""
        if self._cuda is None:
            store = dist.PrefixStore("cuda/", self._store)
            group = dist.ProcessGroup(store, self._own_rank, self._own_size)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            nccl = dist.ProcessGroupNCCL(store, self._own_rank, self._own_size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
            group._set_default_backend(kind)
            group._register_backend(torch.device("cuda"), kind, nccl)
            group._set_group_name(self._name)
            self._cuda = group
        return self._cuda

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
    return len(tensors) > 1 and alike and sum(tensor.nbytes for tensor in tensors) <= FLAT_BYTES
