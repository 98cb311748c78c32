"""The training run: set-up, the loop over steps, evaluation, checkpoints and resuming."""

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from tutti.comm.operation import profiling
from tutti.data import DataError
from tutti.data.dataset import Dataset
from tutti.data.loader import Batch, Loader, evaluation_loader
from tutti.data.nested import map_tensors
from tutti.data.split import measured_shares
from tutti.machine.environment import describe_environment
from tutti.measure.units import format_bytes
from tutti.models.config import GPTConfig
from tutti.parallel.apply import build_engine
from tutti.parallel.layout import EngineOptions
from tutti.parallel.materialize import check_replicas_equal
from tutti.parallel.rng import rng_axes
from tutti.train.best_score import BestScore, parse_keep_best
from tutti.train.ema import MovingAverage
from tutti.train.init import (
    agree,
    build_meta_model,
    build_optimizer,
    build_task,
    check_same_dataset,
    fit,
    load_dataset,
    set_lr,
)
from tutti.train.memory import MemoryByCause, peak_bytes
from tutti.train.out_of_memory import Explainer
from tutti.train.recipe import Recipe
from tutti.train.recipe_check import check_recipe
from tutti.train.run_directory import Metrics, RunDirectory, finite
from tutti.train.step import AUTOCAST, Score, Step, as_model_dtype, evaluate
from tutti.train.telemetry import (
    ProgressReport,
    Status,
    StatusSync,
    StepTimer,
    Stragglers,
    Throughput,
)
from tutti.train.training_schedule import TrainingSchedule, make_schedule
from tutti.world.errors import UsageError
from tutti.world.exchange import check_same, gather_json
from tutti.world.world import World

if TYPE_CHECKING:
    from tutti.train.checkpoint import Checkpoints

_NO_SPAN = nullcontext()


class LossNotFinite(Exception):
    """The loss became NaN or infinite. The message names the step and the rank."""


@dataclass
class Outcome:
    """The result of a run."""

    summary: dict[str, Any]
    stopped: bool  # whether a signal ended the run early, after saving a checkpoint
    not_written: list[str]  # incomplete files, each with the reason; the same list on every rank


class Runner:
    """Runs steps: takes batches from the loader, sets the learning rate, counts samples."""

    def __init__(
        self, step: Step, loader: Loader, schedule: TrainingSchedule, recipe: Recipe
    ) -> None:
        self.step = step
        self.loader = loader
        self.schedule = schedule
        self.recipe = recipe
        # Number of samples that all ranks have processed since the start of the run. The learning
        # rate depends on this number.
        self.samples = 0
        self._batches: Iterator[Batch] | None = None
        self._rank_samples = 0
        self._input_seconds = 0.0
        # `_lrs` has the learning rate of each step since the last status sync. `_norms` has the
        # known gradient norms. Its keys are positions in `_lrs`.
        self._lrs: list[float] = []
        self._norms: dict[int, Tensor] = {}

    def run(self, steps: int) -> Tensor:
        """Run `steps` steps. Return this rank's contribution to each step's loss, on the device."""
        if self._batches is None:
            self._batches = self.loader.stream()
        losses = []
        for remaining in reversed(range(steps)):
            began = time.perf_counter()
            # In a profiler trace, this span shows the time that the loop waits for input.
            with record_function("tutti.input") if profiling() else _NO_SPAN:
                batch = next(self._batches)
            self._input_seconds += time.perf_counter() - began
            self.samples += batch.global_count
            self._rank_samples += batch.count
            lr = self.schedule.lr_at(self.samples, self.recipe)
            set_lr(self.step.optimizer, lr)
            # Without clipping, the gradient norm is measured only in the last step, for metrics.
            losses.append(self.step(batch, measure_norm=remaining == 0))
            self._log(lr)
        return torch.stack(losses)

    def _log(self, lr: float) -> None:
        """Record the learning rate and the gradient norm of a step."""
        if self.step.grad_norm is not None:
            self._norms[len(self._lrs)] = self.step.grad_norm
        self._lrs.append(lr)

    def close(self) -> None:
        """Stop the loader, and release batches that were loaded for later steps."""
        self._batches = None
        self.loader.close()

    def take_counts(self) -> tuple[int, float]:
        """Return (samples, seconds of waiting for input) of this rank since the last call."""
        taken = self._rank_samples, self._input_seconds
        self._rank_samples, self._input_seconds = 0, 0.0
        return taken

    def take_curves(self) -> list[dict[str, float | None]]:
        """Return one row per step since the last call: `lr`, and `grad_norm` if it is known.

        This method waits for the device. A norm that is not finite is returned as None.
        """
        norms = torch.stack(list(self._norms.values())).tolist() if self._norms else []
        rows: list[dict[str, float | None]] = [{"lr": lr} for lr in self._lrs]
        for position, norm in zip(self._norms, norms, strict=True):
            rows[position]["grad_norm"] = finite(norm)
        self._lrs, self._norms = [], {}
        return rows


class Trainer:
    """Trains a recipe. `run()` returns the outcome."""

    def __init__(
        self,
        world: World,
        recipe: Recipe,
        directory: RunDirectory,
        *,
        resume: bool = False,
        tensorboard: bool = False,
        wandb: str | None = None,
        save: bool = True,
        test_batches: int | None = None,
    ) -> None:
        """`wandb` is the project of --wandb. `test_batches` limits the batches of an evaluation."""
        self.world = world
        self.recipe = recipe
        self.directory = directory
        self._saves, self._wandb_project = save, wandb
        self._test_batches = test_batches
        hidden = recipe.compute.compile or recipe.compute.cuda_graph
        self.memory = MemoryByCause(world.device, counts_activations=not hidden)
        self.explainer = Explainer(world, recipe, self.memory)
        with self.explainer.explained():
            self._build(resume, tensorboard)

    def _build(self, resume: bool, tensorboard: bool) -> None:
        """Load the data, and build the model and the optimizer. If `resume`, load a checkpoint."""
        world, recipe, directory = self.world, self.recipe, self.directory
        precision = recipe.compute.precision
        dataset, self.schedule = agree(self._load_dataset)
        check_same_dataset(world, dataset, recipe.length.seed)
        self.explainer.schedule = self.schedule
        model, weights, notes = agree(lambda: build_meta_model(recipe, dataset))
        self.memory.begin_model(model)
        self.task = agree(lambda: build_task(recipe, dataset, model))
        parallel = recipe.parallel
        if recipe.task.loss != "cross_entropy":  # the other losses need unsharded logits
            parallel = replace(parallel, loss_parallel=False)
        check_same(world, recipe=json.loads(json.dumps(asdict(recipe), default=str)))
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # all steps have the same shapes
        example = map_tensors(lambda t: t.to(world.device), dataset.train.batch([0])[0])
        engine_options = recipe.engine
        if world.size == 1 and recipe.engine.engine == "ddp":
            # On one rank, DDP would copy gradients without any benefit.
            engine_options = EngineOptions(engine="single")
        self.engine = build_engine(
            model,
            world,
            engine_options,
            parallel,
            example=as_model_dtype(example, model),
            microbatches=self.schedule.accumulation,
            microbatch_size=self.schedule.rank_batch,
            recompute=recipe.compute.checkpoint_activations,
            compile=recipe.compute.compile and world.size > 1,
            autocast=AUTOCAST.get(precision),
            weights=weights,
        )
        # The engine's model has only this rank's layers, and --sync-batchnorm replaces batch norms.
        self.model = self.engine.model
        check_replicas_equal(self.model, self.engine.mesh)
        # From here on, data-parallel ranks draw different random numbers.
        self.engine.seed_rng(recipe.length.seed)
        self.optimizer = agree(
            lambda: build_optimizer(
                self.model, recipe.optimization, self.schedule.peak_lr, recipe.compute.cuda_graph
            )
        )
        decay = recipe.optimization.ema
        self.ema = None if decay is None else MovingAverage(self.model, decay)
        averages = [*self.ema.tensors.values()] if self.ema else []
        self.memory.begin_steps(self.engine, self.optimizer, self.schedule.accumulation, averages)
        layout = self.schedule.layout
        waits_in_step = recipe.engine.sync_batchnorm or recipe.data.padded
        self.timer = StepTimer(
            world.device,
            own_time=layout.only_replicas and layout.dp > 1 and not waits_in_step,
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
            self.memory,
            self.ema,
        )
        self.loader, self.test_loader = agree(lambda: self._loaders(dataset))
        board = directory.path / "tensorboard" if tensorboard else None
        self.metrics = agree(lambda: Metrics(directory.metrics, world.rank, board, self._wandb()))
        is_gpt = recipe.model == "gpt" and isinstance(recipe.architecture, GPTConfig)
        architecture = fit(recipe, dataset) if is_gpt else None
        is_text = is_gpt or recipe.model.startswith("hf:")
        seq_len = dataset.input_shape[0] if is_text and len(dataset.input_shape) == 1 else 0
        self.speed = Throughput(world, precision, architecture, seq_len)
        self.score: Score | None = None
        self.best: BestScore | None = None
        if recipe.length.keep_best is not None and recipe.length.evaluate:
            self.best = BestScore(*parse_keep_best(recipe.length.keep_best, self.task.metric_name))
        # True if a signal stopped the run at a step whose evaluation was then skipped.
        self._evaluation_missed = False
        self.notes: list[str] = notes
        self.step, samples = 0, 0
        self.shares: list[float] | None = None
        if resume:
            samples = self._resume()
        runner_class: type[Runner] = Runner
        if recipe.compute.cuda_graph:
            from tutti.train.cuda_graph import GraphRunner

            runner_class = GraphRunner
        self.runner = runner_class(self.stepper, self.loader, self.schedule, recipe)
        self.runner.samples = self._samples_reported = samples
        if self._saves:
            self.metrics.rewind(self.step)

    def _wandb(self) -> dict[str, Any] | None:
        """Return the arguments of wandb.init, or None without --wandb."""
        if self._wandb_project is None:
            return None
        config = json.loads(json.dumps(asdict(self.recipe), default=str))
        return {
            "project": self._wandb_project,
            "name": self.directory.path.name,
            "dir": str(self.directory.path),
            "config": {**config, "ranks": self.world.size},
        }

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        """The checkpoints of this run, created at the first save or by --resume."""
        from tutti.train.checkpoint import Checkpoints

        return Checkpoints(self.directory.checkpoints, keep=self.recipe.length.keep)

    def _load_dataset(self) -> tuple[Dataset, TrainingSchedule]:
        check_recipe(self.recipe, self.world.size, self.world.device.type)
        dataset = load_dataset(self.recipe)
        return dataset, make_schedule(self.recipe, self.world.size, len(dataset.train))

    def _loaders(self, dataset: Dataset) -> tuple[Loader, Loader]:
        mesh = self.engine.mesh
        placement: dict[str, Any] = {
            "rank": mesh.data_rank,
            "ranks": mesh.layout.data_ranks,
            "device": self.world.device,
            "data_on_device": self.recipe.data.data_on_device,
        }
        loader = Loader(
            dataset.train,
            self.schedule.global_batch,
            seed=self.recipe.length.seed,
            drop_last=self.recipe.batching.drop_last,
            shares=self.schedule.shares,
            workers=self.recipe.data.workers,
            **placement,
        )
        return loader, evaluation_loader(dataset.test, self.schedule.rank_batch, **placement)

    def run(self) -> Outcome:
        """Train until the last step, or until a signal requests a stop."""
        with self.explainer.explained():
            return self._train()

    def _train(self) -> Outcome:
        progress = ProgressReport(self.schedule.steps, self.step, shown=self.world.is_first)
        self.status_sync = StatusSync(
            self.world.rank, self.world.size, self.step, self.timer, can_stop=self._saves
        )
        self.stragglers = Stragglers(self.step)
        stopped, failed = False, True
        loss = float("nan")
        try:
            if self._evaluation_missed:
                self._evaluation_missed = False
                if (self._evaluate(progress) or self.ended_early) and self._saves:
                    self._save()
                self.status_sync.restart_clock()
            while self.step < self.schedule.steps and not (stopped or self.ended_early):
                steps = self._steps_to_next_event()
                self.status_sync.add(self.runner.run(steps), self.timer.take_forward_seconds())
                self.step += steps
                length = self.recipe.length
                evaluating = length.evaluate and self._is_due(length.evaluate_every)
                saving = self._saves and self._is_due(length.checkpoint_every)
                last = self.step == self.schedule.steps
                if self.step < self.status_sync.next_at and not (evaluating or saving or last):
                    continue
                rank_samples, input_seconds = self.runner.take_counts()
                status = self.status_sync.sync(rank_samples)
                loss, stopped = status.losses[-1], status.stop and not last
                self._report(status, input_seconds, progress)
                self._evaluation_missed = evaluating and stopped
                if evaluating and not stopped and self._evaluate(progress):
                    saving = self._saves
                if saving or ((stopped or self.ended_early) and self._saves):
                    self._save()
                self.status_sync.restart_clock()
            if self._saves:
                self.checkpoints.wait()
            failed = False
        except DataError as error:  # a sample cannot be used: show one line without a traceback
            raise UsageError(f"--dataset {self.recipe.data.dataset}: {error}") from None
        finally:
            # Restore the signal handlers only after the checkpoint is complete. Otherwise a second
            # signal could interrupt the checkpoint that the first signal requested.
            self.status_sync.close()
            progress.close()
            self.close(failed)
        summary = self._summary(loss)
        missing = [item for rank in gather_json(self.metrics.failed) for item in rank.items()]
        reasons = [f"{file}: {reason}" for file, reason in missing]
        if self._saves and self.checkpoints.failed:
            step, reason = max(self.checkpoints.failed.items())
            count = len(self.checkpoints.failed)
            reasons.insert(0, f"{count} checkpoint{'s' * (count > 1)} (step {step}: {reason})")
        return Outcome(summary, stopped, reasons)

    def _steps_to_next_event(self) -> int:
        """Return the number of steps to the next event. It is the same number on all ranks.

        An event is a status sync, an evaluation, a checkpoint, the end of an epoch, or the end of
        the run.
        """
        length = self.recipe.length
        events = [self.schedule.steps, self.status_sync.next_at]
        events.append(self.step + self.loader.sampler.steps_left(self.loader.position))
        for every in (length.evaluate_every, length.checkpoint_every):
            if every:
                events.append((self.step // every + 1) * every)
        return max(1, min(events) - self.step)

    def _is_due(self, every: int | None) -> bool:
        """Return whether an evaluation or a checkpoint is due after the current step.

        It is due every `every` steps, or after each epoch if `every` is None, and at the end of the
        run.
        """
        epoch_ended = self.loader.position.sample == 0
        at_step = self.step % every == 0 if every else epoch_ended
        return at_step or self.step == self.schedule.steps

    def _report(self, status: Status, input_seconds: float, progress: ProgressReport) -> None:
        if status.nonfinite is not None:
            step, rank = status.nonfinite
            raise LossNotFinite(
                # The message counts steps from 1, as the progress report does. Metrics count steps
                # from 0.
                f"the loss of step {step + 1} is not finite, first on rank {rank}. Lower --lr, add "
                "--clip or --warmup, or check the data of this step."
            )
        samples = self.runner.samples - self._samples_reported
        self._samples_reported = self.runner.samples
        rates = self.speed.add(status, samples)
        curves = zip(status.losses, self.runner.take_curves(), strict=True)
        for step, (loss, known) in enumerate(curves, status.first_step):
            self.metrics.add(step, loss=loss, **known)
        self.metrics.add(
            status.first_step + len(status.losses) - 1,
            seconds_per_step=status.seconds / len(status.losses),
            samples_per_s=samples / status.seconds,
            **({"tokens_per_s": tokens} if (tokens := self.speed.tokens_per_s) else {}),
            peak_memory_bytes=self._peak_memory(),
            input_seconds=input_seconds,
            wait_fraction=self.stragglers.add(status)[self.world.rank],
        )
        self.metrics.flush()
        loss, memory = status.losses[-1], format_bytes(self._peak_memory())
        parts = [(f"loss {loss:.4f}", f"loss {loss:.3g}"), rates[0], (f"memory {memory}", memory)]
        progress.show(self.step, [*parts, *rates[1:]])
        if (warning := self.stragglers.warning()) is not None:
            progress.print(f"step {self.step}: {warning}")
        # Ignore the rates of the first status sync, because its steps include the warm-up.
        measured = self.recipe.batching.split == "measured" and status.first_step > 0
        if measured and all(rate > 0 for rate in status.rates):
            self.shares = measured_shares(status.rates, self.shares)
            self.loader.set_shares(self.shares)

    def _peak_memory(self) -> int:
        """Return the peak memory of this rank on its device, in bytes."""
        on_gpu = self.world.device.type == "cuda"
        return torch.cuda.max_memory_reserved(self.world.device) if on_gpu else peak_bytes()

    def evaluate_only(self) -> Score:
        """Return the score of the loaded checkpoint on the test data. Writes no file."""
        if not self.step:
            raise UsageError("--evaluate-only: the run has no checkpoint yet")
        try:
            return self._score()
        except DataError as error:
            raise UsageError(f"--dataset {self.recipe.data.dataset}: {error}") from None
        finally:
            self.close()

    def close(self, failed: bool = False) -> None:
        """Stop the threads and processes of loaders, metrics and checkpoints."""
        self.runner.close()
        self.test_loader.close()
        self.metrics.close(failed)
        if "checkpoints" in vars(self):
            self.checkpoints.close()

    def _score(self) -> Score:
        self.engine.share_buffers()
        example, autocast = self.stepper.example, self.stepper.autocast
        with self.ema.in_model() if self.ema else nullcontext():
            return evaluate(
                self.engine, self.test_loader, self.task, example, autocast, self._test_batches
            )

    @property
    def ended_early(self) -> bool:
        """Whether --patience ends the run. All ranks have the same value."""
        return self.best is not None and self.best.exhausted(self.recipe.length.patience)

    def _evaluate(self, progress: ProgressReport) -> bool:
        """Evaluate the model and report the score. Return whether it is the best score so far."""
        progress.announce(f"step {self.step}: evaluating on the test set", "evaluating")
        # All ranks use the score of rank 0, so that --patience ends all ranks at the same step.
        self.score = score = Score(*gather_json(astuple(self._score()))[0])
        self.metrics.add(self.step - 1, test_loss=finite(score.loss), **_metric_of(score))
        self.metrics.flush()
        metric = f", {score.describe()}" if score.name else ""
        progress.print(f"step {self.step}: test loss {score.loss:.4f}{metric} of {score.count:,}")
        if self.best is None:
            return False
        value = score.loss if self.best.name == "loss" else score.metric
        improved = self.best.add(self.step, value)
        if self.ended_early and self.step < self.schedule.steps:
            progress.print(f"step {self.step}: {self.describe_early_end()}")
        return improved

    def describe_early_end(self) -> str:
        """Return why --patience ends the run."""
        assert self.best is not None
        return (
            f"the run has ended early (--patience {self.recipe.length.patience}): "
            f"{self.best.evaluations_since} consecutive evaluations had no better score than "
            f"{self.best.describe()}"
        )

    def _save(self) -> None:
        """Save a checkpoint with all values that `_resume` needs."""
        schedule, best = self.schedule, self.best
        self.engine.share_buffers()
        score = None
        if best is not None and best.step == self.step:
            names = ("name", "value", "larger_is_better")
            score = {name: getattr(best, name) for name in names}
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
                "best": None if best is None else best.state_dict(),
                "evaluation_missed": self._evaluation_missed,
            },
            aliases=self.engine.aliases,
            ema=self.ema.tensors if self.ema else None,
            score=score,
        )

    def _resume(self) -> int:
        """Load the last valid checkpoint. Return the number of samples that the run has processed.

        The checkpoint may have been saved with another number of ranks and another layout.
        """
        recipe = self.recipe
        if not self.checkpoints.steps():
            self.notes.append("there is no checkpoint yet, so the run starts from the beginning")
            return 0
        # Optimizer options, such as weight decay, are taken from the recipe and not from the
        # checkpoint.
        recipe_options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        loaded = self.checkpoints.load(
            self.model,
            self.optimizer,
            aliases=self.engine.aliases,
            ema=self.ema.tensors if self.ema else None,
        )
        for group, options in zip(self.optimizer.param_groups, recipe_options, strict=True):
            group.update(options)
        state, self.step = loaded.state, loaded.step
        self.notes += [f"resumed at step {self.step}", *loaded.notes]
        if recipe.engine.compress == "powersgd":
            self.notes.append("PowerSGD's error feedback is not saved, so it starts from zero")
        if (reason := self._rng_mismatch(state)) is not None:
            self.engine.seed_rng(recipe.length.seed, self.step)
            self.notes.append(f"{reason}, so the random number generators get new seeds")
        if self.best is not None and not self.best.load_state_dict(state.get("best")):
            self.notes.append(
                f"--keep-best {recipe.length.keep_best}: the checkpoint has no such score, so "
                "earlier scores are ignored"
            )
        self._evaluation_missed = recipe.length.evaluate and state.get("evaluation_missed", False)
        self.loader.load_state_dict(state["data"])
        if state["global_batch"] != self.schedule.global_batch:
            self.schedule = self.schedule.resumed(state, self.step, recipe)
        if state["scaler"] and self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(state["scaler"])
        measured = recipe.batching.split == "measured" and state["shares"] is not None
        if measured and len(state["shares"]) == self.loader.ranks:
            self.shares = [float(share) for share in state["shares"]]
            self.loader.set_shares(self.shares)
        return int(state["samples"])

    def _rng_mismatch(self, state: dict[str, Any]) -> str | None:
        """Return why the saved random number generators cannot be restored, or None if they can."""
        layout = self.schedule.layout
        if state["layout"] != str(layout):
            return f"the checkpoint was saved in layout {state['layout']}"
        # Along the axes in `saved_axes`, ranks draw different random numbers. Flags such as
        # --no-sequence-parallel change this set of axes.
        saved_axes = state.get("noise", ("dp", "shard"))
        changed = {*saved_axes} ^ {*rng_axes(self.engine.splits_sequence)}
        axes = [axis for axis in changed if layout.axes[axis] > 1]
        return (
            f"flags changed whether ranks along {axes[0]} draw the same random numbers"
            if axes
            else None
        )

    def _summary(self, loss: float) -> dict[str, Any]:
        world, device, score = self.world, self.world.device, self.score
        # Peak memory in bytes of each rank since the start of its process.
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        peaks = gather_json([peak_bytes(), on_device, self.memory.summary()])
        return {
            "steps": self.step,
            "samples": self.runner.samples,
            "samples_per_s": self.speed.samples_per_s,
            "final_loss": loss,
            "test_loss": None if score is None else finite(score.loss),
            "test_accuracy": None,
            **({} if score is None else _metric_of(score)),
            "metric": self.task.metric_name,
            "best": None if self.best is None else self.best.state_dict(),
            "ended_early": self.ended_early and self.step < self.schedule.steps,
            "layout": str(self.schedule.layout),
            "world": {"size": world.size, **world.row()},
            "environment": describe_environment(),
            "plan": {**asdict(self.schedule), "layout": str(self.schedule.layout)},
            "memory": {
                "host_peak_bytes": [host for host, _, _ in peaks],
                "device_peak_bytes": None if on_device is None else [cuda for _, cuda, _ in peaks],
                "ranks": [{"rank": rank, **row} for rank, (_, _, row) in enumerate(peaks)],
            },
            **self.speed.summary(),
            "sharing_note": world.sharing_note,
        }


def _metric_of(score: Score) -> dict[str, float | None]:
    return {f"test_{score.name}": finite(score.metric)} if score.name else {}
