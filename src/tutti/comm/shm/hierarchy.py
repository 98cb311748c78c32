"""One group over several hosts: shared memory inside each host, gloo between them.

The first rank of each host is its leader. A reduction is done on every host, then between the
leaders, then handed out on every host, so that each byte crosses the network once per host, not
once per rank. All ranks hold the same bits, since only one result is ever handed out.

gather, scatter and all_to_all move each byte to one rank only: they go over gloo directly, as one
uneven all-to-all. A message goes through shared memory where both ranks are on one host.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
    Work,
)

from tutti.comm.shm import native
from tutti.comm.shm.call import REDUCTIONS, Call
from tutti.comm.shm.hierarchy_works import CopyingWork, TurnWork
from tutti.comm.shm.meeting import Meeting
from tutti.comm.shm.process_group import PythonGroup
from tutti.comm.shm.seen import elsewhere, here

# gloo cannot reduce these two: they travel as something wider, or as bytes.
_ODD = {torch.int16: torch.int32, torch.bool: torch.uint8}
_BOOL = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "BAND": "MIN"}


class HierarchicalGroup(PythonGroup):
    """Ranks of several hosts; `local` is the process group (or backend) of this host's."""

    def __init__(
        self,
        meeting: Meeting,
        local: Any,
        name: str,
        timeout: timedelta,
    ) -> None:
        size, store = len(meeting.names), meeting.store
        super().__init__(store, meeting.rank, size, name, timeout)
        self._hosts, self._host = meeting.hosts, meeting.host
        self._neighbours = meeting.neighbours
        self._local = local
        self._local_rank = self._neighbours.index(meeting.rank)
        self._leads = self._local_rank == 0
        self._all: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("all/", store), meeting.rank, size, timeout
        )
        self._leaders: Any = None
        if self._leads:
            self._leaders = dist.ProcessGroupGloo(
                dist.PrefixStore("leaders/", store), self._host, len(self._hosts), timeout
            )
        self._limit = timeout  # of the operation that runs now
        self._sequence = 0  # of collectives, as they were called: the same on all ranks
        # Collectives of a group run one after another, in the order of their calls.
        self._turns = ThreadPoolExecutor(1, thread_name_prefix=f"shm-{name}")

    @property
    def hosts(self) -> int:
        """Over how many hosts the ranks are spread."""
        return len(self._hosts)

    def begin(self, call: Call) -> Work:
        if call.kind in (native.SEND, native.RECV):
            with here(call):
                return self._message(call)
        self._sequence += 1
        run = elsewhere(self._run, call, self, self._sequence)
        work = TurnWork(call, self._turns.submit(run))
        if not call.asynchronous:
            work.wait()
        return work

    def abort(self) -> None:
        self._local.abort()
        for gloo in (self._all, self._leaders):
            if gloo is not None:
                gloo.abort()
        if self._cuda is not None:
            self._cuda.abort()

    def shutdown(self) -> None:
        self._turns.shutdown(wait=True)
        self._local.shutdown()
        for gloo in (self._all, self._leaders):
            if gloo is not None:
                gloo.shutdown()
        if self._cuda is not None:
            self._cuda.shutdown()

    def _run(self, call: Call) -> None:
        run: dict[int, Callable[[Call], None]] = {
            native.BARRIER: self._barrier,
            native.ALL_REDUCE: self._all_reduce,
            native.REDUCE: self._reduce,
            native.BROADCAST: self._broadcast,
            native.ALL_GATHER: self._all_gather,
            native.REDUCE_SCATTER: self._reduce_scatter_parts,
            native.GATHER: self._exchange,
            native.SCATTER: self._exchange,
            native.ALL_TO_ALL: self._exchange,
        }
        self._limit = timedelta(seconds=self.seconds(call))
        with torch.no_grad():
            run[call.kind](call)
            call.copy_back()

    # ---- In three steps: on the host, between leaders, on the host ----

    def _barrier(self, call: Call) -> None:
        self._local_barrier()
        if self._leaders is not None:
            self._leaders.barrier(self._within(BarrierOptions())).wait()
        self._local_barrier()

    def _all_reduce(self, call: Call) -> None:
        tensor = _real(call.outputs[0])
        self._local_reduce(tensor, call.reduce)
        if self._leaders is not None:
            self._reduce_between(tensor, call.reduce)
        self._local_broadcast(tensor, 0)

    def _reduce(self, call: Call) -> None:
        source = _real(call.inputs[0])
        at_root = call.root == self._own_rank
        # Only the root's tensor may change.
        tensor = source if at_root else source.clone()
        self._local_reduce(tensor, call.reduce)
        if self._leaders is not None:
            self._reduce_between(tensor, call.reduce)
        host, place = self._place_of(call.root)
        if host == self._host and place != 0:
            self._local_broadcast(tensor, 0)

    def _broadcast(self, call: Call) -> None:
        tensor = _bytes((call.inputs or call.outputs)[0])
        host, place = self._place_of(call.root)
        if host == self._host and place != 0:
            self._local_broadcast(tensor, place)
        if self._leaders is not None:
            opts = self._within(BroadcastOptions())
            opts.rootRank = host
            self._leaders.broadcast([tensor], opts).wait()
        if host != self._host or place == 0:
            self._local_broadcast(tensor, 0)

    def _all_gather(self, call: Call) -> None:
        sizes = [part.nbytes for part in call.outputs]
        blocks = [sum(sizes[rank] for rank in ranks) for ranks in self._hosts]
        flat = torch.empty(sum(blocks), dtype=torch.uint8)  # by host, then by rank on the host
        mine = _cut(flat, blocks)[self._host]
        pieces = _cut(mine, [sizes[rank] for rank in self._neighbours])
        self._local_gather(_bytes(call.inputs[0]), pieces)
        if self._leaders is not None:
            width = max(blocks)  # gloo gathers equal parts only
            padded = [torch.empty(width, dtype=torch.uint8) for _ in self._hosts]
            sent = torch.empty(width, dtype=torch.uint8)
            sent[: len(mine)] = mine
            opts = self._within(AllgatherOptions())
            self._leaders.allgather([padded], [sent], opts).wait()
            for block, got in zip(_cut(flat, blocks), padded, strict=True):
                block.copy_(got[: len(block)])
        self._local_broadcast(flat, 0)
        order = [rank for ranks in self._hosts for rank in ranks]
        for rank, piece in zip(order, _cut(flat, [sizes[r] for r in order]), strict=True):
            _bytes(call.outputs[rank]).copy_(piece)

    def _reduce_scatter_parts(self, call: Call) -> None:
        parts = [_real(part).reshape(-1) for part in call.inputs]
        flat = torch.cat(parts)
        self._local_reduce(flat, call.reduce)
        if self._leaders is not None:
            self._reduce_between(flat, call.reduce)
        pieces = _cut(flat, [len(part) for part in parts])
        own = _real(call.outputs[0]).view(-1)
        opts = self._within(ScatterOptions())
        opts.asyncOp = False
        given = [[pieces[rank].contiguous() for rank in self._neighbours]] if self._leads else []
        self._local.scatter([own], given, opts)

    # ---- Each byte to one rank ----

    def _exchange(self, call: Call) -> None:
        size, rank = self._own_size, self._own_rank
        nothing = torch.empty(0, dtype=torch.uint8)
        to, back = [nothing] * size, [nothing] * size
        if call.kind == native.ALL_TO_ALL:
            to, back = list(map(_bytes, call.inputs)), list(map(_bytes, call.outputs))
        elif call.kind == native.GATHER:
            to[call.root] = _bytes(call.inputs[0])
            back = list(map(_bytes, call.outputs)) if rank == call.root else back
        else:
            to = list(map(_bytes, call.inputs)) if rank == call.root else to
            back[call.root] = _bytes(call.outputs[0])
        sent = torch.cat(to)
        got = torch.empty(sum(map(len, back)), dtype=torch.uint8)
        opts = self._within(AllToAllOptions())
        self._all.alltoall_base(got, sent, list(map(len, back)), list(map(len, to)), opts).wait()
        for part, piece in zip(back, _cut(got, list(map(len, back))), strict=True):
            part.copy_(piece)

    def _message(self, call: Call) -> Work:
        if call.peer < 0:
            raise ValueError(
                "recv from any rank is not offered by a group over several hosts, where messages "
                "come by shared memory and by network: name the source"
            )
        group, peer = self._all, call.peer
        if call.peer in self._neighbours:
            group, peer = self._local, self._neighbours.index(call.peer)
        if call.kind == native.SEND:
            sent: Work = group.send([call.inputs[0]], peer, call.tag)
            return sent
        work: Work = group.recv([call.outputs[0]], peer, call.tag)
        return CopyingWork(work, call) if call.stand_ins else work

    # ---- Steps ----

    def _local_barrier(self) -> None:
        opts = self._within(BarrierOptions())
        opts.asyncOp = False
        self._local.barrier(opts)

    def _local_reduce(self, tensor: Tensor, reduce: int) -> None:
        opts = self._within(ReduceOptions())
        # The mean is one division by the size of the whole group, at the end.
        opts.reduceOp = _op("SUM" if REDUCTIONS[reduce] == "AVG" else REDUCTIONS[reduce])
        opts.asyncOp = False
        self._local.reduce([tensor], opts)

    def _local_broadcast(self, tensor: Tensor, root: int) -> None:
        opts = self._within(BroadcastOptions())
        opts.rootRank, opts.asyncOp = root, False
        self._local.broadcast([tensor], opts)

    def _local_gather(self, tensor: Tensor, pieces: list[Tensor]) -> None:
        opts = self._within(GatherOptions())
        opts.asyncOp = False
        self._local.gather([pieces] if self._leads else [], [tensor], opts)

    def _reduce_between(self, tensor: Tensor, reduce: int) -> None:
        """Leaders only: reduce in place over the hosts."""
        name = REDUCTIONS[reduce]
        mean = name == "AVG"
        opts = self._within(AllreduceOptions())
        carried = tensor
        if tensor.dtype in _ODD:
            carried = tensor.to(_ODD[tensor.dtype])
            if tensor.dtype == torch.bool:
                name = _BOOL.get(name, name)
        opts.reduceOp = _op("SUM" if mean else name)
        self._leaders.allreduce([carried], opts).wait()
        if mean:
            if not carried.is_floating_point():
                raise TypeError(f"AVG of {tensor.dtype}: the mean of integers is not one: use SUM")
            carried.div_(self._own_size)
        if carried is not tensor:
            tensor.copy_(carried)

    def _within(self, opts: Any) -> Any:
        opts.timeout = self._limit
        return opts

    def _place_of(self, rank: int) -> tuple[int, int]:
        host = next(i for i, ranks in enumerate(self._hosts) if rank in ranks)
        return host, self._hosts[host].index(rank)


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name)


def _cut(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(torch.split_with_sizes(tensor, sizes))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, flat, without its type."""
    return tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8)
