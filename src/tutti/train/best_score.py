"""The best score of a run, for --keep-best (the checkpoint to keep) and --patience (early end)."""

import math
from dataclasses import dataclass
from typing import Any

from tutti.world.errors import UsageError

# Names of scores, and whether a larger value is better.
_LARGER_IS_BETTER = {"loss": False, "mse": False, "mae": False, "accuracy": True}


def parse_keep_best(text: str, metric: str | None) -> tuple[str, bool]:
    """Return the score's name, and whether a larger value is better.

    metric: the name of the run's metric, or None. tutti does not know whether larger values of a
    user's metric function are better, so the user must write min:NAME or max:NAME.
    """
    direction, colon, name = text.rpartition(":")
    known = ["loss", *([metric] if metric else [])]
    if name not in known:
        raise UsageError(
            f"--keep-best {text}: the evaluation has no {name or 'such score'}: use "
            f"{' or '.join(known)}"
        )
    if colon and direction not in ("min", "max"):
        raise UsageError(f"--keep-best {text}: use {name}, min:{name} or max:{name}")
    if colon:
        return name, direction == "max"
    if name not in _LARGER_IS_BETTER:
        raise UsageError(
            f"--keep-best {text}: use max:{name} if larger values are better, or min:{name}"
        )
    return name, _LARGER_IS_BETTER[name]


@dataclass
class BestScore:
    """The best score so far, and the number of evaluations since then."""

    name: str
    larger_is_better: bool
    value: float | None = None
    step: int | None = None
    evaluations_since: int = 0

    def add(self, step: int, value: float | None) -> bool:
        """Add the score of an evaluation. Return whether it is better than all scores before.

        A score that is NaN, infinite or unknown is never better.
        """
        if value is None or not math.isfinite(value) or not self._is_better(value):
            self.evaluations_since += 1
            return False
        self.value, self.step, self.evaluations_since = value, step, 0
        return True

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value > self.value if self.larger_is_better else value < self.value

    def exhausted(self, patience: int | None) -> bool:
        """Return whether `patience` evaluations in a row have not been better."""
        return patience is not None and self.evaluations_since >= patience

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any] | None) -> bool:
        """Restore the state. If the state belongs to another score, ignore it and return False."""
        if state is None:
            return True
        same = (state["name"], state["larger_is_better"]) == (self.name, self.larger_is_better)
        if same:
            self.value, self.step = state["value"], state["step"]
            self.evaluations_since = state["evaluations_since"]
        return same

    def describe(self) -> str:
        """Return the best score as text, such as `loss 0.3012 at step 120`."""
        if self.value is None:
            return f"NaN ({self.name})"
        return f"{self.name} {self.value:.4g} at step {self.step}"
