"""The one place that calls torch's process groups, by the names of torch 2.11 to 2.15.

2.13 renames _allgather_base, _reduce_scatter_base and alltoall_base to all_gather_single,
reduce_scatter_single and all_to_all_single, and warns at the old public functions. The methods of
the process group are called rather than the functions of torch.distributed: these take ranks of
the world where we take ranks of the group, and cost several microseconds a call.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tutti.comm.wire import REDUCTIONS

if TYPE_CHECKING:
    from tutti.comm.operation import Operation

_has_new_names = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _has_new_names else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _has_new_names else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _has_new_names else "alltoall_base"


def issue(operation: "Operation", asynchronous: bool) -> Any:
    """Hand the operation to torch; returns its Work, or None if it is done already."""
    return _CALLS[operation.kind](operation, operation.members.group, asynchronous)


# torch's reductions, under our names.
_TORCH_NAMES = {"mean": "AVG"} | {name: name.upper() for name in REDUCTIONS if name != "mean"}
# Options are read, never written, so that one object serves all calls of a kind.
_made: dict[tuple[str, bool, str, int], Any] = {}
_KINDS: dict[str, Any] = {
    "all_reduce": c10d.AllreduceOptions,
    "reduce": c10d.ReduceOptions,
    "broadcast": c10d.BroadcastOptions,
    "all_gather": c10d.AllgatherOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
    "all_to_all": c10d.AllToAllOptions,
}


def _options(call: "Operation", asynchronous: bool) -> Any:
    key = (call.kind, asynchronous, call.reduction, call.root)
    options = _made.get(key)
    if options is None:
        options = _made[key] = _KINDS[call.kind]()
        if hasattr(options, "asyncOp"):
            options.asyncOp = asynchronous
        if call.reduction:
            options.reduceOp = getattr(dist.ReduceOp, _TORCH_NAMES[call.reduction])
        if call.root >= 0:
            options.rootRank = call.root
    return options


def _all_reduce(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    return group.allreduce([call.target], options)


def _reduce(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    return group.reduce([call.target], options)


def _broadcast(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    return group.broadcast([call.target], options)


def _all_gather(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    return getattr(group, _ALL_GATHER)(call.target, call.source, options)


def _reduce_scatter(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    return getattr(group, _REDUCE_SCATTER)(call.target, call.source, options)


def _gather(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    parts = [] if call.target is None else [_parts(call.target, call.members.size)]
    return group.gather(parts, [call.source], options)


def _scatter(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    parts = [] if call.source is None else [_parts(call.source, call.members.size)]
    return group.scatter([call.target], parts, options)


def _all_to_all(call: "Operation", group: Any, asynchronous: bool) -> Any:
    options = _options(call, asynchronous)
    ins, outs = call.splits or ([], [])
    return getattr(group, _ALL_TO_ALL)(call.target, call.source, outs, ins, options)


def _send(call: "Operation", group: Any, asynchronous: bool) -> Any:
    return group.send([call.source], call.root, call.tag)


def _recv(call: "Operation", group: Any, asynchronous: bool) -> Any:
    if call.root < 0:
        return group.recv_anysource([call.target], call.tag)
    return group.recv([call.target], call.root, call.tag)


def _barrier(call: "Operation", group: Any, asynchronous: bool) -> Any:
    return dist.barrier(group, async_op=asynchronous)


def _parts(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A tensor in `size` equal parts: views along its memory."""
    return list(tensor.view(size, -1).unbind(0))


_CALLS: dict[str, Callable[["Operation", Any, bool], Any]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "recv": _recv,
    "barrier": _barrier,
}
