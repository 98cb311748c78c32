"""What engines and layouts can be told. No torch in this file: command lines are made of it."""

from dataclasses import dataclass, fields
from typing import Literal

from tutti.world.errors import UsageError

EngineName = Literal["single", "dataparallel", "scratch", "ddp"]
Compression = Literal["none", "bf16", "fp16", "powersgd"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class EngineOptions:
    """How gradients travel between the replicas of a model."""

    engine: EngineName = "ddp"
    """Who synchronises the replicas: nobody (single), one process with many devices
    (dataparallel), a lesson in plain collectives (scratch), or torch DDP (ddp)."""
    bucket_mb: float = 25.0
    """ddp: gradients per all-reduce, in MiB: small ones start early, large ones are efficient."""
    overlap: bool = True
    """ddp: all-reduce while backward still runs, or only after it (the baseline)."""
    gradient_as_bucket_view: bool = True
    """ddp: gradients live inside the buckets, which saves a copy and its memory."""
    static_graph: bool = False
    """ddp: promise that every step uses the same parameters in the same way."""
    find_unused: bool = False
    """ddp, scratch: allow parameters that got no gradient in a step, at some cost."""
    compress: Compression = "none"
    """ddp: send gradients as bf16 or fp16 (half the bytes), or as low-rank factors (powersgd).
    fp16 turns gradients under 6e-8 into zero unless the loss is scaled; bf16 does not."""
    powersgd_rank: int = 2
    """ddp with --compress powersgd: the rank of the factors; the error falls as it grows."""
    scratch_reduce: Literal["each", "grouped"] = "grouped"
    """scratch: one all-reduce for each gradient, or one for all of them."""
    sync_batchnorm: bool = False
    """Batch norms use the statistics of the whole microbatch, over all ranks."""

    def __post_init__(self) -> None:
        self._check_values()
        self._check_engine()
        self._check_pairs()

    def _check_values(self) -> None:
        if self.bucket_mb <= 0:
            raise UsageError(f"--bucket-mb is {self.bucket_mb:g}: it must be above 0, such as 25")
        if self.powersgd_rank < 1:
            raise UsageError(f"--powersgd-rank is {self.powersgd_rank}: it must be at least 1")

    def _check_engine(self) -> None:
        """Refuse a flag that the chosen engine would silently ignore."""
        for field in fields(self):
            users = _USERS.get(field.name, ())
            value = getattr(self, field.name)
            if users and self.engine not in users and value != field.default:
                raise UsageError(
                    f"{flag_of(field.name, value)} does nothing with --engine {self.engine}: "
                    f"leave it out or use --engine {' or '.join(users)}"
                )

    def _check_pairs(self) -> None:
        if self.compress != "none" and not self.overlap:
            raise UsageError(
                f"--compress {self.compress} contradicts --no-overlap: DDP compresses buckets as "
                "backward fills them: leave one of the two out"
            )
        if self.static_graph and not self.overlap:
            raise UsageError(
                "--static-graph contradicts --no-overlap: it plans the overlap: leave one of the "
                "two out"
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
    """How a model is spread over ranks."""

    layout: str | None = None
    """Axes and their ranks, such as dp2.shard2.tp2.pp2: replicas, sharded parameters, split layers,
    pipeline stages. Unset: a replica on each rank."""
    reshard: bool | None = None
    """shard: free gathered parameters after forward, and gather them again for backward, or keep
    them until backward is through. Unset: free them, but not in a pipeline, which comes back."""
    prefetch: int = 1
    """shard: how many blocks ahead parameters are gathered; 0: only when they are needed."""
    gather_dtype: Literal["float32", "bf16"] | None = None
    """shard: the type that parameters are gathered and computed in; unset: as they are."""
    reduce_dtype: Literal["float32", "bf16"] | None = None
    """shard: the type that gradients are summed in; unset: that of --gather-dtype."""
    sequence_parallel: bool = True
    """tp: between the split layers, each rank holds a part of the sequence, not all of it."""
    loss_parallel: bool = True
    """tp: compute the loss on logits that stay split by vocabulary."""
    async_tp: bool = False
    """tp: overlap matrix products with their communication (CUDA, with --compile)."""
    pipeline_schedule: ScheduleName = "1f1b"
    """pp: the order of forward and backward: gpipe, 1f1b, interleaved (1f1b with several stages on
    each rank), zero-bubble (interleaved, weights' gradients fill the gaps), zbv (in a V)."""
    stages_per_rank: int | None = None
    """pp: stages on each rank: 1 for gpipe and 1f1b, 2 for the others unless set."""
    balance: Literal["counted", "measured", "even"] = "counted"
    """pp: cut the layers into stages of equal FLOPs, of equal measured time, or of equal number."""

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
                f"--stages-per-rank {stages}: schedule zbv has 2, the arms of its V: leave it out"
            )

    @property
    def virtual_stages(self) -> int:
        """Stages on each rank of the pipeline."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 1 if self.pipeline_schedule in ("gpipe", "1f1b") else 2


# Which axis a field is about; parity, which tries many layouts, does not mind if there is none.
AXIS_OF = {
    **dict.fromkeys(("reshard", "prefetch", "gather_dtype", "reduce_dtype"), "shard"),
    **dict.fromkeys(("sequence_parallel", "loss_parallel", "async_tp"), "tp"),
    **dict.fromkeys(("pipeline_schedule", "stages_per_rank", "balance"), "pp"),
}

# Which engines read a field; fields that are not here concern all of them.
_USERS: dict[str, tuple[EngineName, ...]] = {
    "bucket_mb": ("ddp",),
    "overlap": ("ddp",),
    "gradient_as_bucket_view": ("ddp",),
    "static_graph": ("ddp",),
    "find_unused": ("ddp", "scratch"),
    "compress": ("ddp",),
    "powersgd_rank": ("ddp",),
    "scratch_reduce": ("scratch",),
    "sync_batchnorm": ("ddp", "scratch"),
}


def flag_of(name: str, value: object) -> str:
    """How a value of an option is written on a command line."""
    words = name.replace("_", "-")
    if isinstance(value, bool) and name != "reshard":  # it has a third value, None
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words} {value}"


def leave_out(name: str, default: object) -> str:
    """The cure for an option that must not be set: it may come from the file of a run."""
    return f"leave it out, or say {flag_of(name, default)} where a file has it"
