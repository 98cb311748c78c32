"""One thread that works ahead of a loop, by a bounded number of items."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """The items of an iterator, made in a thread and handed out in order.

    At most `depth` items are made ahead. An exception in the thread comes out of the loop where its
    item would have, with the traceback of the thread. `close` ends and joins the thread; the thread
    knows nothing of the loop, so a loop that is abandoned can be collected, and then closes it.
    """

    def __init__(self, items: Iterator[Item], depth: int, name: str) -> None:
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._end: BaseException | None = None  # why no item comes after those that are ready
        self._closed = False
        self._changed = threading.Condition()
        # Daemon: a process that is told to exit in the midst of a loop must not wait for its data.
        self._thread = threading.Thread(target=self._work, args=(items,), name=name, daemon=True)
        self._thread.start()

    def _work(self, items: Iterator[Item]) -> None:
        end: BaseException | None = None
        while end is None:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    break
            try:
                item = next(items)
            except BaseException as error:  # also StopIteration: the loop ends as the iterator did
                end = error
            with self._changed:
                if end is None:
                    self._ready.append(item)
                self._end = end
                self._changed.notify_all()
        close = getattr(items, "close", None)
        if close:  # a generator: its `finally` belongs into the thread that ran it
            close()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready or self._end)
            if self._closed:
                raise RuntimeError("this loop over the data was closed, or another one was begun")
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._end is not None
            raise self._end

    def close(self) -> None:
        """Ends the thread, after the item that it is at, and waits for that."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()
