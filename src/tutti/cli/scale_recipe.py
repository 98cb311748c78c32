"""A recipe with several numbers of ranks: the flags of tutti train to add for each number."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.cli.train import Train, read_flags
from tutti.scale.scale_job import RANKS, Mode
from tutti.train.batch_schedule import make_schedule
from tutti.world.errors import UsageError

# Number of samples for a trial schedule, because the real dataset is not loaded here.
_MANY_SAMPLES = 1 << 40


@dataclass(frozen=True)
class ScaledRecipe:
    """A recipe, given by flags of tutti train. `steps` is the number of steps of each run."""

    flags: Sequence[str]
    sizes: Sequence[int]
    mode: Mode
    steps: int

    def extra_flags(self, ranks: int, swept: dict[str, str]) -> list[str]:
        """Return the flags to add for a number of ranks and the values of a sweep."""
        words = [word for flag, value in swept.items() for word in (f"--{flag}", value)]
        words += ["--steps", str(self.steps), "--no-evaluate"]
        words += ["--checkpoint-every", str(self.steps)]  # not within the timed steps
        batch = self._global_batch(read_train_flags([*self.flags, *words], ranks))
        return words if batch is None else [*words, "--global-batch", str(batch)]

    def check(self, sweep: Sequence[dict[str, str]]) -> None:
        """Raise UsageError if tutti train would reject the flags for any number of ranks."""
        for swept in sweep:
            for ranks in self.sizes:
                words = [*self.flags, *self.extra_flags(ranks, swept)]
                _check_schedule(read_train_flags(words, ranks), ranks)

    def _global_batch(self, options: Train) -> int | None:
        """Return the value of --global-batch to add, or None.

        In strong scaling, all runs use the global batch of the smallest number of ranks.
        """
        given = options.settings.batching.global_batch
        if self.mode == "weak":
            if given is not None:
                raise UsageError(
                    f"--global-batch {given} is shared by all ranks, but --mode weak keeps the "
                    "batch of each rank: use --batch, or --mode strong"
                )
            return None
        if given:
            return None
        return make_schedule(options.settings, self.sizes[0], _MANY_SAMPLES).global_batch


def read_train_flags(flags: Sequence[str], ranks: int) -> Train:
    """Parse flags of tutti train, with {ranks} replaced by the number of ranks."""
    options, _ = read_flags([flag.replace(RANKS, str(ranks)) for flag in flags], "tutti scale")
    for name in ("resume", "profile", "lr_sweep"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} works with tutti train only: leave it out")
    return options


def _check_schedule(options: Train, ranks: int) -> None:
    try:
        make_schedule(options.settings, ranks, _MANY_SAMPLES)
    except UsageError as error:
        batch = options.settings.batching.global_batch
        shared = f" (strong scaling: all runs share {batch} samples)" if batch else ""
        cure = ", or --mode weak" if batch else ""
        raise UsageError(f"with {ranks} ranks{shared}: {error}{cure}") from None
