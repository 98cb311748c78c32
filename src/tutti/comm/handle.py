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
        self.operation = operation
        self.work = work
        self._number = number
        self._is_finished = False
        self._cannot_wait = ""  # why, while it is in a comm.group() block or after one that failed
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None

    @property
    def result(self) -> torch.Tensor | None:
        """What the operation returns, waited for; None where this rank gets nothing."""
        return self.wait()

    @property
    def source(self) -> int:
        """Of a receive from any rank: the rank in the group that sent. Waits."""
        self.wait()
        sender = self.operation.root
        return sender if sender >= 0 else int(self.work._source_rank())

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> torch.Tensor | None:
        """Wait for the result and return it; on CUDA `stream`, or the current one, waits."""
        if self._cannot_wait:
            call = f"{self.operation.kind} at {self.operation.place}"
            raise UsageError(f"{call} {self._cannot_wait}")
        if self._error is not None:
            raise self._error
        if self.operation.is_on_stream:
            self._wait_on(stream or torch.cuda.current_stream(self._device))
        elif stream is not None:
            raise UsageError("wait(stream=…) is for CUDA tensors: this operation is on the CPU")
        elif not self._is_finished:
            self._finish()
        return self.operation.result

    def is_done(self) -> bool:
        """Whether a wait would return at once; on CUDA, whether the stream has got there."""
        if self._cannot_wait:
            return False
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._is_finished or self.work is None or bool(self.work.is_completed())

    def event(self) -> "torch.cuda.Event":
        """A CUDA event that fires when the result is there; no other stream waits for it yet."""
        if not self.operation.is_on_stream:
            raise UsageError("event() is for CUDA tensors: use wait() on the CPU")
        if self._event is None:
            self._wait_on(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        assert self._event is not None
        return self._event

    def hold(self, reason: str) -> None:
        """Refuse to wait, for this reason: the operation is in a block that has not been sent."""
        self._cannot_wait = reason

    def settle(self, work: Any, event: "torch.cuda.Event | None") -> None:
        """The block has been sent, and the result is there, on CUDA when the event fires."""
        self.work, self._event = work, event
        self._is_finished, self._cannot_wait = True, ""

    @property
    def _device(self) -> torch.device | None:
        tensor = self.operation.tensor
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
        for tensor in (self.operation.source, self.operation.target, self.operation.result):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _finish(self) -> None:
        operation = self.operation
        ledger.mark(self._number, ledger.WAITING)
        try:
            if self.work is not None:
                if profiling():
                    with span(operation, "wait"):
                        self.work.wait()
                else:
                    self.work.wait()
        except RuntimeError as error:
            self._error = failure(operation, self._number, error)
            raise self._error from error
        if operation.finish is not None:
            operation.finish()
        self._is_finished = True
        ledger.mark(self._number, ledger.STREAMED if operation.is_on_stream else ledger.DONE)

    def __del__(self) -> None:
        # Dropping the handle of an operation in place is common and harmless, unless its end,
        # which only a wait brings about, is missing from the result.
        failed = self._error is not None or self._cannot_wait
        if not self._is_finished and self.operation.finish is not None and not failed:
            warnings.warn(
                f"the handle of {self.operation} was dropped without a wait: its result is "
                "not complete: keep the handle and call wait()",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = self._cannot_wait or ("done" if self.is_done() else "under way")
        return f"Handle({self.operation}: {state})"
