"""A run and its checkpoints: what is saved of it, and how it goes on, on other ranks if need be."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tutti.parallel.noise import noise_axes
from tutti.train.batch_schedule import BatchSchedule
from tutti.train.recipe import Length

if TYPE_CHECKING:
    from tutti.train.trainer import Trainer


def save_run(trainer: "Trainer") -> None:
    """Write a checkpoint of all that the run needs to go on."""
    plan = trainer.plan
    trainer.engine.share_buffers()
    trainer.checkpoints.save(
        trainer.step,
        trainer.model,
        trainer.optimizer,
        {
            "samples": trainer.runner.samples,
            "data": trainer.loader.state_dict(),
            "scaler": trainer.stepper.scaler.state_dict(),
            "shares": trainer.shares,
            "ranks": trainer.world.size,
            "global_batch": plan.global_batch,
            "total_samples": plan.samples,
            "warmup_samples": plan.warmup_samples,
            "steps": plan.steps,
            "epochs": trainer.recipe.length.epochs,
            "layout": str(plan.layout),
            "noise": noise_axes(trainer.engine.split_stream),
        },
        aliases=trainer.engine.aliases,
    )


def resume_run(trainer: "Trainer") -> None:
    """Put the trainer where its last good checkpoint was; its notes say what differs."""
    if not trainer.checkpoints.steps():
        trainer.notes.append("there is no checkpoint yet: the run starts from the beginning")
        return
    state = _load(trainer)
    recipe, runner, loader = trainer.recipe, trainer.runner, trainer.loader
    if recipe.engine.compress == "powersgd":
        trainer.notes.append("PowerSGD's memory of past errors is not saved: it starts anew")
    if (reason := _other_noise(trainer, state)) is not None:
        trainer.engine.seed_noise(recipe.length.seed, trainer.step)
        trainer.notes.append(f"{reason}: random numbers start anew")
    runner.samples = int(state["samples"])
    loader.load_state_dict(state["data"])
    if state["global_batch"] != trainer.plan.global_batch:
        trainer.plan = _in_other_steps(trainer.plan, state, trainer.step, recipe.length)
        runner.plan = trainer.plan
    scaler = trainer.stepper.scaler
    if state["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])
    measured = recipe.batching.split == "measured" and state["shares"] is not None
    if measured and len(state["shares"]) == loader.ranks:
        trainer.shares = [float(share) for share in state["shares"]]
        loader.set_shares(trainer.shares)


def _other_noise(trainer: "Trainer", state: dict[str, Any]) -> str | None:
    """Why ranks cannot go on with the random numbers that each of them saved; None if they can."""
    layout = trainer.plan.layout
    if state["layout"] != str(layout):
        return f"saved under {state['layout']}"
    # Ranks that shared random numbers may be others now, by --no-sequence-parallel for one.
    before = state.get("noise", ("dp", "shard"))
    changed = {*before} ^ {*noise_axes(trainer.engine.split_stream)}
    torn = [axis for axis in changed if layout.axes[axis] > 1]
    return f"saved where ranks of {' and '.join(torn)} shared other numbers" if torn else None


def _load(trainer: "Trainer") -> dict[str, Any]:
    """Weights and the optimizer's state; returns the rest."""
    groups = trainer.optimizer.param_groups
    # The recipe says what the learning rate, decay and so on are, not the checkpoint.
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    loaded = trainer.checkpoints.load(
        trainer.model, trainer.optimizer, aliases=trainer.engine.aliases
    )
    for group, asked in zip(trainer.optimizer.param_groups, options, strict=True):
        group.update(asked)
    trainer.step = loaded.step
    trainer.notes += [f"resumed at step {trainer.step}", *loaded.notes]
    return loaded.state


def _in_other_steps(
    plan: BatchSchedule, state: dict[str, Any], step: int, length: Length
) -> BatchSchedule:
    """Another number of ranks makes steps of another size: the length of the run and its schedule
    stay what they were, in samples, unless another length is asked for.
    """
    done, total, batch = int(state["samples"]), int(state["total_samples"]), plan.global_batch
    wanted = length.steps
    if wanted is None and length.epochs != state.get("epochs", length.epochs):
        total = plan.samples
    steps = step + max(0, math.ceil((total - done) / batch))
    why = f"what is left of {total:,} samples, in steps of {batch}"
    if wanted is not None and wanted != state.get("steps", wanted):
        steps, why = wanted, "asked for"
        total = done + max(0, wanted - step) * batch
    return replace(
        plan,
        samples=total,
        warmup_samples=int(state["warmup_samples"]),
        steps=steps,
        reasons={**plan.reasons, "steps": why},
    )
