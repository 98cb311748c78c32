"""Tries one piece of advice: times the program in runs that alternate without and with the change.

The program's source is not edited. The change is applied when the program starts:
program_settings.py applies it in every process, or it is a flag of `tutti train`. Each run ends
after the timed steps.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tutti.measure.spread import quartiles
from tutti.profile.captured_command import run_captured
from tutti.profile.profile_table import gain_text
from tutti.profile.trace_file import TraceFile
from tutti.world.errors import UsageError

PAIRS = 5
# A run skips _SKIPPED_STEPS steps and then times steps for about _TIMED_SECONDS seconds, but at
# least _MIN_STEPS and at most _MAX_STEPS steps. If the program ends before these steps, all runs
# are repeated with _MIN_STEPS steps.
_SKIPPED_STEPS, _MIN_STEPS, _MAX_STEPS, _TIMED_SECONDS = 5, 20, 60, 2.0


class _TooFewStepsError(UsageError):
    pass


def choose_advice(rows: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the first advice that can be applied automatically, and messages about the others."""
    skipped: list[str] = []
    for advice in rows["advice"]:
        if advice["change"]:
            return advice, skipped
        skipped.append(f"advice {advice['id']} cannot be applied automatically")
    return None, skipped


def try_change(
    command: Sequence[str],
    change: Mapping[str, Any],
    step_s: float,
    folder: Path,
    pairs: int = PAIRS,
) -> dict[str, Any]:
    """Run the program without (A) and with (B) a change, and return the step times of all runs.

    There are `pairs` pairs of runs, in the order AB BA AB …. `step_s` is the expected step time.
    The traces and the output of the program are written to `folder`.
    """
    steps = min(_MAX_STEPS, max(_MIN_STEPS, math.ceil(_TIMED_SECONDS / step_s)))
    try:
        return _run_pairs(command, change, steps, folder, pairs)
    except _TooFewStepsError:
        if steps == _MIN_STEPS:
            raise
        return _run_pairs(command, change, _MIN_STEPS, folder / "fewer-steps", pairs)


def _run_pairs(
    command: Sequence[str], change: Mapping[str, Any], steps: int, folder: Path, pairs: int
) -> dict[str, Any]:
    flags = change.get("flags", {})
    changes = {name: value for name, value in change.items() if name != "flags"}
    variants = {
        "without": (list(command), {}),
        "with": (with_flags(command, flags), changes),
    }
    times: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(pairs):
        order = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in order:
            place = folder / f"{number + 1}-{name}"
            times[name].append(_step_seconds(*variants[name], steps, place))
        print(
            f"pair {number + 1} of {pairs}: {1e3 * times['without'][-1]:.2f} ms per step without "
            f"the change, {1e3 * times['with'][-1]:.2f} ms with it",
            file=sys.stderr,
        )
    gains = [before - after for before, after in zip(*times.values(), strict=True)]
    before = median(times["without"])
    return {
        "change": dict(change),
        "pairs": pairs,
        "steps": steps,
        "without_s": times["without"],
        "with_s": times["with"],
        "gain_s": {"p50": median(gains), "quartiles": list(quartiles(gains))},
        "gain_share": median(gains) / before,
    }


def compare_with_prediction(
    advice: Mapping[str, Any], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `tried` for the JSON: the measured gain, and whether it lies in the predicted band."""
    low, high = advice["gain_s_band"]
    return {
        "id": advice["id"],
        "predicted_gain_s_band": [low, high],
        "within": low <= measured["gain_s"]["p50"] <= high,
        **measured,
    }


def tried_lines(advice: Mapping[str, Any], tried: Mapping[str, Any]) -> Iterator[str]:
    gain, (low, high) = tried["gain_s"]["p50"], tried["gain_s"]["quartiles"]
    yield f"tried {advice['id']}: {change_text(tried['change'])}"
    yield f"  predicted gain {gain_text(advice)}"
    yield (
        f"  measured gain {1e3 * gain:.1f} ms (quartiles {1e3 * low:.1f} to {1e3 * high:.1f}), "
        f"{100 * tried['gain_share']:.0f} % of the step: "
        f"{'within' if tried['within'] else 'outside'} the prediction"
    )
    without, changed = median(tried["without_s"]), median(tried["with_s"])
    yield (
        f"  {1e3 * without:.2f} ms per step without the change, {1e3 * changed:.2f} ms with it; "
        f"{tried['pairs']} pairs of runs, {tried['steps']} steps each"
    )


def change_text(change: Mapping[str, Any]) -> str:
    """Return the text of a change, for example `DistributedDataParallel(bucket_cap_mb=25.0)`."""
    texts = []
    for name, kind in (("ddp", "DistributedDataParallel"), ("loader", "DataLoader")):
        if arguments := change.get(name):
            values = ", ".join(f"{key}={value}" for key, value in arguments.items())
            texts.append(f"{kind}({values})")
    if passes := change.get("no_sync"):
        texts.append(f"no_sync() in {passes - 1} of {passes} backward passes")
    for key, value in change.get("fsdp", {}).items():
        texts.append(f"FSDP {key}={value}")
    for flag, value in change.get("flags", {}).items():
        texts.append(flag if value is None else f"{flag} {value}")
    return ", ".join(texts)


def with_flags(command: Sequence[str], flags: Mapping[str, str | None]) -> list[str]:
    """Return a tutti command with these flags. They replace existing flags of the same name."""
    result = list(command)
    for flag, value in flags.items():
        kept, skip = [], False
        for word in result:
            if skip:
                skip = False
            elif word == flag:
                skip = value is not None
            elif not word.startswith(f"{flag}="):
                kept.append(word)
        result = [*kept, flag, *([] if value is None else [value])]
    return result


@dataclass(frozen=True)
class TimedRun:
    """The result of one short run of a program."""

    code: int  # exit code as a shell reports it. 124: the run exceeded its time limit
    step_s: float | None  # median over all timed steps of all ranks. None: too few steps
    program: dict[str, Any]  # settings of DDP, FSDP2 and DataLoader (see read_settings)
    log: Path  # the output of the program


def time_run(
    command: Sequence[str],
    changes: Mapping[str, Any],
    steps: int,
    folder: Path,
    limit_s: float | None = None,
) -> TimedRun:
    """Run a program until `steps` steps are timed, or until `limit_s` seconds have passed."""
    folder.mkdir(parents=True)
    settings = {
        "directory": str(folder / "traces"),
        "wait": _SKIPPED_STEPS + steps,  # these steps are timed without the profiler
        "warmup": 0,
        "active": 1,
        "stop": True,
        "changes": dict(changes),
    }
    if list(command[1:4]) == ["-m", "tutti", "train"]:  # each run needs a new run directory
        command = with_flags(command, {"--out": str(folder / "run")})
    log = folder / "output.txt"
    with log.open("w") as output:
        code = run_captured(command, settings, output, limit_s)
    if code in (130, 143):
        raise KeyboardInterrupt
    times: list[float] = []
    program: dict[str, Any] = {}
    for path in (folder / "traces").glob("rank*"):
        file = TraceFile(path)
        for _ in file.events():  # the metadata is complete after the events
            pass
        recorded = file.metadata.get("tutti") or {}
        times += recorded.get("step_s", [])[_SKIPPED_STEPS:]
        program = recorded.get("program") or program
    return TimedRun(code, median(times) if times else None, program, log)


def _step_seconds(
    command: Sequence[str], changes: Mapping[str, Any], steps: int, folder: Path
) -> float:
    """Return the median time of a step. Raise UsageError if the program fails or is too short."""
    run = time_run(command, changes, steps, folder)
    if run.code:
        kind = folder.name.partition("-")[2]  # with or without
        raise UsageError(
            f"--try-advice: the run {kind} the change failed with exit code {run.code}. Its "
            f"output is in {run.log}."
        )
    if run.step_s is None:
        raise _TooFewStepsError(
            f"--try-advice skips {_SKIPPED_STEPS} steps and times {steps} steps, but the program "
            f"ran fewer steps. Train for more steps. The output of the program is in {run.log}."
        )
    return run.step_s
