"""Plant a bug in the code under test, for the duration of a context."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def instead(owner: Any, name: str, planted: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `planted(owner.name)` inside the context."""
    original = getattr(owner, name)
    setattr(owner, name, planted(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
