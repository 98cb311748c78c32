"""--lr-find: a range test of the learning rate (Smith, arXiv 1506.01186).

The test starts from the initial weights and increases the learning rate exponentially over a few
steps. The loss is first constant, then falls, then rises. At the learning rate with the smallest
loss, training is about to diverge. The suggested learning rate is a tenth of this rate.
"""

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean, stdev

from tutti.data import DataError
from tutti.measure.units import three_digits
from tutti.train.loop import Trainer
from tutti.train.recipe import Recipe
from tutti.train.telemetry import ProgressReport, StatusSync
from tutti.train.training_schedule import TrainingSchedule
from tutti.world.errors import UsageError

LOWEST, HIGHEST = 1e-7, 10.0
_DIVERGED = 4.0  # the test ends when the loss exceeds the smallest loss by this factor
_ROWS = 16  # number of rows of the printed curve


@dataclass(frozen=True)
class _RangeSchedule(TrainingSchedule):
    """A schedule whose learning rate grows exponentially from LOWEST to HIGHEST."""

    def lr_at(self, samples: int, recipe: Recipe) -> float:
        first = self.global_batch
        done = (samples - first) / max(1, self.samples - first)
        return float(LOWEST * (HIGHEST / LOWEST) ** min(1.0, max(0.0, done)))


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test: the learning rate and the loss of each step."""

    curve: list[tuple[float, float]]
    lr_factor: float
    """The factor of --lr-scale. The learning rate of a step is --lr × this factor."""

    def smoothed(self) -> list[float]:
        """Return, for each step, the mean loss in a window around the step."""
        half = max(1, len(self.curve) // 20)
        losses = [loss for _, loss in self.curve]
        windows = [losses[max(0, n - half) : n + half + 1] for n in range(len(losses))]
        return [fmean(window) for window in windows]

    def suggestion(self) -> float | None:
        """Return the suggested --lr, or None if the loss does not fall below its noise.

        The noise is the standard deviation in the first quarter of the curve, where the learning
        rate is too small to change the loss. The loss must fall by more than 3 times this value.
        """
        losses = self.smoothed()
        start = losses[: max(2, len(losses) // 4)]
        if len(losses) < 2 or min(losses) > fmean(start) - 3 * stdev(start):
            return None
        return self._lowest() / 10

    def _lowest(self) -> float:
        """Return the --lr with the smallest smoothed loss."""
        losses = self.smoothed()
        return self.curve[losses.index(min(losses))][0] / self.lr_factor

    def describe(self) -> list[str]:
        """Return the curve as lines of text, and the suggested learning rate."""
        if not self.curve:
            return ["no suggestion: the first loss is not finite. Check the data and the model."]
        losses = self.smoothed()
        step = max(1, math.ceil(len(losses) / _ROWS))
        rows = [(self.curve[n][0] / self.lr_factor, losses[n]) for n in range(0, len(losses), step)]
        low, high = min(losses), max(losses)
        width = 30
        lines = ["    --lr      loss"]
        for lr, loss in rows:
            bar = "▇" * round(width * (loss - low) / (high - low)) if high > low else ""
            lines.append(f"{lr:8.2e}  {loss:8.4f}  {bar}".rstrip())
        found = self.suggestion()
        if found is None:
            return [*lines, "no suggestion: the loss does not fall. Check the data and the model."]
        return [
            *lines,
            f"the loss is smallest at {three_digits(self._lowest())}",
            f"suggested (a tenth of it): --lr {three_digits(found)}",
        ]


def find_lr(trainer: Trainer, steps: int) -> RangeTest:
    """Run the range test with a trainer that has not run a step. All ranks must call this."""
    try:
        with trainer.explainer.explained():
            return _run_range_test(trainer, steps)
    except DataError as error:  # a sample cannot be used: show one line without a traceback
        raise UsageError(f"--dataset {trainer.recipe.data.dataset}: {error}") from None


def _run_range_test(trainer: Trainer, steps: int) -> RangeTest:
    world, runner, timer = trainer.world, trainer.runner, trainer.timer
    schedule = trainer.schedule
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    runner.schedule = _RangeSchedule(**values)
    curve: list[tuple[float, float]] = []
    progress = ProgressReport(steps, 0, shown=world.is_first)
    sync = StatusSync(world.rank, world.size, 0, timer, can_stop=False)
    try:
        while len(curve) < steps and not _has_diverged(curve):
            count = min(sync.next_at, steps) - len(curve)
            sync.add(runner.run(count), timer.take_forward_seconds())
            status = sync.sync(runner.take_counts()[0])
            rows = zip(runner.take_curves(), status.losses, strict=True)
            found = [(float(row["lr"] or 0.0), loss) for row, loss in rows]
            if status.nonfinite is not None:
                curve += found[: status.nonfinite[0] - status.first_step]
                break
            curve += found
            lr, loss = curve[-1]
            parts = [f"loss {loss:.4f}", f"lr {lr:.2e}"]
            progress.show(len(curve), [(part, part) for part in parts])
    finally:
        sync.close()
        progress.close()
        trainer.close()
    end = next((n for n in range(1, len(curve)) if _has_diverged(curve[:n])), len(curve))
    factor = schedule.peak_lr / trainer.recipe.optimization.lr
    return RangeTest(curve[:end], factor)


def _has_diverged(curve: list[tuple[float, float]]) -> bool:
    """Return whether the last two losses are far above the smallest loss."""
    losses = [loss for _, loss in curve]
    limit = _DIVERGED * min(losses, default=math.inf)
    return any(min(pair) > limit > 0 for pair in list(pairwise(losses))[-1:])
