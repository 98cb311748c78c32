"""Layout: over which axes the ranks of a world are spread, as one frozen value."""

import re
from dataclasses import dataclass, fields, replace

from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. Written `dp4`; the fields are the axes that exist."""

    dp: int = 1
    """Replicas: every rank holds the whole model and a part of the batch."""

    def __post_init__(self) -> None:
        for axis, ranks in self.axes.items():
            if ranks < 1:
                raise UsageError(f"layout axis {axis} has {ranks} ranks: it needs at least 1")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `dp4`; a mistake is an error that names the axes there are."""
        known = [field.name for field in fields(cls)]
        axes: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
            if match is None:
                raise UsageError(
                    f"layout {text!r}: {part!r} is not an axis and its number of ranks: write dp4"
                )
            axis, ranks = match[1], int(match[2])
            if axis not in known:
                raise UsageError(
                    f"layout {text!r}: there is no axis {axis!r}: use {', '.join(known)}"
                )
            if axis in axes:
                raise UsageError(f"layout {text!r} names the axis {axis} twice: write it once")
            axes[axis] = ranks
        return cls(**axes)

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks on each axis, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def size(self) -> int:
        """The number of ranks that the layout needs: the product of its axes."""
        size = 1
        for ranks in self.axes.values():
            size *= ranks
        return size

    def check(self, world_size: int) -> None:
        """Raise UsageError, with the equation and the cure, unless the world has this size."""
        if self.size == world_size:
            return
        factors = [str(ranks) for ranks in self.axes.values() if ranks > 1]
        equation = f"{' × '.join(factors)} = {self.size}" if len(factors) > 1 else f"{self.size}"
        raise UsageError(
            f"layout {self} needs {equation} rank{'s' * (self.size > 1)}, this world has "
            f"{world_size}: use --ranks {self.size} or {replace(self, dp=world_size)}"
        )

    def __str__(self) -> str:
        written = [f"{axis}{ranks}" for axis, ranks in self.axes.items() if ranks > 1]
        return ".".join(written) or "dp1"
