"""The arithmetic of a run: batches, steps and learning rate, derived once, each with its reason."""

import math
from dataclasses import dataclass, field, fields

from tutti.parallel.layout import Layout, layout_of
from tutti.parallel.options import AXIS_OF, flag_of, leave_out
from tutti.train.recipe import Recipe
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Plan:
    """What follows from a recipe, a number of ranks and a number of samples."""

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
        """The learning rate of the step after which `samples` samples will have been seen."""
        if samples < self.warmup_samples:
            return self.peak_lr * samples / self.warmup_samples
        done = (samples - self.warmup_samples) / max(1, self.samples - self.warmup_samples)
        done = min(1.0, done)
        final, kind = recipe.optimization.final_lr, recipe.optimization.schedule
        if kind == "cosine":
            return self.peak_lr * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)
        if kind == "linear":
            return self.peak_lr * (1 - (1 - final) * done)
        return self.peak_lr

    def describe(self) -> list[str]:
        """The run's arithmetic, a line each with its reason."""
        return [
            f"layout {self.layout}: {self.reasons['layout']}",
            f"global batch {self.global_batch}: {self.reasons['global_batch']}",
            f"steps {self.steps}: {self.reasons['steps']}",
            f"steps per epoch {self.steps_per_epoch}: {self.reasons['steps_per_epoch']}",
            f"peak learning rate {self.peak_lr:.4g}: {self.reasons['peak_lr']}",
            f"warm-up {self.warmup_samples:,} of {self.samples:,} samples",
        ]


def make_plan(recipe: Recipe, ranks: int, samples: int) -> Plan:
    """Derive everything that depends on the number of ranks and the size of the data set."""
    batching, length = recipe.batching, recipe.length
    _check_numbers(recipe)
    layout = layout_of(recipe.parallel.layout, ranks)
    _check_layout(recipe, layout)
    asked = recipe.parallel.layout is not None
    reasons = {"layout": "asked for" if asked else f"a replica on each of {ranks} ranks"}
    accumulation, why = _accumulation(recipe, layout)
    parts = layout.data_ranks
    who = f"{parts} ranks" if layout.only_replicas else f"{parts} data ranks of {layout}"
    if batching.global_batch is None:
        rank_batch = _at_least_one("batch", batching.batch)
        global_batch = rank_batch * parts * accumulation
        reasons["global_batch"] = f"batch {rank_batch} × {who} × accumulation {accumulation}{why}"
    else:
        global_batch = _at_least_one("global-batch", batching.global_batch)
        pieces = parts * accumulation
        if global_batch % pieces:
            lower, upper = global_batch // pieces * pieces, -(-global_batch // pieces) * pieces
            better = f"{lower} or {upper}" if lower else str(upper)
            raise UsageError(
                f"--global-batch {global_batch} does not divide by {who} × accumulation "
                f"{accumulation} = {pieces}: use {better}"
            )
        rank_batch = global_batch // pieces
        reasons["global_batch"] = "asked for"
    if batching.drop_last and global_batch > samples:
        raise UsageError(
            f"a global batch of {global_batch} is larger than the data set of {samples} samples, "
            "and --drop-last leaves nothing: use a smaller --batch, or --no-drop-last"
        )
    whole, rest = divmod(samples, global_batch)
    steps_per_epoch = whole + (rest > 0 and not batching.drop_last)
    reasons["steps_per_epoch"] = f"{samples} samples / global batch {global_batch}"
    if length.steps is not None:
        steps = _at_least_one("steps", length.steps)
        reasons["steps"] = "asked for"
    else:
        if not 0 < length.epochs < 1e9:
            raise UsageError(f"--epochs {length.epochs}: use more than 0")
        steps = max(1, round(length.epochs * steps_per_epoch))
        reasons["steps"] = f"{length.epochs:g} epochs × {steps_per_epoch} steps"
    total = _samples_in(steps, steps_per_epoch, samples, global_batch, batching.drop_last)
    peak, reasons["peak_lr"] = _peak_lr(recipe, global_batch)
    if not 0 <= recipe.optimization.warmup < 1:
        raise UsageError(f"--warmup {recipe.optimization.warmup}: a part of the run, 0 to 1")
    return Plan(
        layout=layout,
        rank_batch=rank_batch,
        accumulation=accumulation,
        global_batch=global_batch,
        shares=_shares(batching.split, parts),
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        samples=total,
        peak_lr=peak,
        warmup_samples=int(recipe.optimization.warmup * total),
        reasons=reasons,
    )


def _accumulation(recipe: Recipe, layout: Layout) -> tuple[int, str]:
    """Microbatches per step, and why: a pipeline with few of them mostly waits."""
    if recipe.batching.accumulation is not None:
        return _at_least_one("accumulation", recipe.batching.accumulation), ""
    if layout.pp == 1:
        return 1, ""
    stages = layout.pp * recipe.parallel.virtual_stages
    return max(2 * layout.pp, stages), f" (twice pp{layout.pp}, at least its {stages} stages)"


def _check_layout(recipe: Recipe, layout: Layout) -> None:
    """Refuse what the layout would silently ignore, and what only replicas can do."""
    sharded = layout.data_ranks > 1 and not layout.only_replicas
    there = {"shard": sharded, "tp": layout.tp > 1, "pp": layout.pp > 1}
    for option in fields(recipe.parallel):
        axis = AXIS_OF.get(option.name)
        value = getattr(recipe.parallel, option.name)
        if axis is not None and not there[axis] and value != option.default:
            raise UsageError(
                f"{flag_of(option.name, value)} does nothing in layout {layout}, which has no "
                f"{axis}: {leave_out(option.name, option.default)}"
            )
    if layout.only_replicas:
        return
    if recipe.compute.precision == "fp16":
        raise UsageError(
            f"--precision fp16 scales the loss, which layout {layout} does not: use bf16"
        )
    if recipe.batching.split != "even":
        raise UsageError(
            f"--split {recipe.batching.split} is for replicas, layout {layout} cuts batches "
            f"evenly: {leave_out('split', 'even')}"
        )


def _samples_in(
    steps: int, steps_per_epoch: int, samples: int, global_batch: int, drop_last: bool
) -> int:
    epochs, rest = divmod(steps, steps_per_epoch)
    in_epoch = steps_per_epoch * global_batch if drop_last else samples
    return epochs * in_epoch + min(rest * global_batch, samples)


def _peak_lr(recipe: Recipe, global_batch: int) -> tuple[float, str]:
    """Linear: Goyal et al., arXiv 1706.02677. Square root: for Adam, e.g. arXiv 2205.10287."""
    rule, lr = recipe.optimization.lr_scale, recipe.optimization.lr
    reference = recipe.optimization.lr_batch
    if rule == "none":
        return lr, "asked for, whatever the batch"
    if reference is None:
        raise UsageError(f"--lr-scale {rule} needs --lr-batch, the batch that --lr was chosen for")
    _at_least_one("lr-batch", reference)
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
    """Refuse numbers that no training can mean; NaN fails every comparison, too."""
    o, length = recipe.optimization, recipe.length
    right = {
        f"--lr {o.lr}: use more than 0": 0 < o.lr < math.inf,
        f"--momentum {o.momentum}: use 0 to below 1": 0 <= o.momentum < 1,
        f"--betas {o.betas}: use two, 0 to below 1": (
            len(o.betas) == 2 and all(0 <= beta < 1 for beta in o.betas)
        ),
        f"--weight-decay {o.weight_decay}: use 0 or more": 0 <= o.weight_decay < math.inf,
        f"--clip {o.clip}: use more than 0": o.clip is None or o.clip > 0,
        f"--final-lr {o.final_lr}: use 0 to 1": 0 <= o.final_lr <= 1,
        f"--keep {length.keep}: use 1 or more": length.keep >= 1,
        f"--evaluate-every {length.evaluate_every}: use 1 or more": (
            length.evaluate_every is None or length.evaluate_every >= 1
        ),
        f"--checkpoint-every {length.checkpoint_every}: use 1 or more": (
            length.checkpoint_every is None or length.checkpoint_every >= 1
        ),
    }
    for mistake, is_right in right.items():
        if not is_right:
            raise UsageError(mistake)
    if recipe.engine.static_graph and (recipe.batching.accumulation or 1) > 1:
        raise UsageError("--static-graph contradicts --accumulation above 1: leave one out")


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"--{flag} {value}: use 1 or more")
    return value
