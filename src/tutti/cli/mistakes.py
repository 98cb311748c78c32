"""A mistake that all ranks have found alike is told once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.world import World


@contextmanager
def told_once(world: "World") -> Iterator[None]:
    """Around what every rank refuses alike: all leave in good order, rank 0 speaks for them."""
    try:
        yield
    except UsageError:
        world.close()
        if world.is_first:
            raise
        raise SystemExit(2) from None
