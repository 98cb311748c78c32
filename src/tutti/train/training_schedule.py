"""The schedule of a run: batch sizes, number of steps and learning rates, each with its reason."""

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tutti.measure.units import plural
from tutti.parallel.layout import AXIS_OF, Layout, flag_of, layout_of, leave_out
from tutti.train.recipe import Recipe
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class TrainingSchedule:
    """All values of a run that depend on the number of ranks and the size of the dataset."""

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

    def resumed(self, state: dict[str, Any], step: int, recipe: Recipe) -> "TrainingSchedule":
        """Return the schedule of a run that is resumed at `step` with another global batch.

        The total number of samples, and the learning rate as a function of samples, stay the same,
        unless the recipe now has another length. `state` is the state in the checkpoint.
        """
        done, total, length = int(state["samples"]), int(state["total_samples"]), recipe.length
        if length.steps is not None and length.steps != state.get("steps", length.steps):
            steps, reason = length.steps, "requested"
            total = done + max(0, steps - step) * self.global_batch
        else:
            if length.steps is None and length.epochs != state.get("epochs", length.epochs):
                total = self.samples
            steps = step + max(0, math.ceil((total - done) / self.global_batch))
            reason = f"the rest of {total:,} samples, in steps of {self.global_batch}"
        return replace(
            self,
            samples=total,
            warmup_samples=int(state["warmup_samples"]),
            steps=steps,
            reasons={**self.reasons, "steps": reason},
        )

    def describe(self) -> list[str]:
        """Return a line of text for each value, with its reason."""
        return [
            f"layout {self.layout}: {self.reasons['layout']}",
            f"global batch {self.global_batch}: {self.reasons['global_batch']}",
            f"steps {self.steps}: {self.reasons['steps']}",
            f"steps per epoch {self.steps_per_epoch}: {self.reasons['steps_per_epoch']}",
            f"peak learning rate {self.peak_lr:.4g}: {self.reasons['peak_lr']}",
            f"warm-up {self.warmup_samples:,} of {self.samples:,} samples",
        ]


def make_schedule(recipe: Recipe, ranks: int, samples: int) -> TrainingSchedule:
    """Derive the schedule of a recipe. Raise UsageError if values contradict each other."""
    batching, length = recipe.batching, recipe.length
    check_numbers(recipe)
    layout = layout_of(recipe.parallel.layout, ranks)
    _check_layout(recipe, layout)
    data_ranks = layout.data_ranks
    ranks_text = plural(data_ranks, "rank")
    if not layout.only_replicas:
        ranks_text = f"{plural(data_ranks, 'data rank')} of {layout}"
    accumulation, accumulation_reason = batching.accumulation or 1, ""
    if batching.accumulation is None and layout.pp > 1:
        # A pipeline with p ranks and m microbatches is idle for a fraction (p - 1) / (m + p - 1) of
        # a step: for m = 2 p, at most one third.
        stages = layout.pp * recipe.parallel.virtual_stages
        accumulation = max(2 * layout.pp, stages)
        accumulation_reason = f" (the larger of 2 × pp{layout.pp} and {stages} stages)"
    divisor = data_ranks * accumulation
    global_batch = batching.global_batch or batching.batch * divisor
    if global_batch % divisor:
        lower = global_batch // divisor * divisor
        nearest = f"{lower} or {lower + divisor}" if lower else str(divisor)
        raise UsageError(
            f"--global-batch {global_batch} is not divisible by {ranks_text} × accumulation "
            f"{accumulation} = {divisor}: use {nearest}"
        )
    if batching.drop_last and global_batch > samples:
        raise UsageError(
            f"a global batch of {global_batch} is larger than the dataset of {samples} samples, "
            "and --drop-last leaves no step: use a smaller --batch, or --no-drop-last"
        )
    whole, rest = divmod(samples, global_batch)
    steps_per_epoch = whole + (rest > 0 and not batching.drop_last)
    steps = length.steps or max(1, round(length.epochs * steps_per_epoch))
    epochs, last_steps = divmod(steps, steps_per_epoch)
    epoch_samples = whole * global_batch if batching.drop_last else samples
    total = epochs * epoch_samples + min(last_steps * global_batch, samples)
    peak_lr, lr_reason = _peak_lr(recipe, global_batch)
    reasons = {
        "layout": f"a replica on {plural(ranks, 'rank')}",
        "global_batch": (
            f"batch {batching.batch} × {ranks_text} × accumulation {accumulation}"
            f"{accumulation_reason}"
        ),
        "steps_per_epoch": f"{samples} samples / global batch {global_batch}",
        "steps": f"{length.epochs:g} epochs × {steps_per_epoch} steps",
        "peak_lr": lr_reason,
    }
    requested = {
        "layout": recipe.parallel.layout,
        "global_batch": batching.global_batch,
        "steps": length.steps,
    }
    reasons |= {name: "requested" for name, value in requested.items() if value is not None}
    return TrainingSchedule(
        layout=layout,
        rank_batch=global_batch // divisor,
        accumulation=accumulation,
        global_batch=global_batch,
        shares=_shares(batching.split, data_ranks),
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        samples=total,
        peak_lr=peak_lr,
        warmup_samples=int(recipe.optimization.warmup * total),
        reasons=reasons,
    )


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
            f"--precision fp16 needs a loss scaler, which layout {layout} does not support: use "
            "--precision bf16"
        )
    if recipe.batching.split != "even":
        raise UsageError(
            f"--split {recipe.batching.split} works with replicas only, but layout {layout} "
            f"divides batches evenly: {leave_out('split', 'even')}"
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
        raise UsageError(
            f"--split must be even, measured, or shares such as 2,1,1, got {split}"
        ) from None
    if len(shares) != ranks or not all(share > 0 for share in shares):
        raise UsageError(
            f"--split {split} has {len(shares)} shares for {ranks} ranks: give one positive number "
            "per rank"
        )
    return shares


_LARGEST = 2**31 - 1
_LARGEST_SEED = 2**63 - 1
_MAX_WORKERS = 1024  # processes of one rank


def check_numbers(recipe: Recipe) -> None:
    """Refuse numbers outside their range. NaN fails every comparison, so it is also refused."""
    o, batching, length, data = recipe.optimization, recipe.batching, recipe.length, recipe.data
    for section in asdict(recipe).values():
        for name, value in section.items() if isinstance(section, dict) else ():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, int) and value > _LARGEST and name != "seed":
                raise UsageError(f"{flag} must be at most {_LARGEST}, got {value}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag} must be a finite number, got {value}")
    counts = {
        "pixels": data.pixels,
        "seq-len": data.seq_len,
        "batch": batching.batch,
        "accumulation": batching.accumulation,
        "global-batch": batching.global_batch,
        "steps": length.steps,
        "lr-batch": o.lr_batch,
        "keep": length.keep,
        "evaluate-every": length.evaluate_every,
        "checkpoint-every": length.checkpoint_every,
        "patience": length.patience,
    }
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{flag} must be at least 1, got {count}")
    below_one = "at least 0 and less than 1"
    betas_valid = len(o.betas) == 2 and all(0 <= beta < 1 for beta in o.betas)
    epochs_valid = length.steps is not None or 0 < length.epochs < 1e9
    for flag, value, valid, requirement in (
        ("lr", o.lr, 0 < o.lr < math.inf, "finite and positive"),
        ("momentum", o.momentum, 0 <= o.momentum < 1, below_one),
        ("betas", o.betas, betas_valid, f"two numbers, each {below_one}"),
        ("weight-decay", o.weight_decay, 0 <= o.weight_decay < math.inf, "finite and at least 0"),
        ("clip", o.clip, o.clip is None or o.clip > 0, "positive"),
        ("warmup", o.warmup, 0 <= o.warmup < 1, f"{below_one} (a fraction of the run)"),
        ("ema", o.ema, o.ema is None or 0 < o.ema < 1, "greater than 0 and less than 1"),
        ("final-lr", o.final_lr, 0 <= o.final_lr <= 1, "from 0 to 1 (a fraction of the peak)"),
        ("epochs", length.epochs, epochs_valid, "finite and positive"),
        ("workers", data.workers, 0 <= data.workers <= _MAX_WORKERS, f"0 to {_MAX_WORKERS}"),
        ("seed", length.seed, 0 <= length.seed <= _LARGEST_SEED, f"0 to {_LARGEST_SEED}"),
    ):
        if not valid:
            raise UsageError(f"--{flag} must be {requirement}, got {value}")
    if recipe.engine.static_graph and (batching.accumulation or 1) > 1:
        raise UsageError("--static-graph contradicts --accumulation above 1: remove one of them")
