"""Batch schedule: batch sizes, steps and learning rates of a run, derived once with reasons."""

import math
from dataclasses import dataclass, field, fields

from tutti.parallel.layout import AXIS_OF, Layout, flag_of, layout_of, leave_out
from tutti.train.recipe import Recipe
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class BatchSchedule:
    """Batch arithmetic of a recipe for a number of ranks and a number of samples."""

    layout: Layout
    rank_batch: int
    accumulation: int
    global_batch: int
    shares: tuple[float, ...] | None
    steps_per_epoch: int
    steps: int
    samples: int
    peak_lr: float
    warmup_samples: int
    reasons: dict[str, str] = field(default_factory=dict)

    def lr_at(self, samples: int, recipe: Recipe) -> float:
        """Return the learning rate of the step that ends after `samples` samples in total."""
        if samples < self.warmup_samples:
            return self.peak_lr * samples / self.warmup_samples
        decayed = (samples - self.warmup_samples) / max(1, self.samples - self.warmup_samples)
        decayed = min(1.0, decayed)
        final, kind = recipe.optimization.final_lr, recipe.optimization.schedule
        if kind == "cosine":
            return self.peak_lr * (final + (1 - final) * (1 + math.cos(math.pi * decayed)) / 2)
        if kind == "linear":
            return self.peak_lr * (1 - (1 - final) * decayed)
        return self.peak_lr

    def describe(self) -> list[str]:
        """Return the values as text, one line each with its reason."""
        return [
            f"layout {self.layout}: {self.reasons['layout']}",
            f"global batch {self.global_batch}: {self.reasons['global_batch']}",
            f"steps {self.steps}: {self.reasons['steps']}",
            f"steps per epoch {self.steps_per_epoch}: {self.reasons['steps_per_epoch']}",
            f"peak learning rate {self.peak_lr:.4g}: {self.reasons['peak_lr']}",
            f"warm-up {self.warmup_samples:,} of {self.samples:,} samples",
        ]


def make_schedule(recipe: Recipe, ranks: int, samples: int) -> BatchSchedule:
    """Derive all values that depend on the number of ranks and the size of the dataset."""
    batching, length = recipe.batching, recipe.length
    _check_numbers(recipe)
    layout = layout_of(recipe.parallel.layout, ranks)
    _check_layout(recipe, layout)
    requested = recipe.parallel.layout is not None
    reasons = {"layout": "requested" if requested else f"a replica on each of {ranks} ranks"}
    accumulation, reason = _accumulation(recipe, layout)
    data_ranks = layout.data_ranks
    ranks_text = f"{data_ranks} ranks"
    if not layout.only_replicas:
        ranks_text = f"{data_ranks} data ranks of {layout}"
    if batching.global_batch is None:
        rank_batch = batching.batch
        global_batch = rank_batch * data_ranks * accumulation
        reasons["global_batch"] = (
            f"batch {rank_batch} × {ranks_text} × accumulation {accumulation}{reason}"
        )
    else:
        global_batch = batching.global_batch
        divisor = data_ranks * accumulation
        if global_batch % divisor:
            lower = global_batch // divisor * divisor
            nearest = f"{lower} or {lower + divisor}" if lower else str(divisor)
            raise UsageError(
                f"--global-batch {global_batch} does not divide by {ranks_text} × accumulation "
                f"{accumulation} = {divisor}: use {nearest}"
            )
        rank_batch = global_batch // divisor
        reasons["global_batch"] = "requested"
    if batching.drop_last and global_batch > samples:
        raise UsageError(
            f"a global batch of {global_batch} is larger than the data set of {samples} samples, "
            "and --drop-last leaves no step: use a smaller --batch, or --no-drop-last"
        )
    whole, rest = divmod(samples, global_batch)
    steps_per_epoch = whole + (rest > 0 and not batching.drop_last)
    reasons["steps_per_epoch"] = f"{samples} samples / global batch {global_batch}"
    if length.steps is not None:
        steps = length.steps
        reasons["steps"] = "requested"
    else:
        steps = max(1, round(length.epochs * steps_per_epoch))
        reasons["steps"] = f"{length.epochs:g} epochs × {steps_per_epoch} steps"
    epochs, rest = divmod(steps, steps_per_epoch)
    in_epoch = steps_per_epoch * global_batch if batching.drop_last else samples
    total = epochs * in_epoch + min(rest * global_batch, samples)
    peak, reasons["peak_lr"] = _peak_lr(recipe, global_batch)
    return BatchSchedule(
        layout=layout,
        rank_batch=rank_batch,
        accumulation=accumulation,
        global_batch=global_batch,
        shares=_shares(batching.split, data_ranks),
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        samples=total,
        peak_lr=peak,
        warmup_samples=int(recipe.optimization.warmup * total),
        reasons=reasons,
    )


def _accumulation(recipe: Recipe, layout: Layout) -> tuple[int, str]:
    """Return the microbatches per step and the reason.

    A pipeline with p ranks and m microbatches is idle for (p - 1) / (m + p - 1) of a 1F1B step.
    """
    if recipe.batching.accumulation is not None:
        return recipe.batching.accumulation, ""
    if layout.pp == 1:
        return 1, ""
    stages = layout.pp * recipe.parallel.virtual_stages
    return max(2 * layout.pp, stages), f" (the larger of 2 × pp{layout.pp} and {stages} stages)"


def _check_layout(recipe: Recipe, layout: Layout) -> None:
    """Refuse options that the layout would ignore, and options that only replicas support."""
    sharded = layout.data_ranks > 1 and not layout.only_replicas
    has_axis = {"shard": sharded, "tp": layout.tp > 1, "pp": layout.pp > 1}
    for option in fields(recipe.parallel):
        axis = AXIS_OF.get(option.name)
        value = getattr(recipe.parallel, option.name)
        if axis is not None and not has_axis[axis] and value != option.default:
            raise UsageError(
                f"{flag_of(option.name, value)} has no effect in layout {layout}, which has no "
                f"{axis}: {leave_out(option.name, option.default)}"
            )
    if layout.only_replicas:
        return
    if recipe.compute.precision == "fp16":
        raise UsageError(
            f"--precision fp16 needs a loss scaler, which layout {layout} lacks: use bf16"
        )
    if recipe.batching.split != "even":
        raise UsageError(
            f"--split {recipe.batching.split} is for replicas, layout {layout} divides batches "
            f"evenly: {leave_out('split', 'even')}"
        )


def _peak_lr(recipe: Recipe, global_batch: int) -> tuple[float, str]:
    """Return the peak learning rate and the reason.

    Linear scaling: Goyal et al., arXiv 1706.02677. Square root, for Adam: arXiv 2205.10287.
    """
    rule, lr = recipe.optimization.lr_scale, recipe.optimization.lr
    reference = recipe.optimization.lr_batch
    if rule == "none":
        return lr, "fixed, not scaled with the batch size"
    if reference is None:
        raise UsageError(
            f"--lr-scale {rule} needs --lr-batch, the global batch that --lr was tuned for"
        )
    ratio = global_batch / reference
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    return lr * factor, f"{lr:g} × {rule}({global_batch} / {reference}) = {lr:g} × {factor:.4g}"


def _shares(split: str, ranks: int) -> tuple[float, ...] | None:
    if split in ("even", "measured"):
        return None
    try:
        shares = tuple(float(share) for share in split.split(","))
    except ValueError:
        raise UsageError(f"--split {split}: use even, measured, or shares as 2,1,1") from None
    if len(shares) != ranks or not all(share > 0 for share in shares):
        raise UsageError(
            f"--split {split} gives {len(shares)} shares for {ranks} ranks: give each one above 0"
        )
    return shares


def _check_numbers(recipe: Recipe) -> None:
    """Refuse numbers outside their range; NaN fails every comparison and is refused, too."""
    o, batching, length = recipe.optimization, recipe.batching, recipe.length
    counts = {
        "batch": batching.batch,
        "accumulation": batching.accumulation,
        "global-batch": batching.global_batch,
        "steps": length.steps,
        "lr-batch": o.lr_batch,
        "keep": length.keep,
        "evaluate-every": length.evaluate_every,
        "checkpoint-every": length.checkpoint_every,
    }
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{flag} {count}: use 1 or more")
    valid = {
        f"--lr {o.lr}: must be finite and more than 0": 0 < o.lr < math.inf,
        f"--momentum {o.momentum}: use 0 to below 1": 0 <= o.momentum < 1,
        f"--betas {o.betas}: use two, 0 to below 1": (
            len(o.betas) == 2 and all(0 <= beta < 1 for beta in o.betas)
        ),
        f"--weight-decay {o.weight_decay}: use 0 or more": 0 <= o.weight_decay < math.inf,
        f"--clip {o.clip}: use more than 0": o.clip is None or o.clip > 0,
        f"--warmup {o.warmup}: a fraction of the run, use 0 to below 1": 0 <= o.warmup < 1,
        f"--final-lr {o.final_lr}: use 0 to 1": 0 <= o.final_lr <= 1,
        f"--epochs {length.epochs}: must be finite and more than 0": (
            length.steps is not None or 0 < length.epochs < 1e9
        ),
    }
    for message, is_valid in valid.items():
        if not is_valid:
            raise UsageError(message)
    if recipe.engine.static_graph and (recipe.batching.accumulation or 1) > 1:
        raise UsageError("--static-graph contradicts --accumulation above 1: leave one out")
