"""A torch.distributed process group written in Python, without its operations.

torch hands out such an object in place of the whole process group of all devices. Where the group
was asked for as "cpu:shm,cuda:nccl", CUDA tensors must be served as well: NCCL then works behind
it, started with the first CUDA tensor.
"""

import functools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

from tutti.comm.shm.call import Call
from tutti.comm.shm.works import Finished, Together

_ProcessGroup: Any = dist.ProcessGroup  # its stubs do not allow for subclasses in Python


class TorchGroup(_ProcessGroup):  # type: ignore[misc]
    """What torch asks any group, and how a Call is issued; fronts define `begin`."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, timeout: timedelta):
        super().__init__(rank, size)
        self._store, self._own_rank, self._own_size = store, rank, size
        self._name, self._description = name, "undefined"
        self._timeout = timeout
        self._finished = Finished()
        self._coalesced: deque[Work] | None = None  # what is under way or failed
        self._cuda: Any = None

    @abstractmethod  # checked by the type checker alone: torch's class has a metaclass of its own
    def begin(self, call: Call) -> Work:
        """Run or queue one operation."""

    def seconds(self, call: Call) -> float:
        """The timeout of a call: its own, else the group's."""
        given = call.timeout.total_seconds()
        return given if given >= 0 else self._timeout.total_seconds()

    def _issue(self, call: Call) -> Work:
        if self._coalesced is not None:
            call.asynchronous = True
        work = self.begin(call)
        if self._coalesced is not None:
            # A block that was left by an exception is never ended: do not keep tensors for it.
            while self._coalesced and _is_over(self._coalesced[0]):
                self._coalesced.popleft()
            self._coalesced.append(work)
        return work

    # ---- Several as one ----

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._nccl()._start_coalescing(device)
        else:
            self._coalesced = deque()

    def _end_coalescing(self, device: torch.device) -> Work:
        if device.type == "cuda":
            work: Work = self._nccl()._end_coalescing(device)
            return work
        works, self._coalesced = self._coalesced or (), None
        return Together(list(works))

    # ---- What else torch asks a group ----

    def getBackendName(self) -> str:
        return "shm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def _device_types(self) -> list[torch.device]:
        if self not in distributed_c10d._world.pg_map:
            # By this torch 2.15 knows, while it makes a group, that the group is written in
            # Python: hooks on its calls would ask for a backend that it does not have.
            return []
        types = [torch.device("cpu")]
        return [*types, torch.device("cuda")] if self._cuda else types

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda":
            return self._nccl()._get_backend(device)
        return self

    def _has_hooks(self) -> bool:
        return False

    # ---- CUDA ----

    def _nccl(self) -> Any:
        """The group that serves CUDA tensors; its first use connects, as NCCL always does."""
        if self._cuda is None:
            asked = distributed_c10d._world.pg_backend_config.get(self, "")
            if "cuda:nccl" not in str(asked) or not dist.is_nccl_available():
                # A RuntimeError, by which torch itself learns what a group does not serve.
                raise RuntimeError(
                    f"group {self._name} serves no CUDA tensors: start it with "
                    "backend='cpu:shm,cuda:nccl', with a torch that has NCCL"
                )
            store = dist.PrefixStore("cuda/", self._store)
            group = _ProcessGroup(store, self._own_rank, self._own_size)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            nccl = dist.ProcessGroupNCCL(store, self._own_rank, self._own_size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
            group._set_default_backend(kind)
            group._register_backend(torch.device("cuda"), kind, nccl)
            group._set_group_name(self._name)
            self._cuda = group
        return self._cuda


def _is_over(work: Work) -> bool:
    return bool(work.is_completed() and work.is_success())


def on_cuda_by(name: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Hand calls with CUDA tensors to NCCL's method of this name."""

    def wrap(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def either(self: TorchGroup, *arguments: Any, **named: Any) -> Work:
            if _first_tensor(arguments).is_cuda:
                work: Work = getattr(self._nccl(), name)(*arguments, **named)
                return work
            return method(self, *arguments, **named)

        return either

    return wrap


def _first_tensor(arguments: Sequence[Any]) -> Any:
    for each in arguments:
        if isinstance(each, list | tuple):
            each = _first_tensor(each)
        if isinstance(each, Tensor):
            return each
    return _NONE


_NONE = torch.empty(0)
