"""Layout: how many ranks each axis has, and the options of every technique.

This file does not import torch, because command lines are built from these dataclasses and layouts
are checked before torch is needed.
"""

import math
import re
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Literal

from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.parallel.mesh import Mesh
    from tutti.world.world import World

EngineName = Literal["single", "dataparallel", "scratch", "ddp"]
Compression = Literal["none", "bf16", "fp16", "powersgd"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
Recompute = Literal["none", "selective", "full"]

# Outermost axis first, ordered by the amount of communication. Adjacent ranks differ in tp, which
# communicates in every layer. shard gathers parameters once per block. dp communicates once per
# step. pp sends the least data, and only to a neighbouring stage.
AXES = ("pp", "dp", "shard", "tp")


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. Written as `dp2.shard2.tp2.pp2`, without axes of 1 rank."""

    dp: int = 1
    """Replicas: each holds a copy of the model and computes a part of the batch."""
    shard: int = 1
    """Ranks that hold one shard each of a replica's parameters, and a part of the batch."""
    tp: int = 1
    """Ranks that hold one part each of every layer's matrices, and work on the same samples."""
    pp: int = 1
    """Ranks that hold consecutive layers, and send activations to the next rank."""

    def __post_init__(self) -> None:
        for axis, ranks in self.axes.items():
            if ranks < 1:
                raise UsageError(f"layout axis {axis} has {ranks} ranks: it needs at least 1")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse a layout such as `dp2.tp2`; raises UsageError if it is not valid."""
        known = [field.name for field in fields(cls)]
        axes: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
            if match is None:
                raise UsageError(
                    f"layout {text!r}: {part!r} is not an axis and its number of ranks: "
                    "write dp2.tp2"
                )
            axis = match[1]
            if axis not in known:
                raise UsageError(
                    f"layout {text!r}: there is no axis {axis!r}: use {', '.join(known)}"
                )
            if axis in axes:
                raise UsageError(f"layout {text!r} names the axis {axis} twice: write it once")
            axes[axis] = int(match[2])
        return cls(**axes)

    @classmethod
    def every(cls, ranks: int) -> list["Layout"]:
        """All layouts of exactly this many ranks, sorted by the number of axes they use."""
        divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
        shapes = [shape for shape in product(divisors, repeat=4) if math.prod(shape) == ranks]
        layouts = [cls(*shape) for shape in shapes]
        return sorted(layouts, key=lambda layout: (len(layout._used), _order(layout)))

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks on each axis, in the order in which a layout is written."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def size(self) -> int:
        """The number of ranks that the layout needs: the product of its axes."""
        return math.prod(self.axes.values())

    @property
    def data_ranks(self) -> int:
        """The number of parts of a batch. Ranks that differ only in tp or pp share a part."""
        return self.dp * self.shard

    @property
    def only_replicas(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.size == self.dp

    def check(self, world_size: int) -> None:
        """Raise UsageError unless the layout has as many ranks as the world.

        The message suggests layouts with the right number of ranks.
        """
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
        """The most similar layouts with `world_size` ranks, which change the fewest axes least."""

        def distance(other: Layout) -> tuple[int, int, float, tuple[int, ...]]:
            # If tp divides the heads of a model, so does every divisor of tp; other numbers may
            # not divide them. The same holds for pp and layers.
            risky = [axis for axis in ("tp", "pp") if self.axes[axis] % other.axes[axis]]
            changed = [abs(math.log2(other.axes[a] / self.axes[a])) for a in self.axes]
            return len(other._used ^ self._used), len(risky), sum(changed), _order(other)

        ranked = sorted(Layout.every(world_size), key=distance)
        # One layout with the same axes is enough; offer several only if there is none.
        return ranked[: 1 if ranked[0]._used >= self._used else count]

    def mesh(self, world: "World") -> "Mesh":
        """The ranks of the world arranged by this layout. Call it on every rank."""
        from tutti.parallel.mesh import Mesh  # imports torch

        return Mesh(self, world)

    @property
    def _used(self) -> set[str]:
        return {axis for axis, ranks in self.axes.items() if ranks > 1}

    def __str__(self) -> str:
        written = [f"{axis}{ranks}" for axis, ranks in self.axes.items() if ranks > 1]
        return ".".join(written) or "dp1"


def layout_of(text: str | None, world_size: int) -> Layout:
    """The layout that `text` describes; if `text` is None, one replica per rank.

    Raises UsageError if the layout does not have `world_size` ranks.
    """
    layout = Layout(dp=world_size) if text is None else Layout.parse(text)
    layout.check(world_size)
    return layout


def _order(layout: Layout) -> tuple[int, ...]:
    """A sort key that places layouts with larger first axes first: dp4, dp2.shard2, …, pp4."""
    return tuple(-ranks for ranks in layout.axes.values())


@dataclass(frozen=True)
class EngineOptions:
    """How gradients are synchronised between the replicas of a model."""

    engine: EngineName = "ddp"
    """How replicas are synchronised: torch DDP (ddp), not at all (single); for teaching: one
    process with many devices (dataparallel), plain collectives after backward (scratch)."""
    bucket_mb: float = 25.0
    """ddp: bucket size in MiB: small buckets start early, large ones use the bandwidth better."""
    overlap: bool = True
    """ddp: all-reduce during backward, or only after it (the baseline)."""
    gradient_as_bucket_view: bool = True
    """ddp: gradients are views into the buckets, which saves one copy of the gradients."""
    static_graph: bool = False
    """ddp: every step uses the same parameters in the same order."""
    find_unused: bool = False
    """ddp, scratch: allow parameters without a gradient in a step, at the cost of a search."""
    compress: Compression = "none"
    """ddp: send gradients as bf16 or fp16 (half the bytes), or as low-rank factors (powersgd).
    fp16 flushes gradients below 6e-8 to zero unless the loss is scaled; bf16 does not."""
    powersgd_rank: int = 2
    """ddp with --compress powersgd: the rank of the factors; a higher rank has a lower error."""
    scratch_reduce: Literal["each", "grouped"] = "grouped"
    """scratch: one all-reduce per gradient, or one for all gradients."""
    sync_batchnorm: bool = False
    """Batch norms compute their statistics over the microbatches of all data ranks."""

    def __post_init__(self) -> None:
        if self.bucket_mb <= 0:
            raise UsageError(f"--bucket-mb is {self.bucket_mb:g}: it must be above 0, such as 25")
        if self.powersgd_rank < 1:
            raise UsageError(f"--powersgd-rank is {self.powersgd_rank}: it must be at least 1")
        for field in fields(self):
            engines, value = _ENGINES_OF.get(field.name, ("ddp",)), getattr(self, field.name)
            if field.name != "engine" and self.engine not in engines and value != field.default:
                raise UsageError(
                    f"{flag_of(field.name, value)} does nothing with --engine {self.engine}: "
                    f"leave it out or use --engine {' or '.join(engines)}"
                )
        if self.compress != "none" and not self.overlap:
            raise UsageError(
                f"--compress {self.compress} contradicts --no-overlap: DDP compresses buckets "
                "during backward: leave one of the two out"
            )
        if self.static_graph and not self.overlap:
            raise UsageError(
                "--static-graph contradicts --no-overlap: it schedules the overlap: leave one of "
                "the two out"
            )
        if self.static_graph and self.find_unused:
            raise UsageError(
                "--static-graph contradicts --find-unused: a static graph finds the unused "
                "parameters in its first step and promises that they stay the same: leave one out"
            )
        if self.powersgd_rank != 2 and self.compress != "powersgd":
            raise UsageError(
                f"--powersgd-rank {self.powersgd_rank} does nothing with --compress "
                f"{self.compress}: leave it out or use --compress powersgd"
            )


@dataclass(frozen=True)
class ParallelOptions:
    """How a model is distributed over ranks."""

    layout: str | None = None
    """Ranks per axis, such as dp2.shard2.tp2.pp2: replicas, parameter shards (FSDP2), tensor
    parallelism, pipeline stages. Unset: one replica per rank."""
    reshard: bool | None = None
    """shard: free gathered parameters after forward and gather them again for backward, or keep
    them until backward has ended. Unset: free them, except in a pipeline, which reuses them for
    every microbatch."""
    prefetch: int = 1
    """shard: how many blocks ahead parameters are gathered; 0: when the block starts."""
    gather_dtype: Literal["float32", "bf16"] | None = None
    """shard: dtype in which blocks gather their parameters and compute. Unset: bf16 with
    --precision bf16 (for models without batch norms), else the dtype of the parameters."""
    reduce_dtype: Literal["float32", "bf16"] | None = None
    """shard: dtype in which gradients are summed. Unset: that of --gather-dtype if given, else the
    dtype of the parameters."""
    sequence_parallel: bool = True
    """tp: between the split layers, activations are split along the sequence."""
    loss_parallel: bool = True
    """tp: compute the loss on logits that are split along the vocabulary."""
    async_tp: bool = False
    """tp: overlap matrix products with their communication (CUDA, with --compile)."""
    pipeline_schedule: ScheduleName = "1f1b"
    """pp: order of forwards and backwards: gpipe, 1f1b, interleaved (1f1b with several stages per
    rank), zero-bubble (interleaved; weight gradients fill the bubbles), zbv (V-shaped)."""
    stages_per_rank: int | None = None
    """pp: stages per rank. Unset: 1 for gpipe and 1f1b, 2 for the others."""
    balance: Literal["counted", "measured", "even"] = "counted"
    """pp: cut the layers into stages of equal FLOPs, equal measured time, or equal layer count."""

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise UsageError(f"--prefetch is {self.prefetch}: it must be 0 or more")
        single = self.pipeline_schedule in ("gpipe", "1f1b")
        stages = self.stages_per_rank
        if stages is not None and (stages < 1 or single != (stages == 1)):
            right = "1 stage" if single else "2 stages or more"
            raise UsageError(
                f"--stages-per-rank {stages}: --pipeline-schedule {self.pipeline_schedule} has "
                f"{right} on each rank: leave --stages-per-rank out, or use --pipeline-schedule "
                f"{'interleaved' if single else '1f1b'}"
            )
        if self.pipeline_schedule == "zbv" and stages not in (None, 2):
            raise UsageError(
                f"--stages-per-rank {stages}: schedule zbv has exactly 2 stages per rank: leave "
                "--stages-per-rank out"
            )

    @property
    def virtual_stages(self) -> int:
        """Stages on each rank of the pipeline."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 1 if self.pipeline_schedule in ("gpipe", "1f1b") else 2


# The axis that a field configures. Parity runs many layouts and ignores the fields of unused axes.
AXIS_OF = {
    **dict.fromkeys(("reshard", "prefetch", "gather_dtype", "reduce_dtype"), "shard"),
    **dict.fromkeys(("sequence_parallel", "loss_parallel", "async_tp"), "tp"),
    **dict.fromkeys(("pipeline_schedule", "stages_per_rank", "balance"), "pp"),
}

# The engines that read a field of EngineOptions. Fields that are not listed are read only by ddp.
_ENGINES_OF: dict[str, tuple[EngineName, ...]] = {
    "find_unused": ("ddp", "scratch"),
    "scratch_reduce": ("scratch",),
    "sync_batchnorm": ("ddp", "scratch"),
}


def flag_of(name: str, value: object) -> str:
    """An option and its value as written on a command line."""
    words = name.replace("_", "-")
    if isinstance(value, bool) and name != "reshard":  # reshard has a third value, None
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words} {value}"


def leave_out(name: str, default: object) -> str:
    """The advice for an option that must not be set, on the command line or in a recipe file."""
    return f"leave it out, or pass {flag_of(name, default)} if a recipe file sets it"
