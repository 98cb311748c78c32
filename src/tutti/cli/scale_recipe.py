"""A recipe at several sizes: what each size adds to the flags of tutti train that were given."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.cli.train import Train, read_flags
from tutti.scale.job import RANKS, Mode
from tutti.train.batch_schedule import make_schedule
from tutti.world.errors import UsageError

# Samples of a data set that a plan is tried with: the real one is not loaded here.
_MANY = 1 << 40


@dataclass(frozen=True)
class SizedRecipe:
    """`steps` are those of a run."""

    flags: Sequence[str]
    sizes: Sequence[int]
    mode: Mode
    steps: int

    def further(self, ranks: int, swept: dict[str, str]) -> list[str]:
        """What a size adds to the flags that were given."""
        words = [word for flag, value in swept.items() for word in (f"--{flag}", value)]
        words += ["--steps", str(self.steps), "--no-evaluate"]
        words += ["--checkpoint-every", str(self.steps)]  # not within what is timed
        batch = self._global_batch(read([*self.flags, *words], ranks))
        return words if batch is None else [*words, "--global-batch", str(batch)]

    def check(self, sweep: Sequence[dict[str, str]]) -> None:
        """Refuse what tutti train would refuse, at any size, before anything starts."""
        for swept in sweep:
            for ranks in self.sizes:
                _planned(read([*self.flags, *self.further(ranks, swept)], ranks), ranks)

    def _global_batch(self, options: Train) -> int | None:
        """For --global-batch: in strong scaling all sizes share the batch of the smallest."""
        given = options.settings.batching.global_batch
        if self.mode == "weak":
            if given is not None:
                raise UsageError(
                    f"--global-batch {given} is shared by all ranks, --mode weak keeps each "
                    "rank's: use --batch, or --mode strong"
                )
            return None
        return None if given else make_schedule(options.settings, self.sizes[0], _MANY).global_batch


def read(flags: Sequence[str], ranks: int) -> Train:
    """The flags of tutti train at a size, as it would read them."""
    options, _ = read_flags([flag.replace(RANKS, str(ranks)) for flag in flags], "tutti scale")
    for name in ("resume", "profile", "lr_sweep"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is of tutti train alone: leave it out")
    return options


def _planned(options: Train, ranks: int) -> None:
    """Refuse what cannot be trained at this size."""
    try:
        make_schedule(options.settings, ranks, _MANY)
    except UsageError as error:
        batch = options.settings.batching.global_batch
        shared = f" (strong scaling: the sizes share {batch} samples)" if batch else ""
        cure = ", or --mode weak" if batch else ""
        raise UsageError(f"at {ranks} ranks{shared}: {error}{cure}") from None
