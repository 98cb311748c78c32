"""The core's own collectives for a heap: one call into C, without staging for what lies in it."""

import ctypes
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

from tutti.comm.shm import native
from tutti.comm.symmetric.errors import Timeout
from tutti.world.errors import RanksDiffer, UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.shm import ShmMemory

_REMEMBERED = 256  # operations that are kept ready to be called again


class ShmGroup:
    """A group of the core over the ranks of a heap. Made on all ranks together."""

    def __init__(self, memory: "ShmMemory", timeout: float) -> None:
        self._memory = memory
        self._core = core = native.core()
        self._run = core.tutti_run
        self._ready: dict[tuple[int, int, int, int], Any] = {}
        self._group: Any = None
        try:
            self._connect(timeout)
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout: float) -> None:
        memory, core = self._memory, self._core
        exchange = memory.control.exchange
        token = int(exchange(str(secrets.randbits(62)), timeout, "all_reduce")[0])
        name = f"heap {memory.number}"
        self._group = core.tutti_group_create(name.encode(), memory.rank, memory.size, 0, token)
        failure = "" if self._group else str(native.last_error())
        card = [os.getpid(), 0, 0]
        if self._group:
            card[1:] = core.tutti_group_fd(self._group), core.tutti_group_bytes(self._group)
        cards = exchange(json.dumps(card), timeout, "all_reduce")
        for rank, (pid, fd, bytes) in enumerate(map(json.loads, cards)):
            if failure or not bytes or rank == memory.rank:
                continue
            if core.tutti_group_connect(self._group, rank, pid, fd, bytes) != 0:
                failure = str(native.last_error())
        bases = (ctypes.c_void_p * memory.size)(
            *(memory.address(rank, 0) for rank in range(memory.size))
        )
        if not failure and core.tutti_group_add_block(self._group, 1, bases, memory.bytes) != 0:
            failure = str(native.last_error())
        for rank, text in enumerate(exchange(failure, timeout, "all_reduce")):
            if text:
                raise UsageError(f"rank {rank} cannot join the heap's collectives: {text}")

    def all_reduce(
        self, source: int, target: int, bytes: int, dtype: int, op: int, timeout: float
    ) -> None:
        """Reduce `bytes` from one address to another; dtype and op are the core's numbers."""
        key = (source, target, bytes, dtype << 8 | op)
        operation = self._ready.get(key)
        if operation is None:
            if len(self._ready) >= _REMEMBERED:
                self._ready.clear()
            made = native.operation(
                native.ALL_REDUCE,
                ins=[(source, bytes)],
                outs=[(target, bytes)],
                dtype=dtype,
                reduce=op,
            )
            operation = self._ready[key] = ctypes.byref(made)
        code = self._run(self._group, operation, timeout)
        if code != 0:
            self._fail(code)

    def _fail(self, code: int) -> None:
        text = self._core.tutti_error().decode(errors="replace")
        error: Exception
        if code == native.TIMEOUT:
            error = Timeout(text)
        elif code == native.MISMATCH:
            error = RanksDiffer(text)
        else:
            gone = self._memory.control.gone("all_reduce")
            error = gone if gone is not None else native.error_for(code, text)
        self._memory.control.fall_out_of_step(error)
        raise error

    def close(self) -> None:
        """Leave the group; not collective."""
        if self._group:
            self._core.tutti_group_close(self._group)
            self._group = None
