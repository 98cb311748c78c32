"""The training run: set up in the order in which things depend on each other, then the loop."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from tutti.data import Dataset, Loader, evaluation_loader
from tutti.data.split import measured_shares
from tutti.machine.environment import describe_environment
from tutti.models.config import GPTConfig
from tutti.parallel.build import build_engine
from tutti.parallel.options import EngineOptions
from tutti.train.arrivals import Arrivals
from tutti.train.batch_schedule import BatchSchedule, make_schedule
from tutti.train.checkpoint import Checkpoints
from tutti.train.datasets import load_dataset
from tutti.train.evaluate import Score, evaluate
from tutti.train.graph import GraphRunner, check_graph
from tutti.train.models import build_model, fit
from tutti.train.optimizer import build_optimizer
from tutti.train.recipe import Recipe
from tutti.train.run_directory import RunDirectory
from tutti.train.runner import EagerRunner
from tutti.train.saved_run import resume_run, save_run
from tutti.train.step import Step, as_computed
from tutti.train.task import Task
from tutti.train.telemetry import (
    Metrics,
    ProgressReport,
    Status,
    StatusSync,
    Stragglers,
    Throughput,
)
from tutti.train.together import together
from tutti.world.exchange import check_same
from tutti.world.world import World


class LossNotFinite(Exception):
    """The loss became NaN or infinite; the message names the step and the rank."""


@dataclass
class Outcome:
    """How a run ended."""

    summary: dict[str, Any]
    stopped: bool  # by a signal, after a checkpoint


class Trainer:
    """Trains one recipe in one world, from `run()` to its outcome."""

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

        # What may go wrong on one rank only (data that one host lacks) is agreed on before the
        # first collective that the others would wait in.
        dataset, self.plan, model = together(self._prepare)
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes repeat: let it choose by measurement

        dtype = torch.float64 if recipe.compute.precision == "float64" else torch.float32
        self.model: nn.Module = model.to(world.device, dtype)
        check_same(world, recipe=_for_check(recipe), model=self.model)
        example = dataset.train.batch([0])[0].to(world.device)
        self.engine = build_engine(
            self.model,
            world,
            _engine_options(recipe, world),
            recipe.parallel,
            example=as_computed(example, self.model),
            microbatches=self.plan.accumulation,
            microbatch_size=self.plan.rank_batch,
            recompute=recipe.compute.checkpoint_activations,
            compile=recipe.compute.compile and world.size > 1,
        )
        self.model = self.engine.model  # this rank's part; --sync-batchnorm replaces layers
        # Weights are the same on every rank; from here on ranks draw numbers of their own.
        self.engine.seed_noise(recipe.length.seed)
        self.optimizer = build_optimizer(
            self.model, recipe.optimization, self.plan.peak_lr, recipe.compute.cuda_graph
        )
        self.task = Task(padded=recipe.data.padded)
        self.arrivals = Arrivals(world.device, known=_meets_once(recipe, self.plan))
        self.stepper = Step(
            self.engine,
            self.optimizer,
            self.task,
            recipe.compute,
            example,
            self.plan.accumulation,
            recipe.optimization.clip,
            measure=recipe.batching.split == "measured",
            arrivals=self.arrivals,
        )
        self.loader, self.test_loader = together(lambda: self._loaders(dataset))
        runner = GraphRunner if recipe.compute.cuda_graph else EagerRunner
        self.runner = runner(self.stepper, self.loader, self.plan, recipe)
        self.checkpoints = Checkpoints(directory.checkpoints, keep=recipe.length.keep)
        board = directory.path / "tensorboard" if tensorboard else None
        self.metrics = Metrics(directory.metrics, world.rank, board)
        architecture = fit(recipe.architecture, dataset) if _is_gpt(recipe) else None
        seq_len = dataset.input_shape[0] if architecture else 0
        self.speed = Throughput(world, recipe.compute.precision, architecture, seq_len)
        self.step = 0
        self.notes: list[str] = []
        self.shares: list[float] | None = None
        self.score: Score | None = None
        if resume:
            resume_run(self)
        self._samples_reported = self.runner.samples
        self.metrics.rewind(self.step)

    def _prepare(self) -> tuple[Dataset, BatchSchedule, nn.Module]:
        dataset = load_dataset(self.recipe)
        plan = make_schedule(self.recipe, self.world.size, len(dataset.train))
        if self.recipe.compute.cuda_graph:
            check_graph(self.recipe, self.world.device, self.world.size)
        torch.manual_seed(self.recipe.length.seed)
        return dataset, plan, build_model(self.recipe, dataset)

    def _loaders(self, dataset: Dataset) -> tuple[Loader, Loader]:
        grid, data = self.engine.grid, self.recipe.data
        loader = Loader(
            dataset.train,
            self.plan.global_batch,
            rank=grid.data_rank,
            ranks=grid.layout.data_ranks,
            seed=self.recipe.length.seed,
            drop_last=self.recipe.batching.drop_last,
            shares=self.plan.shares,
            device=self.world.device,
            data_on_device=data.data_on_device,
            workers=data.workers,
        )
        return loader, evaluation_loader(
            dataset.test,
            self.plan.rank_batch,
            rank=grid.data_rank,
            ranks=grid.layout.data_ranks,
            device=self.world.device,
            data_on_device=data.data_on_device,
        )

    def run(self) -> Outcome:
        """Train to the end, or to a signal."""
        progress = ProgressReport(self.plan.steps, self.step, shown=self.world.is_first)
        self.status_sync = StatusSync(self.world.rank, self.world.size, self.step, self.arrivals)
        self.stragglers = Stragglers(self.step)
        stopped = False
        loss = float("nan")
        try:
            while self.step < self.plan.steps and not stopped:
                steps = self._steps_to_next_event()
                self.status_sync.add(self.runner.run(steps), self.stepper.take_forward_seconds())
                self.step += steps
                evaluating, saving = self._due()
                last = self.step == self.plan.steps
                if self.step < self.status_sync.next_at and not (evaluating or saving or last):
                    continue
                status = self.status_sync.sync(self.runner.take_rank_samples())
                loss, stopped = status.losses[-1], status.stop and self.step < self.plan.steps
                self._report(status, progress)
                if evaluating and not stopped:
                    self._evaluate(progress)
                if saving or (stopped and self._saves):
                    save_run(self)
                self.status_sync.restart_clock()
            self.checkpoints.wait()
        finally:
            # Last: until then a second signal must not end what the first one asked for.
            self.status_sync.close()
            self.runner.close()
            self.test_loader.close()
            progress.close()
            self.metrics.close()
            self.checkpoints.close()
        # Without checkpoints there is nothing to go on from: the measurement ends here.
        return Outcome(self._summary(loss), stopped and self._saves)

    def _steps_to_next_event(self) -> int:
        """How many steps may run before anything else is to be done: the same on every rank."""
        length = self.recipe.length
        events = [self.plan.steps, self.status_sync.next_at]
        events.append(self.step + self.loader.sampler.steps_left(self.loader.position))
        for every in (length.evaluate_every, length.checkpoint_every):
            if every:
                events.append((self.step // every + 1) * every)
        return max(1, min(events) - self.step)

    def _due(self) -> tuple[bool, bool]:
        """Whether to evaluate, and whether to save, after the steps so far."""
        length = self.recipe.length
        last = self.step == self.plan.steps
        epoch_ended = self.loader.position.sample == 0
        evaluating = epoch_ended
        if length.evaluate_every:
            evaluating = self.step % length.evaluate_every == 0
        saving = epoch_ended
        if length.checkpoint_every:
            saving = self.step % length.checkpoint_every == 0
        return length.evaluate and (evaluating or last), self._saves and (saving or last)

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
        measured = self.recipe.batching.split == "measured" and status.first_step > 0
        if measured and all(rate > 0 for rate in status.rates):  # the first steps are warm-up
            self.shares = measured_shares(status.rates, self.shares)
            self.loader.set_shares(self.shares)

    def _evaluate(self, progress: ProgressReport) -> None:
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

    def _summary(self, loss: float) -> dict[str, Any]:
        score = self.score
        return {
            "steps": self.step,
            "samples": self.runner.samples,
            "samples_per_s": self.speed.samples_per_s,
            "final_loss": loss,
            "test_loss": None if score is None else score.loss,
            "test_accuracy": None if score is None else score.accuracy,
            "layout": str(self.plan.layout),
            "world": {"size": self.world.size, **self.world.row()},
            "environment": describe_environment(),
            "plan": {**asdict(self.plan), "layout": str(self.plan.layout)},
            **self.speed.summary(),
            "sharing_note": self.world.sharing_note,
        }


def _engine_options(recipe: Recipe, world: World) -> EngineOptions:
    """In a world of one nobody is to be synchronised with, and DDP would only copy."""
    alone = world.size == 1 and recipe.engine.engine == "ddp"
    return EngineOptions(engine="single") if alone else recipe.engine


def _meets_once(recipe: Recipe, plan: BatchSchedule) -> bool:
    """Whether ranks wait for each other at the end of backward only: see Arrivals."""
    replicas = plan.layout.only_replicas and plan.layout.dp > 1
    return replicas and not (recipe.engine.sync_batchnorm or recipe.data.padded)


def _is_gpt(recipe: Recipe) -> bool:
    return recipe.model == "gpt" and isinstance(recipe.architecture, GPTConfig)


def _for_check(recipe: Recipe) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return parts
