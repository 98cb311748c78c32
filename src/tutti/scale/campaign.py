"""Campaign: all runs of all sizes, in turns; what was measured is kept, whatever happens then."""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tutti.scale.job import Job, Schedule
from tutti.scale.measured import Measured, NotMeasured, read
from tutti.scale.process import Interruption, run, tail


@dataclass(frozen=True)
class Turn:
    """One run that is to be made."""

    ranks: int
    repeat: int
    flags: dict[str, str] = field(default_factory=dict)  # what a sweep sets, by flag

    @property
    def name(self) -> str:
        """Of its folder."""
        flags = "".join(f"{flag}{value}-" for flag, value in self.flags.items())
        return f"{flags}ranks{self.ranks}-repeat{self.repeat}"


def turns(
    ranks: Sequence[int], repeats: int, sweep: Sequence[dict[str, str]] = ({},)
) -> list[Turn]:
    """In each repeat every size has its turn: a machine that drifts hits all of them alike."""
    return [
        Turn(size, repeat, flags) for repeat in range(repeats) for flags in sweep for size in ranks
    ]


class Campaign:
    """Makes runs one after another: `runs` are those that were measured, `failure` ended it."""

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        out: Path,
        further: Callable[[Turn, Path], Sequence[str]] = lambda turn, folder: (),
    ) -> None:
        self.runs: list[Measured] = []
        self.stopped = False
        self.failure: str | None = None
        self._job, self._schedule, self._out, self._further = job, schedule, out, further

    def make(self, plan: Sequence[Turn]) -> None:
        """All of the plan, or until Ctrl-C or a run that fails."""
        most = max(turn.ranks for turn in plan)
        with Interruption() as interruption:
            for number, turn in enumerate(plan, 1):
                _say(f"[{number}/{len(plan)}] {_title(turn)} …", end="")
                began = time.monotonic()
                measured = self._make(turn, most, interruption)
                self.stopped = interruption.asked
                if measured is None:
                    _say(" stopped" if self.stopped else " failed")
                    return
                self.runs.append(measured)
                took = time.monotonic() - began
                _say(f" {1e3 * measured.step.seconds:.4g} ms a step ({took:.0f} s)")
                if self.stopped:
                    return

    def _make(self, turn: Turn, most_ranks: int, interruption: Interruption) -> Measured | None:
        folder = self._out / turn.name
        command = self._job.command_for(turn.ranks, self._further(turn, folder))
        env = self._job.environment(self._schedule, folder / "traces", most_ranks)
        log = self._out / "logs" / f"{turn.name}.log"
        code = run(command, env, log, interruption)
        # A run is for its figures: nothing of it is gone on with.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        try:
            return read(folder, turn.ranks, turn.repeat, self._schedule, turn.flags)
        except NotMeasured as reason:
            if not interruption.asked:
                how = f"the program ended with code {code}" if code else str(reason)
                said = f"Its last lines ({log}):\n{tail(log)}" if log.stat().st_size else ""
                self.failure = f"{_title(turn)}: {how}. {said}".rstrip()
            return None


def _title(turn: Turn) -> str:
    flags = "".join(f"--{flag} {value}, " for flag, value in turn.flags.items())
    return f"{flags}{turn.ranks} rank{'s' * (turn.ranks != 1)}, repeat {turn.repeat}"


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
