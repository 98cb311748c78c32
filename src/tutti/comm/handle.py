"""Handle: an operation that has begun and is waited for later."""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from tutti.comm import ledger
from tutti.comm.lateness import failure
from tutti.comm.tags import profiling, span
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.operation import Operation


class Handle:
    """An operation under way. It keeps the operation's tensors alive until it is dropped.

    Wait for it before the result is read or the input is written. What is left to do after the
    transfer (the division of a mean, the copy into a tensor with gaps) is done by the first wait;
    waiting again costs nothing and changes nothing.

    On CUDA waiting does not stop the host: it makes a stream wait, the current one or the one
    given, and `event()` is for streams that should wait by themselves.
    """

    def __init__(self, operation: "Operation", work: Any, number: int) -> None:
        self._operation = operation
        self._work = work
        self._number = number
        self._is_finished = False
        self._in_block = False
        self._event: torch.cuda.Event | None = None

    @property
    def result(self) -> torch.Tensor | None:
        """What the operation returns, waited for; None where this rank gets nothing."""
        return self.wait()

    @property
    def source(self) -> int:
        """Of a receive from any rank: the rank in the group that sent. Waits."""
        self.wait()
        sender = self._operation.root
        return sender if sender >= 0 else int(self._work._source_rank())

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> torch.Tensor | None:
        """Wait for the result and return it; on CUDA `stream`, or the current one, waits."""
        if self._in_block:
            raise UsageError(
                f"{self._operation.kind} at {self._operation.place} is sent when its comm.group() "
                "block ends: wait for it after the block"
            )
        if self._operation.is_on_stream:
            self._wait_on(stream or torch.cuda.current_stream(self._device))
        elif stream is not None:
            raise UsageError("wait(stream=…) is for CUDA tensors: this operation is on the CPU")
        elif not self._is_finished:
            self._finish()
        return self._operation.result

    def is_done(self) -> bool:
        """Whether a wait would return at once; on CUDA, whether the stream has got there."""
        if self._in_block:
            return False
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._is_finished or self._work is None or bool(self._work.is_completed())

    def event(self) -> "torch.cuda.Event":
        """A CUDA event that fires when the result is there; no other stream waits for it yet."""
        if not self._operation.is_on_stream:
            raise UsageError("event() is for CUDA tensors: use wait() on the CPU")
        if self._event is None:
            self._wait_on(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        assert self._event is not None
        return self._event

    @property
    def _device(self) -> torch.device | None:
        tensor = self._operation.tensor
        return None if tensor is None else tensor.device

    def _wait_on(self, stream: "torch.cuda.Stream") -> None:
        if self._event is not None:
            stream.wait_event(self._event)
            self._note_use(stream)
            return
        with torch.cuda.stream(stream):
            self._finish()
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)
        self._note_use(stream)

    def _note_use(self, stream: "torch.cuda.Stream") -> None:
        # The allocator must not give the memory to others while this stream still reads it.
        for tensor in (self._operation.source, self._operation.target, self._operation.result):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _finish(self) -> None:
        operation = self._operation
        ledger.mark(self._number, ledger.WAITING)
        try:
            if self._work is not None:
                if profiling():
                    with span(operation, "wait"):
                        self._work.wait()
                else:
                    self._work.wait()
        except RuntimeError as error:
            raise failure(operation, self._number, error) from error
        if operation.finish is not None:
            operation.finish()
        self._is_finished = True
        ledger.mark(self._number, ledger.STREAMED if operation.is_on_stream else ledger.DONE)

    def __del__(self) -> None:
        # Dropping the handle of an operation in place is common and harmless, unless its end,
        # which only a wait brings about, is missing from the result.
        if not self._is_finished and self._operation.finish is not None and not self._in_block:
            warnings.warn(
                f"the handle of {self._operation} was dropped without a wait: its result is "
                "not complete: keep the handle and call wait()",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "in a block" if self._in_block else "done" if self.is_done() else "under way"
        return f"Handle({self._operation}: {state})"
