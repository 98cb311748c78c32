"""The shm front in Python alone, for a torch that the compiled one was not built for."""

import itertools
import threading
from ctypes import byref, c_void_p, cast
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from tutti.comm.shm import call as kinds
from tutti.comm.shm import native
from tutti.comm.shm.call import Call
from tutti.comm.shm.process_group import PythonGroup
from tutti.comm.shm.seen import here


class PlainGroup(PythonGroup):
    """A group on one host; `group` is the address of the core's, which this owns from now on."""

    def __init__(
        self, group: int, store: dist.Store, rank: int, size: int, name: str, timeout: timedelta
    ) -> None:
        super().__init__(store, rank, size, name, timeout)
        self._core = native.core()
        self.native_group = group
        self._under_way: set[PlainWork] = set()

    def begin(self, call: Call) -> Work:
        if not self.native_group:
            raise native.error_for(
                native.CLOSED,
                f"shm {call.name}: group {self._name} is closed: it was destroyed on this rank",
            )
        with here(call):
            return self._begin(call)

    def _begin(self, call: Call) -> Work:
        operation = call.operation()
        if kinds.where is not None:
            operation.where = kinds.where().encode()
        if call.asynchronous:
            work = PlainWork(self, call)
            work.submit(operation)
            return work
        code = self._core.tutti_run(self.native_group, byref(operation), self.seconds(call))
        if code != 0:
            native.raise_for(code)
        call.copy_back()
        return self._finished

    def abort(self) -> None:
        if self.native_group:
            self._core.tutti_group_abort(self.native_group)
        if self._cuda is not None:
            self._cuda.abort()

    def shutdown(self) -> None:
        """Close once all that is under way has ended, as gloo does."""
        for work in list(self._under_way):
            if work.kind != native.RECV:  # which may never come
                work.over.wait()
        group, self.native_group = self.native_group, 0
        if group:
            self._core.tutti_group_close(group)
        if self._cuda is not None:
            self._cuda.shutdown()


class PlainWork(Work):
    """An asynchronous operation; alive until the core is done with its tensors."""

    def __init__(self, group: PlainGroup, call: Call) -> None:
        super().__init__()
        self._group, self._call = group, call
        self.kind = call.kind
        self._handle: int | None = None
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()
        self.over = threading.Event()

    def submit(self, operation: native.Operation) -> None:
        key = next(_keys)
        _under_way[key] = self
        self._group._under_way.add(self)
        core, seconds = self._group._core, self._group.seconds(self._call)
        group = self._group.native_group
        self._handle = core.tutti_submit(group, byref(operation), seconds, _done, key)
        if not self._handle:
            del _under_way[key]
            self._group._under_way.discard(self)
            raise native.last_error()

    def finish(self, code: int, text: str) -> None:
        """Called once by the core's thread."""
        if code != 0:
            self._error = native.error_for(code, text)
        else:
            try:
                self._call.copy_back()
            except Exception as error:
                self._error = error
        with self._lock:
            self._group._under_way.discard(self)
            self.over.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.over.is_set():
            seconds = timeout.total_seconds() or -1.0
            core = self._group._core
            code = core.tutti_work_wait(self._handle, seconds)
            if code != 0 and not core.tutti_work_is_done(self._handle):
                native.raise_for(code)
            self.over.wait()  # results may still be copied back
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return list(self._call.results)

    def source_rank(self) -> int:
        return int(self._group._core.tutti_work_source(self._handle))

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = Future()
            over = self.over.is_set()
        if over:
            self._complete(self._future)
        return self._future

    def _complete(self, future: Future[Any]) -> None:
        if self._error is None:
            future.set_result(list(self._call.results))
        else:
            future.set_exception(self._error)

    def __del__(self) -> None:
        if self._handle:
            self._group._core.tutti_work_free(self._handle)


_keys = itertools.count(1)
_under_way: dict[int, PlainWork] = {}


def _finish(key: int, code: int, text: bytes | None) -> None:
    _under_way.pop(key).finish(code, (text or b"").decode(errors="replace"))


_kept = native.Done(_finish)  # the core calls it for as long as the process lives
_done = cast(_kept, c_void_p)
