"""Layout: the number of ranks on each mesh axis, and the options of every technique.

This file does not import torch, because the command line is built from these dataclasses, and
layouts are checked, before torch is needed.
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

# Outermost axis first, in the order of increasing communication. Adjacent ranks differ in tp,
# because tp communicates in every layer. shard gathers parameters once per block. dp communicates
# once per step. pp sends the least data, and only to a neighbouring stage.
AXES = ("pp", "dp", "shard", "tp")


@dataclass(frozen=True)
class Layout:
    """The number of ranks on each axis. Written as `dp2.shard2.tp2.pp2`, without axes of 1 rank."""

    dp: int = 1
    """The number of replicas. Each holds a copy of the model and computes a part of the batch."""
    shard: int = 1
    """The number of shards. Each rank holds one shard and computes a part of the batch."""
    tp: int = 1
    """The number of ranks that work on the same samples, each with a part of every split matrix."""
    pp: int = 1
    """The number of pipeline ranks. Each holds some layers and sends its activations onwards."""

    def __post_init__(self) -> None:
        for axis, ranks in self.axes.items():
            if ranks < 1:
                raise UsageError(f"layout axis {axis} must have at least 1 rank, got {ranks}")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse a layout such as `dp2.tp2`. Raise UsageError if it is not valid."""
        names = [field.name for field in fields(cls)]
        axes: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
            if match is None:
                raise UsageError(
                    f"layout {text!r}: {part!r} must be an axis and a number, as in dp2.tp2"
                )
            axis = match[1]
            if axis not in names:
                raise UsageError(f"layout {text!r} has no axis {axis!r}: use {', '.join(names)}")
            if axis in axes:
                raise UsageError(f"layout {text!r} contains axis {axis} twice: write it once")
            axes[axis] = int(match[2])
        return cls(**axes)

    @classmethod
    def every(cls, ranks: int) -> list["Layout"]:
        """Return all layouts with this number of ranks. Layouts with fewer axes come first."""
        divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
        triples = product(divisors, repeat=3)
        shapes = [(*t, ranks // math.prod(t)) for t in triples if ranks % math.prod(t) == 0]
        # Layouts with the same number of axes are in the order dp4, shard4, tp4, pp4.
        shapes.sort(reverse=True)
        return sorted((cls(*shape) for shape in shapes), key=lambda layout: len(layout._used))

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks on each axis, in the order in which a layout is written."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def size(self) -> int:
        """The number of ranks that the layout needs: the product of its axes."""
        return math.prod(self.axes.values())

    @property
    def data_ranks(self) -> int:
        """The number of parts of a batch. Ranks that differ only in tp or pp have the same part."""
        return self.dp * self.shard

    @property
    def only_replicas(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.size == self.dp

    def check(self, world_size: int) -> None:
        """Raise UsageError unless the world has `size` ranks. The message suggests layouts."""
        if self.size == world_size:
            return
        if world_size < 1:
            raise UsageError(f"--ranks must be at least 1, got {world_size}")
        factors = [str(ranks) for ranks in self._used.values()]
        equation = f"{' × '.join(factors)} = {self.size}" if len(factors) > 1 else f"{self.size}"
        nearest = " or ".join(str(layout) for layout in self.nearest(world_size))
        raise UsageError(
            f"layout {self} needs {equation} rank{'s' * (self.size > 1)}, but this world "
            f"has {world_size}: use --ranks {self.size} or {nearest}"
        )

    def nearest(self, world_size: int) -> list["Layout"]:
        """Return one or two layouts with `world_size` ranks that are most similar to this one."""

        def distance(other: Layout) -> tuple[int, int, float, list[int]]:
            # If tp divides the number of heads of a model, every divisor of tp also divides it, but
            # other values may not. In the same way, a model that has enough layers for pp also has
            # enough layers for every divisor of pp.
            risky = [axis for axis in ("tp", "pp") if self.axes[axis] % other.axes[axis]]
            changed = [abs(math.log2(other.axes[a] / self.axes[a])) for a in self.axes]
            order = [-ranks for ranks in other.axes.values()]
            return len(other._used.keys() ^ self._used.keys()), len(risky), sum(changed), order

        ranked = sorted(Layout.every(world_size), key=distance)
        # One layout is enough if it uses all axes of this layout.
        return ranked[: 1 if ranked[0]._used.keys() >= self._used.keys() else 2]

    def mesh(self, world: "World") -> "Mesh":
        """Arrange the ranks of the world by this layout. All ranks must call this method."""
        from tutti.parallel.mesh import Mesh  # imports torch

        return Mesh(self, world)

    @property
    def _used(self) -> dict[str, int]:
        return {axis: ranks for axis, ranks in self.axes.items() if ranks > 1}

    def __str__(self) -> str:
        return ".".join(f"{axis}{ranks}" for axis, ranks in self._used.items()) or "dp1"


def layout_of(text: str | None, world_size: int) -> Layout:
    """Return the layout of `text` (None: one replica per rank), after a check of its size."""
    layout = Layout(dp=world_size) if text is None else Layout.parse(text)
    layout.check(world_size)
    return layout


@dataclass(frozen=True)
class EngineOptions:
    """How gradients are synchronised between replicas."""

    engine: EngineName = "ddp"
    """How replicas are synchronised: with torch DDP (ddp) or not at all (single). For teaching: one
    process with many devices (dataparallel) or plain collectives after backward (scratch)."""
    bucket_mb: float = 25.0
    """ddp: bucket size in MiB. Small buckets are sent earlier; large buckets use more bandwidth."""
    overlap: bool = True
    """ddp: all-reduce gradients during backward. Otherwise they are all-reduced after backward."""
    gradient_as_bucket_view: bool = True
    """ddp: gradients are views of the buckets, which saves the memory of one copy."""
    static_graph: bool = False
    """ddp: declare that every step uses the same parameters in the same order, so that DDP can plan
    its communication in the first step."""
    find_unused: bool = False
    """ddp, scratch: allow parameters that get no gradient in a step. Searching for such parameters
    takes time in each step."""
    compress: Compression = "none"
    """ddp: send gradients as bf16 or fp16 (half the bytes), or as low-rank factors (powersgd). fp16
    rounds gradients below 6e-8 to zero unless the loss is scaled. bf16 does not."""
    powersgd_rank: int = 2
    """ddp with --compress powersgd: the rank of the factors. A higher rank has a lower error."""
    scratch_reduce: Literal["each", "grouped"] = "grouped"
    """scratch: one all-reduce per gradient (each), or one for all gradients (grouped)."""
    sync_batchnorm: bool = False
    """Batch norms compute their statistics over the microbatches of all data ranks."""

    def __post_init__(self) -> None:
        if self.bucket_mb <= 0:
            raise UsageError(f"--bucket-mb must be positive, got {self.bucket_mb:g}")
        if self.powersgd_rank < 1:
            raise UsageError(f"--powersgd-rank must be at least 1, got {self.powersgd_rank}")
        for field in fields(self):
            engines, value = _ENGINES_OF.get(field.name, ("ddp",)), getattr(self, field.name)
            if field.name != "engine" and self.engine not in engines and value != field.default:
                raise UsageError(
                    f"{flag_of(field.name, value)} has no effect with --engine {self.engine}: "
                    f"leave it out or use --engine {' or '.join(engines)}"
                )
        if self.compress != "none" and not self.overlap:
            raise UsageError(
                f"--compress {self.compress} cannot be combined with --no-overlap, because DDP "
                "compresses buckets during backward: leave one of them out"
            )
        if self.static_graph and (not self.overlap or self.find_unused):
            other = "--find-unused" if self.overlap else "--no-overlap"
            raise UsageError(
                f"--static-graph cannot be combined with {other}, because DDP finds "
                "unused parameters and plans the overlap in the first step: leave one of them out"
            )
        if self.powersgd_rank != 2 and self.compress != "powersgd":
            raise UsageError(
                f"--powersgd-rank {self.powersgd_rank} has no effect with --compress "
                f"{self.compress}: leave it out or use --compress powersgd"
            )


@dataclass(frozen=True)
class ParallelOptions:
    """How a model is distributed over ranks."""

    layout: str | None = None
    """Ranks per axis, such as dp2.shard2.tp2.pp2: replicas, parameter shards (FSDP2), tensor
    parallelism, pipeline stages. auto: the layout that tutti plan predicts to be fastest on this
    host. Unset: one replica per rank."""
    reshard: bool | None = None
    """shard: free gathered parameters after forward and gather them again for backward. Otherwise
    keep them until backward has ended. Unset: free them, except in a pipeline, which reuses them
    for every microbatch."""
    prefetch: int = 1
    """shard: number of blocks that are gathered in advance. 0: gather a block when it starts."""
    gather_dtype: Literal["float32", "bf16"] | None = None
    """shard: dtype in which blocks gather their parameters and compute. Unset: bf16 with
    --precision bf16 (for models without batch norms), else the dtype of the parameters."""
    reduce_dtype: Literal["float32", "bf16"] | None = None
    """shard: dtype in which gradients are summed. Unset: the dtype of --gather-dtype if it is set,
    else the dtype of the parameters."""
    sequence_parallel: bool = True
    """tp: split the activations between the split layers along the sequence."""
    loss_parallel: bool = True
    """tp: compute the loss on logits that are split along the vocabulary."""
    async_tp: bool = False
    """tp: overlap matrix products with their communication. Needs CUDA and --compile."""
    pipeline_schedule: ScheduleName = "1f1b"
    """pp: order of forwards and backwards: gpipe, 1f1b, interleaved (1f1b with several stages per
    rank), zero-bubble (interleaved, with weight gradients computed in the bubbles), or zbv
    (zero-bubble with two stages per rank in a V shape)."""
    stages_per_rank: int | None = None
    """pp: number of stages per rank. Unset: 1 for gpipe and 1f1b, otherwise 2."""
    balance: Literal["counted", "measured", "even"] = "counted"
    """pp: cut the layers into stages of equal FLOPs (counted), equal measured time (measured), or
    equal layer count (even)."""

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise UsageError(f"--prefetch must be at least 0, got {self.prefetch}")
        schedule, stages = self.pipeline_schedule, self.stages_per_rank
        if schedule in ("gpipe", "1f1b"):
            valid, needs = stages in (None, 1), "1 stage"
        elif schedule == "zbv":
            valid, needs = stages in (None, 2), "2 stages"
        else:
            valid, needs = stages is None or stages > 1, "at least 2 stages"
        if not valid:
            other = "1f1b" if stages == 1 else "interleaved"
            raise UsageError(
                f"--pipeline-schedule {schedule} needs {needs} on each rank, got --stages-per-rank "
                f"{stages}: leave --stages-per-rank out, or use --pipeline-schedule {other}"
            )

    @property
    def virtual_stages(self) -> int:
        """The number of stages on each rank of the pipeline."""
        return self.stages_per_rank or (1 if self.pipeline_schedule in ("gpipe", "1f1b") else 2)


# The axis that each field of ParallelOptions configures. `tutti parity` runs many layouts, and
# ignores the fields of axes that a layout does not have.
AXIS_OF = {
    **dict.fromkeys(("reshard", "prefetch", "gather_dtype", "reduce_dtype"), "shard"),
    **dict.fromkeys(("sequence_parallel", "loss_parallel", "async_tp"), "tp"),
    **dict.fromkeys(("pipeline_schedule", "stages_per_rank", "balance"), "pp"),
}

# The engines that use a field of EngineOptions. Fields that are not listed are used only by ddp.
_ENGINES_OF: dict[str, tuple[EngineName, ...]] = {
    "find_unused": ("ddp", "scratch"),
    "scratch_reduce": ("scratch",),
    "sync_batchnorm": ("ddp", "scratch"),
}


def flag_of(name: str, value: object) -> str:
    """Return an option and its value as on a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def leave_out(name: str, default: object) -> str:
    """Return the advice to remove an option from the command line or a recipe file."""
    if default is None:
        return f"leave it out, and remove {name} from the recipe file if it is set there"
    return f"leave it out, or pass {flag_of(name, default)} if a recipe file sets it"


# -- layout against model: arithmetic that needs no torch ------------------------------------------


def check_engine(options: EngineOptions, layout: Layout) -> None:
    """Raise UsageError if the layout cannot use the engine or one of its options."""
    if layout.only_replicas:
        if options.engine in ("single", "dataparallel") and layout.size > 1:
            raise UsageError(
                f"--engine {options.engine} needs a world of 1 rank, but this world has "
                f"{layout.size} ranks: use --engine ddp or --ranks 1"
            )
        return
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name != "sync_batchnorm" and value != option.default:
            raise UsageError(
                f"{flag_of(option.name, value)} is for replicas (dp without other axes), but "
                f"layout {layout} uses FSDP2 and DTensor: "
                f"{leave_out(option.name, option.default)}, or use --layout dp{layout.size}"
            )


def check_divides(tp: int, count: int, counted: str) -> None:
    """Raise UsageError unless tp divides `count`. The message suggests a valid tp."""
    if count % tp:
        divisors = [str(n) for n in range(1, min(count, 2 * tp) + 1) if count % n == 0]
        raise UsageError(
            f"layout tp{tp} does not divide the {count} {counted} ({count} / {tp} = "
            f"{count / tp:.4g}): use tp{' or tp'.join(divisors[-2:])}"
        )


def check_sequence(tp: int, length: int) -> None:
    """Raise UsageError unless tp divides the sequence length."""
    if length % tp:
        raise UsageError(
            f"layout tp{tp} does not divide sequences of {length} tokens ({length} / {tp} = "
            f"{length / tp:.4g}): use --seq-len {-(-length // tp) * tp} or --no-sequence-parallel"
        )


def check_stages(layers: int, ranks: int, stages_per_rank: int, counted: str = "") -> None:
    """Raise UsageError if there are more stages than layers. The message suggests layouts.

    A stage has at least one layer. `counted` describes what counts as a layer, for the message.
    """
    stages = ranks * stages_per_rank
    if stages <= layers:
        return
    needs, cures = f"pp{ranks} needs {stages} layers", []
    if layers // stages_per_rank > 1:
        cures.append(f"pp{layers // stages_per_rank}")
    if stages_per_rank > 1:
        needs = f"pp{ranks} with {stages_per_rank} stages per rank needs "
        needs += f"{ranks} × {stages_per_rank} = {stages} layers"
        if layers >= 2:
            cures.append(f"pp{min(ranks, layers)} with --pipeline-schedule 1f1b")
    cures.append("a model with more layers")
    has = f"{layers} ({counted})" if counted else f"{layers}"
    raise UsageError(f"layout {needs}, but the model has {has}: use {' or '.join(cures)}")


SPLIT_BACKWARD = ("zero-bubble", "zbv")
"""Schedules that split a backward into two halves. The first half computes the gradients of the
inputs, because other ranks wait for them. The second half runs later and computes the gradients of
the weights."""


def check_techniques(schedule: ScheduleName, compile: bool, recompute: Recompute = "none") -> None:
    """Raise UsageError if the schedule splits backward and a technique does not support this."""
    if schedule in SPLIT_BACKWARD and compile:
        raise UsageError(
            f"--compile cannot be combined with --pipeline-schedule {schedule}, because a compiled "
            "backward cannot be split into gradients of inputs and of weights: use "
            "--pipeline-schedule 1f1b or interleaved"
        )
    if schedule in SPLIT_BACKWARD and recompute == "selective":
        raise UsageError(
            "--checkpoint-activations selective cannot be combined with --pipeline-schedule "
            f"{schedule}, because each half of the split backward would need the activations: use "
            "--checkpoint-activations full, or --pipeline-schedule 1f1b or interleaved"
        )


def check_microbatches(name: ScheduleName, ranks: int, microbatches: int) -> None:
    """Raise UsageError if the schedule cannot run this number of microbatches."""

    def divides(count: int) -> bool:
        rounds = max(1, count // ranks)
        return name not in ("interleaved", "zero-bubble") or count % rounds == 0

    lowest = max(ranks, microbatches)
    valid = next(n for n in range(lowest, lowest + ranks + 1) if divides(n))
    cure = f"use --accumulation {valid}"
    if microbatches < ranks:
        raise UsageError(
            f"--accumulation {microbatches} is too small for pp{ranks}: with fewer microbatches "
            f"than pipeline ranks, some ranks would always be idle: {cure}"
        )
    if not divides(microbatches):
        rounds = microbatches // ranks
        raise UsageError(
            f"--pipeline-schedule {name} divides the microbatches into {microbatches} // {ranks} = "
            f"{rounds} rounds of equal size, but --accumulation {microbatches} is not divisible by "
            f"{rounds}: {cure}"
        )
