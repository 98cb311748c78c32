"""Ranks of the shm core as forked processes without torch, which start in milliseconds."""

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tutti.comm.shm import native
from tutti.comm.shm.native import core

Parts = list[np.ndarray]


class Group:
    """A connected group of the core, with numpy arrays for parts."""

    def __init__(self, handle: int, rank: int, size: int) -> None:
        self.handle, self.rank, self.size = handle, rank, size

    def operation(self, kind: int, ins: Parts, outs: Parts, **settings: Any) -> native.Operation:
        made = native.operation(
            kind,
            ins=[(array.ctypes.data, array.nbytes) for array in ins],
            outs=[(array.ctypes.data, array.nbytes) for array in outs],
            **settings,
        )
        made.arrays = (ins, outs)  # the arrays must live as long as the operation
        return made

    def run(
        self, kind: int, ins: Parts = (), outs: Parts = (), timeout: float = 60, **settings: Any
    ) -> None:
        made = self.operation(kind, list(ins), list(outs), **settings)
        native.raise_for(core().tutti_run(self.handle, ctypes.byref(made), timeout))

    def submit(
        self, kind: int, ins: Parts = (), outs: Parts = (), timeout: float = 60, **settings: Any
    ) -> "Work":
        made = self.operation(kind, list(ins), list(outs), **settings)
        handle = core().tutti_submit(self.handle, ctypes.byref(made), timeout, None, None)
        if not handle:
            raise native.last_error()
        return Work(handle, made)

    def barrier(self) -> None:
        self.run(native.BARRIER)

    def abort(self) -> None:
        core().tutti_group_abort(self.handle)

    def close(self) -> None:
        core().tutti_group_close(self.handle)


class Work:
    def __init__(self, handle: int, keeps: native.Operation) -> None:
        self.handle, self.keeps = handle, keeps

    def wait(self, timeout: float = -1) -> int:
        """Wait until the operation has completed and return the source rank of a recv."""
        code = core().tutti_work_wait(self.handle, timeout)
        if code < 0:
            raise native.error_for(code)
        source: int = core().tutti_work_source(self.handle)
        core().tutti_work_free(self.handle)
        return source


COLLECTIVES = {
    "barrier": native.BARRIER,
    "all_reduce": native.ALL_REDUCE,
    "reduce": native.REDUCE,
    "broadcast": native.BROADCAST,
    "all_gather": native.ALL_GATHER,
    "reduce_scatter": native.REDUCE_SCATTER,
    "gather": native.GATHER,
    "scatter": native.SCATTER,
    "all_to_all": native.ALL_TO_ALL,
}


def call(g: Group, kind: int, count: int, root: int, timeout: float = 30, **settings: str) -> None:
    """Run a collective on newly allocated memory."""
    x, is_root = np.zeros(count, np.float32), g.rank == root
    several = [x.copy() for _ in range(g.size)]
    ins, outs = {
        native.BARRIER: ([], []),
        native.ALL_REDUCE: ([x], [x]),
        native.REDUCE: ([x], [x] if is_root else []),
        native.BROADCAST: ([x], []) if is_root else ([], [x]),
        native.ALL_GATHER: ([x], several),
        native.REDUCE_SCATTER: (several, [x]),
        native.GATHER: ([x], several if is_root else []),
        native.SCATTER: (several if is_root else [], [x]),
        native.ALL_TO_ALL: (several, several),
    }[kind]
    rooted = kind in (native.REDUCE, native.BROADCAST, native.GATHER, native.SCATTER)
    g.run(kind, ins, outs, timeout, dtype=native.F32, root=root if rooted else -1, **settings)


def _be_rank(
    rank: int,
    size: int,
    staging: int,
    pipes: list[tuple[Connection, Connection]],
    answer: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        handle = core().tutti_group_create(b"default", rank, size, staging, 4711)
        if not handle:
            raise native.last_error()
        card = (os.getpid(), core().tutti_group_fd(handle), core().tutti_group_bytes(handle))
        for peer in range(size):
            pipes[peer][1].send((rank, card))
        cards, connected = 0, 0
        while cards < size:
            peer, said = pipes[rank][0].recv()
            if said == "connected":  # may arrive before the card of another rank
                connected += 1
                continue
            cards += 1
            pid, fd, length = said
            if peer != rank:
                native.raise_for(core().tutti_group_connect(handle, peer, pid, fd, length))
        for peer in range(size):  # no rank continues, and perhaps ends, before all are connected
            pipes[peer][1].send((rank, "connected"))
        for _ in range(size - connected):
            pipes[rank][0].recv()
        group = Group(handle, rank, size)
        try:
            answer.send(("result", function(group, *arguments)))
        finally:
            group.close()
    except Exception as error:
        answer.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


def outcomes(
    function: Callable[..., Any], size: int, *arguments: Any, staging: int = 0, timeout: float = 60
) -> list[tuple[str, Any]]:
    """Run `function(group, *arguments)` on every rank: returns ("result", …),
    ("error", (type, text, …)) or ("died", exit code) for each rank."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(size)]
    answers = [fork.Pipe(duplex=False) for _ in range(size)]
    processes = [
        fork.Process(
            target=_be_rank,
            args=(rank, size, staging, pipes, answers[rank][1], function, arguments),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    got: list[tuple[str, Any]] = []
    for process, (reader, writer) in zip(processes, answers, strict=True):
        writer.close()
        try:
            got.append(reader.recv() if reader.poll(timeout) else ("hangs", None))
        except EOFError:
            process.join(timeout)
            got.append(("died", process.exitcode))
    for process in processes:
        process.join(5)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
    for reader, writer in pipes:
        reader.close()
        writer.close()
    for reader, _ in answers:
        reader.close()
    return got


def results(function: Callable[..., Any], size: int, *arguments: Any, **settings: Any) -> list[Any]:
    """Return the result of every rank. A failure on any rank fails the test."""
    got = outcomes(function, size, *arguments, **settings)
    for rank, (how, what) in enumerate(got):
        assert how == "result", f"rank {rank} of {size}: {how}: {what[-1] if what else ''}"
    return [what for _, what in got]


def errors(function: Callable[..., Any], size: int, *arguments: Any) -> list[tuple[str, str]]:
    """Return exception name and text of the ranks that did not die; ("", "") if none was raised."""
    return [
        (what[0], what[1]) if how == "error" else ("", "")
        for how, what in outcomes(function, size, *arguments)
        if how != "died"
    ]
