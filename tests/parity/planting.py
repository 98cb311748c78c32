"""A fault planted for a while in the code that a check must see through."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def instead(owner: Any, name: str, planted: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `owner.name` is what `planted` makes of the healthy one."""
    healthy = getattr(owner, name)
    setattr(owner, name, planted(healthy))
    try:
        yield
    finally:
        setattr(owner, name, healthy)
