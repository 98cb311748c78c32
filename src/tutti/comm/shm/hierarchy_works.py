"""What operations of a group over several hosts return."""

import threading
from concurrent.futures import Future as Job
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from tutti.comm.shm.call import Call


class TurnWork(Work):
    """An operation that runs, or waits for its turn, on the group's thread."""

    def __init__(self, call: Call, job: Job[None]) -> None:
        super().__init__()
        self._call, self._job = call, job
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._job.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._job.done()

    def is_success(self) -> bool:
        return self._job.done() and self._job.exception() is None

    def exception(self) -> BaseException | None:
        return self._job.exception() if self._job.done() else None

    def result(self) -> list[Tensor]:
        return list(self._call.results)

    def get_future(self) -> Future[Any]:
        if self._future is None:
            future: Future[Any] = Future()
            self._future = future
            self._job.add_done_callback(lambda job: self._complete_elsewhere(future, job))
        return self._future

    def _complete_elsewhere(self, future: Future[Any], job: Job[None]) -> None:
        # What hangs on the future may wait for a later operation: not on the thread that runs them.
        threading.Thread(target=self._complete, args=(future, job), daemon=True).start()

    def _complete(self, future: Future[Any], job: Job[None]) -> None:
        error = job.exception()
        if error is None:
            future.set_result(self.result())
        elif isinstance(error, Exception):
            future.set_exception(error)


class CopyingWork(Work):
    """A message into a dense tensor that stands in for the caller's."""

    def __init__(self, work: Work, call: Call) -> None:
        super().__init__()
        self._work, self._call = work, call
        self._copied = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        if not self._copied:
            self._copied = True
            self._call.copy_back()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._copied  # only a wait copies
