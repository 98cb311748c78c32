"""torch has one profiler at a time: a program that uses it keeps it.

Like capture.py, this file imports torch and the standard library alone.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler


class OtherProfilers:
    """Watches, from `begin` to `end`, which profilers the program itself prepares.

    A profiler is torch's from its warm-up on, before it says that it is enabled. `starting` is
    called with each that is about to begin, so that ours can make room.
    """

    def __init__(self, starting: Callable[[Any], None]) -> None:
        self._starting = starting
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """From now on every profiler is seen, ours too."""
        prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

        def seen_prepare(each: Any) -> None:
            self._starting(each)
            prepare(each)  # type: ignore[no-untyped-call]
            self._prepared.add(each)

        def seen_leave(each: Any, *error: Any) -> Any:
            self._prepared.discard(each)
            return leave(each, *error)  # type: ignore[no-untyped-call]

        self._wrap("_prepare_trace", seen_prepare, prepare)
        self._wrap("__exit__", seen_leave, leave)

    def end(self) -> None:
        """torch is as it was before. Safe to call again."""
        while self._undo:
            self._undo.pop()()

    def any(self) -> bool:
        """Whether one is at work, or warming up; to be asked before ours is."""
        return bool(self._prepared) or profiler._is_profiler_enabled

    def _wrap(self, name: str, seen: Callable[..., Any], given: Callable[..., Any]) -> None:
        setattr(profiler.profile, name, seen)
        self._undo.append(lambda: setattr(profiler.profile, name, given))
