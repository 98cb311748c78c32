"""One `tutti profile` among several: a launcher started one for each of its tasks.

`srun -n 2 tutti profile -- train.py` captures as well as `tutti profile -- srun -n 2 train.py`, and
where a launcher passes no variables on it is the only way. All tasks capture into one folder, which
is what they have in common: there each leaves word when its program has ended, and the first task,
which explains, waits for that.
"""

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.world.errors import UsageError
from tutti.world.launchers import identify

# How long the first waits for the others: file systems of clusters show new files late.
_PATIENCE_SECONDS = 60.0
_FAILED_SECONDS = 5.0  # a launcher that ends all tasks with the first should hear of it soon
_POLL_SECONDS = 0.05
_WITHOUT_RANK = {"slurm": "srun", "openmpi": "mpirun", "mpich": "mpirun"}


@dataclass(frozen=True)
class Task:
    """Which of how many; `job` is the same for all of them, and not that of another start."""

    number: int
    count: int
    launcher: str
    job: str

    @property
    def is_first(self) -> bool:
        """Whether it speaks for all."""
        return self.number == 0

    @property
    def no_rank_note(self) -> str:
        """What a plain script lacks under a launcher that is not torch's."""
        if self.launcher not in _WITHOUT_RANK or self.count == 1:
            return ""
        return (
            f" A script that needs RANK and MASTER_ADDR has them from torchrun, not from "
            f"{_WITHOUT_RANK[self.launcher]}: start torchrun by it, or call tutti.init()."
        )

    def folder(self, now: str) -> Path:
        """Where to capture if nobody said: clocks of tasks differ, so several go by their job."""
        if self.count == 1:
            return Path("runs") / f"profile-{now}"
        if not self.job:
            raise UsageError(
                f"--out: {self.launcher} started {self.count} of tutti profile, which must agree "
                f"on a folder: name it, or start one alone: tutti profile -- {self.launcher} …"
            )
        return Path("runs") / f"profile-{self.job}"

    def leave_word(self, out: Path, code: int) -> None:
        """Say that this task's program has ended, and how."""
        path = self._word(out, self.number)
        beside = path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the first tells that there was no word
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(str(code))
            beside.replace(path)

    def wait_for_others(self, out: Path, failed: bool) -> tuple[dict[int, int], list[int]]:
        """The exit codes of all tasks that have left word, and those that have not."""
        codes: dict[int, int] = {}
        deadline = time.monotonic() + (_FAILED_SECONDS if failed else _PATIENCE_SECONDS)
        while missing := [each for each in range(self.count) if each not in codes]:
            for number in missing:
                with contextlib.suppress(OSError):
                    codes[number] = int(self._word(out, number).read_text())
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        for number in codes:
            self._word(out, number).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody is late and still writes there
            self._word(out, 0).parent.rmdir()
        return codes, missing

    def _word(self, out: Path, number: int) -> Path:
        return out / ".ended" / f"{self.job or self.launcher}-{number}"


def task_of(env: Mapping[str, str]) -> Task:
    """This process among those that its launcher started."""
    try:
        identity = identify(env)
    except UsageError:  # half a set, say: the program's to complain about, if it cares at all
        return Task(0, 1, "", "")
    unique = identity.launcher in ("slurm", "openmpi", "mpich", "tutti")
    job = re.sub(r"[^A-Za-z0-9._-]", "-", identity.job) if unique else ""
    return Task(identity.rank, identity.size, identity.launcher, job)
