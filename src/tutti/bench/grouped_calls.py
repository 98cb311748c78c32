"""Several calls of one kind in a comm.group() block: what grouping saves."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tutti import comm
from tutti.bench.attempt import Unsupported
from tutti.bench.case import Buffers, Case, Contender, Prepared
from tutti.bench.torch_calls import TorchBackend

# Each call needs tensors of its own; beyond this, messages are long and a group saves nothing.
_MOST_BYTES = 256 << 20


class Grouped:
    """A backend's operations through tutti.comm, `times` of them in each block."""

    def __init__(self, backend: TorchBackend, times: int, buffers: Buffers) -> None:
        self.name = f"{backend.name} x{times}"
        self.about = f"{times} calls in one comm.group(), the time is that of one of them"
        self._group = backend.group
        self._times = times
        self._buffers = buffers

    def prepare(self, case: Case) -> Prepared:
        """Rows of a matrix are sent and received: what is checked is checked in every row."""
        if case.bytes * self._times > _MOST_BYTES:
            raise Unsupported(
                f"{self._times} messages of {case.bytes} bytes would take more than "
                f"{_MOST_BYTES >> 20} MiB"
            )
        sent, received, calls = self._calls(case)
        return Prepared(sent, received, partial(_block, calls), operations=self._times)

    def _calls(self, case: Case) -> tuple[Tensor, Tensor, list[partial[Any]]]:
        count, every, root = case.count, case.all_shares, case.rank == 0
        group, name, in_place = self._group, case.operation.name, case.placement == "in"
        nothing = torch.empty(0, dtype=case.dtype)
        share = slice(case.rank * count, (case.rank + 1) * count)
        match name:
            case "all_reduce" | "reduce" | "broadcast":
                received = self._rows("received", count, case)
                sent = received if in_place else self._rows("sent", count, case)
                function: Any = getattr(comm, name)
                calls = [
                    partial(function, row, out=None if in_place else into, group=group)
                    for row, into in zip(sent, received, strict=True)
                ]
                sends, receives = root or name != "broadcast", root or name != "reduce"
                return sent if sends else nothing, received if receives else nothing, calls
            case "all_gather" | "gather":
                received = self._rows("received", every, case)
                inside = in_place and (root or name == "all_gather")
                sent = received[:, share] if inside else self._rows("sent", count, case)
                receives = root or name == "all_gather"
                function = getattr(comm, name)
                calls = [
                    partial(function, row, out=into if receives else None, group=group)
                    for row, into in zip(sent, received, strict=True)
                ]
                return sent, received if receives else nothing, calls
            case "reduce_scatter" | "all_to_all":
                sent = self._rows("sent", every, case)
                size = count if name == "reduce_scatter" else every
                received = sent[:, share] if in_place else self._rows("received", size, case)
                function = getattr(comm, name)
                calls = [
                    partial(function, row, out=into, group=group)
                    for row, into in zip(sent, received, strict=True)
                ]
                return sent, received, calls
            case "scatter":
                sent = self._rows("sent", every, case)
                inside = in_place and root
                received = sent[:, share] if inside else self._rows("received", count, case)
                calls = [
                    partial(comm.scatter, row if root else None, out=into, group=group)
                    for row, into in zip(sent, received, strict=True)
                ]
                return sent if root else nothing, received, calls
            case "send_recv":
                sent = self._rows("sent", count, case)
                received = self._rows("received", count, case)
                following, previous = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
                calls = [partial(comm.send, row, following, group=group) for row in sent]
                calls += [partial(comm.recv, row, previous, group=group) for row in received]
                return sent, received, calls
        raise Unsupported(f"comm.group() does not collect {name}")

    def _rows(self, role: str, count: int, case: Case) -> Tensor:
        tensor = self._buffers.take(f"{role}, grouped", count * self._times, case.dtype)
        return tensor.view(self._times, count)


def with_groups(backends: list[Contender], times: int, device: torch.device) -> list[Contender]:
    """Each contender, and after each backend of torch's the same in groups of `times` calls."""
    buffers = Buffers(device)
    result: list[Contender] = []
    for each in backends:
        result.append(each)
        if isinstance(each, TorchBackend):
            result.append(Grouped(each, times, buffers))
    return result


def _block(calls: list[partial[Any]]) -> None:
    with comm.group():
        for call in calls:
            call()
