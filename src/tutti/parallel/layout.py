"""Layout: over which axes the ranks of a world are spread, as one frozen value."""

import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.parallel.grid import Grid
    from tutti.world.world import World

# Outermost first. Neighbouring ranks differ in tp, whose messages are in every layer's way; then
# shard, which moves parameters; then dp, once per step; pp sends least, and only to its neighbour.
AXES = ("pp", "dp", "shard", "tp")


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. Written `dp2.shard2.tp2.pp2`; an axis of 1 is left out."""

    dp: int = 1
    """Replicas: each has a copy of the whole model, and a part of the batch."""
    shard: int = 1
    """Ranks that share the parameters of a replica; each still takes a part of the batch."""
    tp: int = 1
    """Ranks that share every layer's matrices, and work on the same samples."""
    pp: int = 1
    """Ranks that hold the layers one after the other, and pass activations on."""

    def __post_init__(self) -> None:
        for axis, ranks in self.axes.items():
            if ranks < 1:
                raise UsageError(f"layout axis {axis} has {ranks} ranks: it needs at least 1")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `dp2.tp2`; a mistake is an error that names the axes there are."""
        known = [field.name for field in fields(cls)]
        axes: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
            if match is None:
                raise UsageError(
                    f"layout {text!r}: {part!r} is not an axis and its number of ranks: "
                    "write dp2.tp2"
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

    @classmethod
    def every(cls, ranks: int) -> list["Layout"]:
        """All layouts of exactly this many ranks: dp first, then with ever more axes."""
        found = []
        for dp in _divisors(ranks):
            for shard in _divisors(ranks // dp):
                for tp in _divisors(ranks // dp // shard):
                    found.append(cls(dp, shard, tp, ranks // dp // shard // tp))
        return sorted(found, key=lambda layout: (len(layout._used), _order(layout)))

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks on each axis, as it is written."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def size(self) -> int:
        """The number of ranks that the layout needs: the product of its axes."""
        return math.prod(self.axes.values())

    @property
    def data_ranks(self) -> int:
        """Into how many parts a batch is cut: ranks that differ in tp or pp get the same part."""
        return self.dp * self.shard

    @property
    def only_replicas(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.size == self.dp

    def check(self, world_size: int) -> None:
        """Raise UsageError, with the equation and the cure, unless the world has this size."""
        if self.size == world_size:
            return
        if world_size < 1:
            raise UsageError(f"--ranks {world_size}: a world has at least one rank")
        factors = [str(ranks) for ranks in self.axes.values() if ranks > 1]
        equation = f"{' × '.join(factors)} = {self.size}" if len(factors) > 1 else f"{self.size}"
        nearest = " or ".join(str(layout) for layout in self.nearest(world_size))
        raise UsageError(
            f"layout {self} needs {equation} rank{'s' * (self.size > 1)}, this world has "
            f"{world_size}: use --ranks {self.size} or {nearest}"
        )

    def nearest(self, world_size: int, count: int = 2) -> list["Layout"]:
        """The layouts of this many ranks that are most like this one: same axes, least change."""
        used = self._used

        def strangeness(other: Layout) -> tuple[int, int, float, tuple[int, ...]]:
            # Heads and layers that tp and pp divide are divided by their divisors too.
            strange = [axis for axis in ("tp", "pp") if self.axes[axis] % other.axes[axis]]
            changed = [abs(math.log2(other.axes[a] / self.axes[a])) for a in self.axes]
            return len(other._used ^ used), len(strange), sum(changed), _order(other)

        ranked = sorted(Layout.every(world_size), key=strangeness)
        # One that uses the same axes is enough; others are for when there is none.
        return ranked[: 1 if ranked[0]._used >= used else count]

    def grid(self, world: "World") -> "Grid":
        """The ranks of a world, arranged by this layout. Call it on every rank."""
        from tutti.parallel.grid import Grid  # torch: a layout can be read and checked without

        self.check(world.size)
        return Grid(self, world)

    @property
    def _used(self) -> set[str]:
        return {axis for axis, ranks in self.axes.items() if ranks > 1}

    def __str__(self) -> str:
        written = [f"{axis}{ranks}" for axis, ranks in self.axes.items() if ranks > 1]
        return ".".join(written) or "dp1"


def layout_of(text: str | None, world_size: int) -> Layout:
    """The layout that was asked for, checked against the world; unset: a replica on each rank."""
    layout = Layout(dp=world_size) if text is None else Layout.parse(text)
    layout.check(world_size)
    return layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _order(layout: Layout) -> tuple[int, ...]:
    """Larger early axes first: dp4, dp2.shard2, …, pp4."""
    return tuple(-ranks for ranks in layout.axes.values())
