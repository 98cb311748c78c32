"""The training run: set-up, the loop over steps, and resuming."""

import json
import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from tutti.comm.operation import profiling
from tutti.data.dataset import Dataset
from tutti.data.loader import Batch, Loader, evaluation_loader
from tutti.data.split import measured_shares
from tutti.machine.environment import describe_environment
from tutti.models.config import GPTConfig
from tutti.parallel.apply import build_engine
from tutti.parallel.layout import EngineOptions
from tutti.parallel.materialize import check_replicas_equal
from tutti.parallel.rng import rng_axes
from tutti.train.batch_schedule import BatchSchedule, make_schedule
from tutti.train.init import agree, build_meta_model, build_optimizer, fit, load_dataset, set_lr
from tutti.train.recipe import Length, Recipe
from tutti.train.run_directory import RunDirectory
from tutti.train.step import AUTOCAST, Step, Task, as_model_dtype
from tutti.train.telemetry import (
    Metrics,
    ProgressReport,
    Status,
    StatusSync,
    StepTimer,
    Stragglers,
    Throughput,
)
from tutti.world.exchange import check_same, gather_json
from tutti.world.world import World

if TYPE_CHECKING:
    from tutti.train.checkpoint import Checkpoints
    from tutti.train.evaluate import Score

_NO_SPAN = nullcontext()


class LossNotFinite(Exception):
    """The loss became NaN or infinite; the message names the step and the rank."""


@dataclass
class Outcome:
    """The result of a run."""

    summary: dict[str, Any]
    stopped: bool  # whether a signal ended the run early, after a checkpoint
    failed_saves: dict[int, str]  # step → why its checkpoint was not written


class Runner(ABC):
    """Runs steps: takes batches from the loader, sets the learning rate, counts samples."""

    def __init__(self, step: Step, loader: Loader, schedule: BatchSchedule, recipe: Recipe) -> None:
        self.step = step
        self.loader = loader
        self.schedule = schedule
        self.recipe = recipe
        # Of the whole run, over all ranks; the learning rate is a function of this number.
        self.samples = 0
        self._rank_samples = 0
        self._input_seconds = 0.0

    @abstractmethod
    def run(self, steps: int) -> Tensor:
        """Run `steps` steps; returns this rank's part of each loss, as a tensor on the device."""

    @abstractmethod
    def close(self) -> None:
        """Release the data and everything that was prepared for later steps."""

    def take_rank_samples(self) -> int:
        """Return the number of samples that this rank has trained on since the last call."""
        taken, self._rank_samples = self._rank_samples, 0
        return taken

    def take_input_seconds(self) -> float:
        """Return the seconds that the loop has waited for batches since the last call."""
        taken, self._input_seconds = self._input_seconds, 0.0
        return taken


class EagerRunner(Runner):
    """Runs steps one by one, each launched from Python."""

    _batches: Iterator[Batch] | None = None

    def run(self, steps: int) -> Tensor:
        if self._batches is None:
            self._batches = self.loader.stream()
        losses = []
        for _ in range(steps):
            began = time.perf_counter()
            # A named span in a trace: the time in which the loop waits for input.
            with record_function("tutti.input") if profiling() else _NO_SPAN:
                batch = next(self._batches)
            self._input_seconds += time.perf_counter() - began
            self.samples += batch.global_count
            self._rank_samples += batch.count
            set_lr(self.step.optimizer, self.schedule.lr_at(self.samples, self.recipe))
            losses.append(self.step(batch))
        return torch.stack(losses)

    def close(self) -> None:
        self._batches = None
        self.loader.close()


class Trainer:
    """Trains one recipe in one world; `run()` returns the outcome."""

    def __init__(
        self,
        world: World,
        recipe: Recipe,
        directory: RunDirectory,
        *,
        resume: bool = False,
        tensorboard: bool = False,
        save: bool = True,
    ) -> None:
        self.world = world
        self.recipe = recipe
        self.directory = directory
        self._saves = save
        seed = recipe.length.seed

        dataset, self.schedule = agree(self._load)
        model, weights, note = agree(lambda: build_meta_model(recipe, dataset))
        check_same(world, recipe=_as_json(recipe))
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes repeat: choose kernels by measurement
        model.to(torch.float64 if recipe.compute.precision == "float64" else torch.float32)
        example = dataset.train.batch([0])[0].to(world.device)
        self.engine = build_engine(
            model,
            world,
            _engine_options(recipe, world),
            recipe.parallel,
            example=as_model_dtype(example, model),
            microbatches=self.schedule.accumulation,
            microbatch_size=self.schedule.rank_batch,
            recompute=recipe.compute.checkpoint_activations,
            compile=recipe.compute.compile and world.size > 1,
            autocast=AUTOCAST.get(recipe.compute.precision),
            weights=weights,
        )
        self.model = self.engine.model  # this rank's layers; --sync-batchnorm replaces some
        check_replicas_equal(self.model, self.engine.mesh)
        self.engine.seed_rng(seed)  # from here on, ranks draw different numbers
        self.optimizer = build_optimizer(
            self.model, recipe.optimization, self.schedule.peak_lr, recipe.compute.cuda_graph
        )
        self.task = Task(padded=recipe.data.padded)
        self.timer = StepTimer(
            world.device,
            own_time=_waits_only_after_backward(recipe, self.schedule),
            forward_time=recipe.batching.split == "measured",
        )
        self.stepper = Step(
            self.engine,
            self.optimizer,
            self.task,
            recipe.compute,
            example,
            self.schedule.accumulation,
            recipe.optimization.clip,
            self.timer,
        )
        self.loader, self.test_loader = agree(lambda: self._loaders(dataset))
        board = directory.path / "tensorboard" if tensorboard else None
        self.metrics = Metrics(directory.metrics, world.rank, board)
        is_gpt = recipe.model == "gpt" and isinstance(recipe.architecture, GPTConfig)
        architecture = fit(recipe.architecture, dataset) if is_gpt else None
        seq_len = dataset.input_shape[0] if architecture else 0
        self.speed = Throughput(world, recipe.compute.precision, architecture, seq_len)
        self.score: Score | None = None
        self.notes: list[str] = [] if note is None else [note]
        self.step, samples = 0, 0
        self.shares: list[float] | None = None
        if resume:
            samples = self._resume()
        if recipe.compute.cuda_graph:
            from tutti.train.cuda_graph import GraphRunner

            self.runner: Runner = GraphRunner(self.stepper, self.loader, self.schedule, recipe)
        else:
            self.runner = EagerRunner(self.stepper, self.loader, self.schedule, recipe)
        self.runner.samples = self._samples_reported = samples
        self.metrics.rewind(self.step)

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        """The checkpoints of this run; the object is created by the first save or by --resume."""
        from tutti.train.checkpoint import Checkpoints

        return Checkpoints(self.directory.checkpoints, keep=self.recipe.length.keep)

    def _load(self) -> tuple[Dataset, BatchSchedule]:
        dataset = load_dataset(self.recipe)
        schedule = make_schedule(self.recipe, self.world.size, len(dataset.train))
        if self.recipe.compute.cuda_graph:
            from tutti.train.cuda_graph import check_graph

            check_graph(self.recipe, self.world.device, self.world.size)
        return dataset, schedule

    def _loaders(self, dataset: Dataset) -> tuple[Loader, Loader]:
        mesh, data = self.engine.mesh, self.recipe.data
        loader = Loader(
            dataset.train,
            self.schedule.global_batch,
            rank=mesh.data_rank,
            ranks=mesh.layout.data_ranks,
            seed=self.recipe.length.seed,
            drop_last=self.recipe.batching.drop_last,
            shares=self.schedule.shares,
            device=self.world.device,
            data_on_device=data.data_on_device,
            workers=data.workers,
        )
        return loader, evaluation_loader(
            dataset.test,
            self.schedule.rank_batch,
            rank=mesh.data_rank,
            ranks=mesh.layout.data_ranks,
            device=self.world.device,
            data_on_device=data.data_on_device,
        )

    def run(self) -> Outcome:
        """Train until the last step, or until a signal requests a stop."""
        progress = ProgressReport(self.schedule.steps, self.step, shown=self.world.is_first)
        self.status_sync = StatusSync(self.world.rank, self.world.size, self.step, self.timer)
        self.stragglers = Stragglers(self.step)
        stopped = False
        loss = float("nan")
        try:
            while self.step < self.schedule.steps and not stopped:
                steps = self._steps_to_next_event()
                self.status_sync.add(self.runner.run(steps), self.timer.take_forward_seconds())
                self.step += steps
                evaluating, saving = self._due()
                last = self.step == self.schedule.steps
                if self.step < self.status_sync.next_at and not (evaluating or saving or last):
                    continue
                status = self.status_sync.sync(self.runner.take_rank_samples())
                loss, stopped = status.losses[-1], status.stop and not last
                self._report(status, progress)
                if evaluating and not stopped:
                    self._evaluate(progress)
                if saving or (stopped and self._saves):
                    self._save()
                self.status_sync.restart_clock()
            if self._saves:
                self.checkpoints.wait()
        finally:
            # The signal handlers are restored only now, when the checkpoint is complete: a second
            # signal must not interrupt the checkpoint that the first signal requested.
            self.status_sync.close()
            self.runner.close()
            self.test_loader.close()
            progress.close()
            self.metrics.close()
            if "checkpoints" in vars(self):
                self.checkpoints.close()
        # Without checkpoints the run cannot be resumed, so it has ended and is not "stopped".
        failed = self.checkpoints.failed if self._saves else {}
        return Outcome(self._summary(loss), stopped and self._saves, failed)

    def _steps_to_next_event(self) -> int:
        """Return the steps to the next sync, evaluation or checkpoint; equal on all ranks."""
        length = self.recipe.length
        events = [self.schedule.steps, self.status_sync.next_at]
        events.append(self.step + self.loader.sampler.steps_left(self.loader.position))
        for every in (length.evaluate_every, length.checkpoint_every):
            if every:
                events.append((self.step // every + 1) * every)
        return max(1, min(events) - self.step)

    def _due(self) -> tuple[bool, bool]:
        """Return whether to evaluate and whether to save: every N steps, or after each epoch."""
        length = self.recipe.length

        def due(every: int | None) -> bool:
            epoch_ended = self.loader.position.sample == 0
            at_step = self.step % every == 0 if every else epoch_ended
            return at_step or self.step == self.schedule.steps

        evaluating, saving = due(length.evaluate_every), due(length.checkpoint_every)
        return length.evaluate and evaluating, self._saves and saving

    def _report(self, status: Status, progress: ProgressReport) -> None:
        if status.nonfinite is not None:
            step, rank = status.nonfinite
            raise LossNotFinite(
                f"the loss of step {step} is not finite, first on rank {rank}: lower --lr, add "
                "--clip or --warmup, or look at that step's data"
            )
        samples = self.runner.samples - self._samples_reported
        self._samples_reported = self.runner.samples
        text = self.speed.describe(status, samples)
        for offset, loss in enumerate(status.losses):
            self.metrics.write(status.first_step + offset, loss=loss)
        self.metrics.write(
            status.last_step,
            seconds_per_step=status.seconds / len(status.losses),
            samples_per_s=samples / status.seconds,
            input_seconds=self.runner.take_input_seconds(),
            wait_fraction=self.stragglers.add(status)[self.world.rank],
        )
        self.metrics.flush()
        progress.show(self.step, f"loss {status.losses[-1]:.4f}  {text}")
        if (warning := self.stragglers.warning()) is not None:
            progress.print(f"step {self.step}: {warning}")
        # The rates of the steps from step 0 to the first status sync are not used: warm-up.
        measured = self.recipe.batching.split == "measured" and status.first_step > 0
        if measured and all(rate > 0 for rate in status.rates):
            self.shares = measured_shares(status.rates, self.shares)
            self.loader.set_shares(self.shares)

    def _evaluate(self, progress: ProgressReport) -> None:
        from tutti.train.evaluate import evaluate

        self.engine.share_buffers()
        self.score = evaluate(
            self.engine, self.test_loader, self.task, self.stepper.example, self.stepper.autocast
        )
        score = self.score
        self.metrics.write(self.step - 1, test_loss=score.loss, test_accuracy=score.accuracy)
        self.metrics.flush()
        progress.print(
            f"step {self.step}: test loss {score.loss:.4f}, accuracy {100 * score.accuracy:.2f} % "
            f"of {score.count:,}"
        )

    def _save(self) -> None:
        """Write a checkpoint of everything that `_resume` needs."""
        schedule = self.schedule
        self.engine.share_buffers()
        self.checkpoints.save(
            self.step,
            self.model,
            self.optimizer,
            {
                "samples": self.runner.samples,
                "data": self.loader.state_dict(),
                "scaler": self.stepper.scaler.state_dict(),
                "shares": self.shares,
                "ranks": self.world.size,
                "global_batch": schedule.global_batch,
                "total_samples": schedule.samples,
                "warmup_samples": schedule.warmup_samples,
                "steps": schedule.steps,
                "epochs": self.recipe.length.epochs,
                "layout": str(schedule.layout),
                "noise": rng_axes(self.engine.splits_sequence),
            },
            aliases=self.engine.aliases,
        )

    def _resume(self) -> int:
        """Load the last valid checkpoint; returns the number of samples trained on so far.

        The number of ranks and the layout may differ from those of the checkpoint.
        """
        recipe = self.recipe
        if not self.checkpoints.steps():
            self.notes.append("there is no checkpoint yet: the run starts from the beginning")
            return 0
        # Learning rate, weight decay and so on come from the recipe, not from the checkpoint.
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        loaded = self.checkpoints.load(self.model, self.optimizer, aliases=self.engine.aliases)
        for group, of_recipe in zip(self.optimizer.param_groups, options, strict=True):
            group.update(of_recipe)
        state, self.step = loaded.state, loaded.step
        self.notes += [f"resumed at step {self.step}", *loaded.notes]
        if recipe.engine.compress == "powersgd":
            self.notes.append("PowerSGD's error feedback is not saved: it starts from zero")
        if (reason := self._rng_mismatch(state)) is not None:
            self.engine.seed_rng(recipe.length.seed, self.step)
            self.notes.append(f"{reason}: random generators are seeded anew")
        self.loader.load_state_dict(state["data"])
        if state["global_batch"] != self.schedule.global_batch:
            self.schedule = _rescheduled(self.schedule, state, self.step, recipe.length)
        if state["scaler"] and self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(state["scaler"])
        measured = recipe.batching.split == "measured" and state["shares"] is not None
        if measured and len(state["shares"]) == self.loader.ranks:
            self.shares = [float(share) for share in state["shares"]]
            self.loader.set_shares(self.shares)
        return int(state["samples"])

    def _rng_mismatch(self, state: dict[str, Any]) -> str | None:
        """Return why the saved state of the generators cannot be used; None if it can."""
        layout = self.schedule.layout
        if state["layout"] != str(layout):
            return f"saved under {state['layout']}"
        # --no-sequence-parallel, for example, changes which ranks draw the same numbers.
        before = state.get("noise", ("dp", "shard"))
        changed = {*before} ^ {*rng_axes(self.engine.splits_sequence)}
        split = [axis for axis in changed if layout.axes[axis] > 1]
        return f"saved where ranks of {' and '.join(split)} drew other numbers" if split else None

    def _summary(self, loss: float) -> dict[str, Any]:
        score = self.score
        return {
            "steps": self.step,
            "samples": self.runner.samples,
            "samples_per_s": self.speed.samples_per_s,
            "final_loss": loss,
            "test_loss": None if score is None else score.loss,
            "test_accuracy": None if score is None else score.accuracy,
            "layout": str(self.schedule.layout),
            "world": {"size": self.world.size, **self.world.row()},
            "environment": describe_environment(),
            "plan": {**asdict(self.schedule), "layout": str(self.schedule.layout)},
            "memory": self._memory(),
            **self.speed.summary(),
            "sharing_note": self.world.sharing_note,
        }

    def _memory(self) -> dict[str, Any]:
        """Return the peak memory of every rank in bytes, since its process began."""
        device = self.world.device
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: in KiB
        peaks = gather_json([on_host, on_device])
        return {
            "host_peak_bytes": [host for host, _ in peaks],
            "device_peak_bytes": None if on_device is None else [cuda for _, cuda in peaks],
        }


def _rescheduled(
    schedule: BatchSchedule, state: dict[str, Any], step: int, length: Length
) -> BatchSchedule:
    """Return the schedule of a run that is resumed with another global batch.

    The total number of samples, and the learning rate as a function of samples, stay the same,
    unless the recipe now has another length.
    """
    done, total, batch = int(state["samples"]), int(state["total_samples"]), schedule.global_batch
    wanted = length.steps
    if wanted is None and length.epochs != state.get("epochs", length.epochs):
        total = schedule.samples
    steps = step + max(0, math.ceil((total - done) / batch))
    reason = f"what is left of {total:,} samples, in steps of {batch}"
    if wanted is not None and wanted != state.get("steps", wanted):
        steps, reason = wanted, "asked for"
        total = done + max(0, wanted - step) * batch
    return replace(
        schedule,
        samples=total,
        warmup_samples=int(state["warmup_samples"]),
        steps=steps,
        reasons={**schedule.reasons, "steps": reason},
    )


def _engine_options(recipe: Recipe, world: World) -> EngineOptions:
    """Return the engine options; one rank uses `single`, because DDP would only copy gradients."""
    alone = world.size == 1 and recipe.engine.engine == "ddp"
    return EngineOptions(engine="single") if alone else recipe.engine


def _waits_only_after_backward(recipe: Recipe, schedule: BatchSchedule) -> bool:
    replicas = schedule.layout.only_replicas and schedule.layout.dp > 1
    return replicas and not (recipe.engine.sync_batchnorm or recipe.data.padded)


def _as_json(recipe: Recipe) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return values
