"""What operations return that need no work of their own: finished ones, and several as one."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future


class Finished(Work):
    """What an operation returns that is over already."""

    def __init__(self, results: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._results = list(results)

    def result(self) -> list[Tensor]:
        return self._results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future


class Together(Work):
    """Several operations as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        begun = time.monotonic()
        for work in self.works:
            work.wait(_left_of(timeout, begun))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def get_future(self) -> Future[Any]:
        if not self.works:
            return Finished().get_future()
        every = torch.futures.collect_all([work.get_future() for work in self.works])
        return every.then(lambda done: [t for each in done.value() for t in each.value()])


def _left_of(limit: timedelta, begun: float) -> timedelta:
    """All parts share one limit. What is left of it is never 0, which would mean none."""
    if limit <= timedelta(0):
        return limit
    passed = timedelta(seconds=time.monotonic() - begun)
    return max(limit - passed, timedelta(milliseconds=1))  # compiled works count milliseconds
