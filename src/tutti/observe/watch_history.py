"""The past of a watched job: history, metrics of its run directory, changes for the worse."""

import contextlib
import json
import os
import re
import shlex
import tomllib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tutti.measure.units import format_seconds
from tutti.observe.ring_reader import Process
from tutti.observe.step_split import WINDOW_STEPS

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
# (first position, last position, number of original rows, mean values)
_Row = tuple[float, float, int, Array]
_SLOWER = 0.1  # throughput below 90 % of the job's own past
_RECENT_SECONDS = 20.0
_GROWTH_BYTES, _GROWTH_SHARE = 32 << 20, 0.02
_GROWTH_SAMPLES, _CHUNKS = 60, 6
_LOSS_SPIKE_SIGMAS = 6.0


class History:
    """Rows of numbers in the order of a position, such as a step number or a time.

    The newest rows are kept as they are. When a level is full, its oldest `factor` rows become one
    row of the next level, their mean. So `levels` levels of `length` rows cover
    length × (1 + factor + factor² + …) rows: with the defaults, 9.6 million.
    """

    def __init__(self, length: int = 2048, levels: int = 5, factor: int = 8) -> None:
        self._length, self._factor = length, factor
        self._levels: list[deque[_Row]] = [deque() for _ in range(levels)]

    def add(self, position: float, values: Array) -> None:
        row: _Row = (position, position, 1, np.asarray(values, dtype=np.float32))
        for level in self._levels:
            level.append(row)
            if len(level) <= self._length:
                return
            row = _merge([level.popleft() for _ in range(self._factor)])

    def window(self, first: float, last: float, columns: int) -> tuple[list[float], Array]:
        """Return at most `columns` rows between two positions: (their last positions, values)."""
        rows = [r for level in reversed(self._levels) for r in level if first <= r[1] <= last]
        if not rows:
            return [], np.zeros((0,))
        if len(rows) > columns:
            low, high = rows[0][1], rows[-1][1]
            groups: dict[int, list[_Row]] = {}
            for row in rows:
                place = int((row[1] - low) / ((high - low) or 1.0) * columns)
                groups.setdefault(min(columns - 1, place), []).append(row)
            rows = [_merge(group) for group in groups.values()]
        return [row[1] for row in rows], np.stack([row[3] for row in rows])

    def limits(self) -> tuple[float, float]:
        """Return the first and the last position, or (0, 0)."""
        rows = [level for level in self._levels if level]
        return (rows[-1][0][0], rows[0][-1][1]) if rows else (0.0, 0.0)


def _merge(rows: list[_Row]) -> _Row:
    """Return one row with the means of several rows. NaN is an unknown value."""
    if len(rows) == 1:
        return rows[0]
    values = np.stack([row[3] for row in rows])
    counts = np.array([row[2] for row in rows], dtype=np.float32)
    weights = np.where(np.isnan(values), 0, counts.reshape(-1, *[1] * (values.ndim - 1)))
    total = weights.sum(axis=0)
    sums = (np.nan_to_num(values) * weights).sum(axis=0)
    mean = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
    return rows[0][0], rows[-1][1], int(counts.sum()), mean


# -- the metrics of tutti train --------------------------------------------------------------------


class RunMetrics:
    """Reads the metrics that `tutti train` appends to the files of its run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest: dict[int, dict[str, Any]] = {}  # by rank
        self.losses: list[tuple[int, float, float]] = []  # (step, time, loss)
        self.total_steps: int | None = None
        self._read_bytes: dict[Path, int] = {}
        with contextlib.suppress(OSError, ValueError):
            length = tomllib.loads((folder / "recipe.toml").read_text()).get("length", {})
            steps = length.get("steps") if isinstance(length, dict) else None
            self.total_steps = steps if isinstance(steps, int) else None

    def poll(self) -> list[dict[str, Any]]:
        """Read the new lines of all ranks. Return those of the first rank."""
        found = []
        for path in sorted((self.folder / "metrics").glob("rank*.jsonl")):
            match = re.fullmatch(r"rank(\d+)", path.stem)
            if match is None:
                continue
            rank = int(match[1])
            for row in self._new_rows(path):
                self.latest[rank] = self.latest.get(rank, {}) | row
                if rank == 0:
                    found.append(row)
                    if isinstance(row.get("loss"), int | float):
                        self.losses.append((row["step"], row["time"], row["loss"]))
        del self.losses[:-10_000]
        return found

    def _new_rows(self, path: Path) -> list[dict[str, Any]]:
        start = self._read_bytes.get(path, 0)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < start:  # a resumed run has rewritten the file
                    start = 0
                file.seek(start)
                complete, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._read_bytes[path] = start + len(complete) + len(newline)
        rows = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                if isinstance(row["step"], int) and isinstance(row["time"], int | float):
                    rows.append(row)
        return rows


def run_folder(processes: Sequence[Process]) -> Path | None:
    """Return the run directory of a `tutti train` job, from the --out in its command."""
    for process in processes:
        words = process.command.split()
        with contextlib.suppress(ValueError):
            words = shlex.split(process.command)
        if "train" in words and "--out" in words[:-1]:
            named = Path(words[words.index("--out") + 1])
            with contextlib.suppress(OSError):
                return Path(f"/proc/{process.pid}/cwd").resolve() / named
    return None


# -- changes for the worse -------------------------------------------------------------------------


def slower_than_before(lengths: Sequence[tuple[float, float]]) -> str | None:
    """Return a text if the throughput has fallen by 10 %, or None. `lengths`: (end, seconds).

    The median step of the last 20 seconds (at least 20 steps) is compared with the medians of
    equally many earlier steps at a time, of which there must be at least 6. It must be above their
    median by 1/0.9 and by 3 × 1.4826 × MAD.
    """
    if not lengths:
        return None
    seconds = [length for _, length in lengths]
    end = lengths[-1][0]
    count = max(WINDOW_STEPS, sum(when > end - _RECENT_SECONDS for when, _ in lengths))
    recent, past = seconds[-count:], seconds[:-count]
    medians = [median(past[i - count : i]) for i in range(len(past), count - 1, -count)]
    if len(medians) < 6:
        return None
    usual, now = median(medians), median(recent)
    scatter = 1.4826 * median(abs(each - usual) for each in medians)
    if now <= usual / (1 - _SLOWER) or now <= usual + 3 * scatter:
        return None
    return (
        f"throughput has fallen by {100 * (1 - usual / now):.0f} %: a step takes "
        f"{format_seconds(now)}, before {format_seconds(usual)}"
    )


def growing_memory(samples: Sequence[Array]) -> list[tuple[int, float, float]]:
    """Return (index of the rank, first, last bytes) of each rank whose memory grows steadily.

    The samples are divided into 6 parts of at least 10 samples. The median of each part is above
    the median of the part before, the growth is at least 32 MiB and 2 %, and at least a third of
    the growth is in the second half. So start-up, which ends, is not steady growth.
    """
    if len(samples) < _GROWTH_SAMPLES or len({len(each) for each in samples}) > 1:
        return []
    chunks = np.array_split(np.stack(samples), _CHUNKS)
    medians = np.stack([np.median(chunk, axis=0) for chunk in chunks])
    growth = medians[-1] - medians[0]
    steady = (
        (np.diff(medians, axis=0) > 0).all(axis=0)
        & (growth >= np.maximum(_GROWTH_BYTES, _GROWTH_SHARE * medians[0]))
        & (medians[-1] - medians[_CHUNKS // 2 - 1] >= growth / 3)
    )
    return [(int(i), float(medians[0, i]), float(medians[-1, i])) for i in np.flatnonzero(steady)]


def loss_spike(losses: Sequence[tuple[int, float]]) -> tuple[int, float, float] | None:
    """Return (step, loss, usual loss) if one of the last 20 losses is far above those before."""
    values = [loss for _, loss in losses]
    for index in range(max(50, len(losses) - 20), len(losses)):
        before = values[index - 50 : index]
        usual = median(before)
        scatter = 1.4826 * median(abs(each - usual) for each in before)
        if values[index] > max(usual + _LOSS_SPIKE_SIGMAS * scatter, usual + 0.5 * abs(usual)):
            return losses[index][0], values[index], usual
    return None
