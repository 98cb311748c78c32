"""What a profiler sees of operations that Python runs: a span under the name that traces know."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from tutti.comm.shm.call import Call

_recorder: Any = torch.autograd  # torch's own names for what record_function does, with tensors


def here(call: Call) -> AbstractContextManager[object]:
    """Of what runs in this thread."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"shm:{call.name}")


def elsewhere(
    run: Callable[[Call], None], call: Call, group: Any, sequence: int
) -> Callable[[], None]:
    """`run(call)` for another thread, seen by the profiler of this one with sizes and numbers.

    A profiler watches the thread that started it and those that take its state over, which Python
    cannot: the compiled front does it. What the operation is made of inside is not shown.
    """
    from tutti.comm.shm.compiled import compiled_front

    module = compiled_front()[0]
    if module is None or not torch.autograd.profiler._is_profiler_enabled:
        return partial(run, call)
    named = group.getGroupName(), group.getGroupDesc()
    module.show(sequence, *named, call.name, call.inputs, call.outputs, call.root, group.size())
    state, tensors = module.ThreadState(), call.inputs or call.outputs

    def seen() -> None:
        with state:
            span = _recorder._record_function_with_args_enter(f"shm:{call.name}", *tensors)
        try:
            run(call)
        finally:
            with state:
                _recorder._record_function_with_args_exit(span)

    return seen
