"""One call of a collective: what it moves, and the steps that all of them take."""

import sys
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from tutti.comm import agreement, ledger
from tutti.comm.handle import Handle
from tutti.comm.lateness import failure
from tutti.comm.members import Members
from tutti.comm.routes import carrier
from tutti.comm.tags import profiling, span
from tutti.comm.torch_calls import issue
from tutti.comm.wire import Finish

_KIND_NUMBERS = {kind: number for number, kind in enumerate(ledger.KINDS)}


class Operation:
    """A call: kind, group and tensors as they travel, and what is left to do at the end.

    source and target are in wire form (contiguous, in a dtype that every backend knows); `tensor`
    is what the caller gave, `result` what the caller gets, and `finish` turns the one's wire form
    into the other once the operation is done.
    """

    op = ""  # the reduction that was asked for; `reduction` is what makes it on the wire
    tag = 0
    splits: tuple[list[int], list[int]] | None = None  # all_to_all: elements to and from each
    sequence = 0
    site = line = 0  # where the call is in the user's code, as the ledger numbers it

    def __init__(
        self,
        kind: str,
        members: Members,
        tensor: torch.Tensor | None,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        result: torch.Tensor | None,
        size: int,
        reduction: str = "",
        root: int = -1,
        finish: Finish | None = None,
    ) -> None:
        self.kind = kind
        self.dtype = None if tensor is None else tensor.dtype
        self.members = members
        self.tensor = tensor
        self.source = source
        self.target = target
        self.result = result
        self.bytes = size
        self.reduction = reduction
        self.root = root
        self.finish = finish

    @property
    def is_message(self) -> bool:
        """Whether it concerns two ranks only."""
        return self.kind in ("send", "recv")

    @property
    def is_on_stream(self) -> bool:
        """Whether a CUDA stream carries it out: the host goes on before it is done."""
        return self.tensor is not None and self.tensor.is_cuda

    @property
    def dtype_name(self) -> str:
        """Such as float32; empty for a barrier."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def place(self) -> str:
        """Where the call is in the user's code: `train.py:88 in step`."""
        return ledger.site_text(self.site, self.line)

    def __str__(self) -> str:
        about = [f"to {self.root}" if self.kind == "send" else ""]
        about += [f"from {self.root}" if self.kind == "recv" else ""]
        about += [self.op, self.dtype_name, f"{self.bytes} bytes"]
        words = ", ".join(word for word in about if word)
        return f"{self.kind} {self.sequence} of group {self.members.label} ({words})"


class Block(Protocol):
    """What collects operations instead of sending them (grouping.py)."""

    def add(self, operation: Operation, wait: bool) -> Any: ...


# The block of `with comm.group()` that this thread is in.
current_block: ContextVar[Block | None] = ContextVar("current_block", default=None)


def perform(operation: Operation, wait: bool) -> Any:
    """Send the operation, now or with the block it is in; returns its result, or its Handle."""
    operation.site, operation.line = ledger.caller(sys._getframe(2))
    block = current_block.get()
    if block is not None:
        return block.add(operation, wait)
    if agreement.enabled:
        agreement.check([operation])
    return send_off(operation, wait)


def send_off(operation: Operation, wait: bool) -> Any:
    """Enter the operation in the ledger, hand it to torch and, if asked, wait for it."""
    number = enter(operation, ledger.WAITING if wait else ledger.BEGUN)
    is_streamed = operation.is_on_stream
    send = carrier(operation) if is_streamed and wait else issue
    try:
        if profiling():
            with span(operation, "run" if wait else "issue"):
                work = send(operation, not wait)
                if wait and work is not None:
                    work.wait()
        else:
            work = send(operation, not wait)
            if wait and work is not None:
                work.wait()
    except RuntimeError as error:
        raise failure(operation, number, error) from error
    except Exception:
        ledger.mark(number, ledger.FAILED)
        raise
    if not wait:
        return Handle(operation, work, number)
    if operation.finish is not None:
        operation.finish()
    ledger.mark(number, ledger.STREAMED if is_streamed else ledger.DONE)
    return operation.result


def enter(operation: Operation, state: int) -> int:
    """Count the operation and write it into the ledger; returns its number there."""
    members, kind = operation.members, _KIND_NUMBERS[operation.kind]
    if kind < 9:
        members.sequence = operation.sequence = members.sequence + 1
    else:
        members.messages = operation.sequence = members.messages + 1
    # fmt: off
    return ledger.begin(kind, members.book, operation.sequence, operation.bytes, operation.dtype,
                        operation.root, operation.site, operation.line, state)
    # fmt: on
