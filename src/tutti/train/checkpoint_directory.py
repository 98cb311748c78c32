"""The directory of a run's checkpoints: names, who may write, what stays and what goes.

step-00000120             a checkpoint, complete
step-00000120.<hex>.tmp   one that is being written or removed; never loaded
step-00000120.superseded  one from a past that was given up; never loaded, nor removed
.writer                   the token of the run that writes here
"""

import os
import re
import shutil
from pathlib import Path

from tutti.train.durable_file import write_new

_STEP = re.compile(r"step-([0-9]{8,})", re.ASCII)
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.[0-9a-f]+\.tmp|\.writer\.[0-9a-f]+\.tmp", re.ASCII)
_WRITER = ".writer"


def step_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def saved_steps(directory: Path) -> list[int]:
    """The steps with a complete checkpoint, oldest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def latest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in a directory; None if there is none. It is not verified."""
    steps = saved_steps(Path(directory))
    return Path(directory, step_name(steps[-1])) if steps else None


def take_over(directory: Path, token: str) -> None:
    """Make this run the one that writes here, and remove what an earlier one left unfinished.

    An earlier one that lives on unnoticed finds its directory gone, or another token than its
    own, and gives up.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in os.listdir(directory):
        if _LEFTOVER.fullmatch(name):
            discard(directory / name)
    new = directory / f"{_WRITER}.{token}.tmp"
    write_new(new, [token.encode()])
    os.rename(new, directory / _WRITER)


def new_folder(directory: Path, step: int, token: str) -> Path:
    """An empty directory to write a checkpoint into."""
    folder = directory / f"{step_name(step)}.{token}.tmp"
    discard(folder)
    folder.mkdir(mode=0o700)
    return folder


def discard(path: Path) -> None:
    """Remove a directory or file that is no checkpoint (any more), as far as that is possible."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Renamed first: at one blow nobody can add to it, nor take what is left for a checkpoint.
    going = path.with_name(f"{path.name.split('.')[0]}.{os.urandom(4).hex()}.tmp")
    try:
        os.rename(path, going)
    except OSError:
        going = path
    shutil.rmtree(going, ignore_errors=True)


def writer(directory: Path) -> str:
    """The token of the run that has last taken over."""
    return (directory / _WRITER).read_text()


def set_aside(path: Path) -> None:
    """Keep a checkpoint, under a name that is never loaded."""
    aside = path.with_name(f"{path.name}.superseded")
    if aside.exists():
        discard(aside)
    os.rename(path, aside)


def retire(directory: Path, step: int, keep: int | None) -> None:
    """After a save: checkpoints that this one has overtaken go, the newest `keep` stay.

    A later step belongs to a past that was given up (damaged, or resumed from before it). It
    must not be the one that the next start takes, so it is set aside, for a person to judge.
    """
    steps = saved_steps(directory)
    for later in (other for other in steps if other > step):
        set_aside(directory / step_name(later))
    discard(directory / f"{step_name(step)}.superseded")
    older = [other for other in steps if other <= step]
    for old in older[: -keep if keep else 0]:
        discard(directory / step_name(old))
