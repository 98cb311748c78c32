"""torch has one profiler at a time: a program that uses it keeps it.

Like capture.py, this file imports torch and the standard library alone.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler
from torch.profiler import profile as scheduled


class OtherProfilers:
    """Watches, from `begin` to `end`, which profilers the program itself prepares.

    A profiler is torch's from its warm-up on, before it says that it is enabled. `starting` is
    called with each that is about to begin, so that ours can make room. Until then it marks no
    steps: they would be in our trace, beside our own.
    """

    def __init__(self, starting: Callable[[Any], None], is_ours: Callable[[Any], bool]) -> None:
        self._starting, self._is_ours = starting, is_ours
        self._marks_no_steps: Any = None
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """From now on every profiler is seen, ours too."""
        prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

        def seen_prepare(each: Any) -> None:
            self._starting(each)
            self._let_it_mark()
            prepare(each)  # type: ignore[no-untyped-call]
            self._prepared.add(each)

        def seen_leave(each: Any, *error: Any) -> Any:
            self._prepared.discard(each)
            return leave(each, *error)  # type: ignore[no-untyped-call]

        self._wrap(profiler.profile, "_prepare_trace", seen_prepare)
        self._wrap(profiler.profile, "__exit__", seen_leave)
        for name in ("start", "step"):
            self._wrap(scheduled, name, self._unmarked(getattr(scheduled, name)))

    def end(self) -> None:
        """torch is as it was before. Safe to call again."""
        while self._undo:
            self._undo.pop()()

    def any(self) -> bool:
        """Whether one is at work, or warming up; to be asked before ours is."""
        return bool(self._prepared) or profiler._is_profiler_enabled

    def _unmarked(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        """`call`, but a profiler that is idle marks no step in it."""

        def seen_call(each: Any) -> None:
            idle = getattr(each, "profiler", None) not in self._prepared
            if self._is_ours(each) or not idle or not each.record_steps:
                call(each)
                return
            self._marks_no_steps, each.record_steps = each, False
            try:
                call(each)
            finally:
                self._let_it_mark()

        return seen_call

    def _let_it_mark(self) -> None:
        if self._marks_no_steps is not None:
            self._marks_no_steps.record_steps, self._marks_no_steps = True, None

    def _wrap(self, owner: type, name: str, seen: Callable[..., Any]) -> None:
        given = getattr(owner, name)
        setattr(owner, name, seen)
        self._undo.append(lambda: setattr(owner, name, given))
