"""How well `tutti scale` finds causes of lost time that are planted into six kinds of program.

    python benchmarks/planted_causes.py --minutes 8 --json planted_causes_MACHINE_DATE.json

`planted_programs.py` has the programs and the causes. A case is a kind of program, a cause, and the
planted time per step, either on idle CPUs ("quiet") or with a busy loop on the same CPUs ("busy").
Several cases run at the same time. Each case has its own set of CPUs (`--cpus`, whole cores if
possible), and its busy loop is bound to the same set. If `--minutes` is too short for all cases, a
random sample of the cases runs, chosen by `--seed`. No pair of program and cause runs twice before
every pair has run once.

First, every kind of program runs with nothing planted, quiet and busy. The loss of this run is
subtracted from the loss of a run with a planted cause. Waiting is not subtracted if ranks
synchronise once per step, because the planted late rank then hides other delays.

A result is right if the printed figure (share of the step × step) differs from the planted seconds
by at most 15 %, or if the planted seconds lie between the printed quartiles. The program measures
the planted seconds itself. tutti's loader loads batches ahead and so hides a part of the planted
input: here the planted seconds are the growth of the step. The summary also counts the right
results if the loss of the run with nothing planted is subtracted for every cause, and if it is
never subtracted.

Plain DDP with nothing planted runs 10 times. The largest named cause should be the same each time,
or none. `--nothing FILE` reads the results with nothing planted from the JSON of an earlier run.
The JSON is written after each case. A case that has not ended after `--minutes` is killed and left
out.
"""

import argparse
import json
import os
import platform
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

KINDS = ("ddp", "fsdp2", "accelerate", "lightning", "hf_trainer", "tutti")
CAUSES = {
    "input": "input",
    "gap": "gaps",
    "compute": "compute",
    "wait": "wait",
    "exposed": "exposed_comm",
}
TOLERANCE = 0.15
STABILITY_RUNS = 10
PROGRAMS = Path(__file__).with_name("planted_programs.py").absolute()
FORKED = PROGRAMS.with_name("forked_programs.py")  # starts programs without importing torch again


@dataclass(frozen=True)
class Case:
    kind: str
    cause: str
    milliseconds: float
    busy: bool
    number: int = 0  # number of the repetition, for runs with nothing planted

    @property
    def title(self) -> str:
        load = "busy" if self.busy else "quiet"
        return f"{self.kind:<10} {load:<5} {self.cause:<7} {self.milliseconds:3.0f} ms"


def run_case(
    case: Case, cpus: Sequence[int], options: argparse.Namespace, server: str, end: float
) -> dict[str, Any] | None:
    """Run tutti scale on the program. Return its row of two ranks, and the planted seconds.

    The result is None if the case has not ended at the time `end`.
    """
    with tempfile.TemporaryDirectory() as folder:
        times, out = Path(folder) / "times", Path(folder) / "out"
        times.mkdir()
        command = [sys.executable, "-m", "tutti", "scale", "--ranks", "1,2", "--device", "cpu"]
        command += ["--repeats", str(options.repeats), "--out", str(out)]
        command += ["--steps", str(options.steps), "--active", str(options.steps)]
        command += ["--", str(FORKED), str(PROGRAMS), case.kind]
        env = os.environ | {"PLANT": f"{case.cause}:{case.milliseconds / 1e3}:{times}"}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "FORK_SERVER": server}
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path if entry)

        def bind() -> None:
            os.sched_setaffinity(0, cpus)

        loop = None
        if case.busy:
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=bind)
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env=env,
                cwd=PROGRAMS.parent,
                preexec_fn=bind,
                capture_output=True,
                text=True,
                timeout=max(0.0, end - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return None
        finally:
            if loop is not None:
                loop.kill()
                loop.wait()
        if done.returncode:
            return {"case": asdict(case), "error": (done.stdout + done.stderr)[-4000:]}
        results = json.loads((out / "scale.json").read_text())
        # The first steps of each run are not timed.
        lost = [s for path in times.iterdir() for s in json.loads(path.read_text())[8:]]
        if not lost and case.cause != "nothing":
            return {"case": asdict(case), "error": "the program did not write the planted seconds"}
        return {
            "case": asdict(case),
            "seconds": time.monotonic() - began,
            "planted_s": median(lost) if lost else 0.0,
            "row": results["rows"][1],
            "runs": results["runs"],
        }


def printed(result: dict[str, Any], cause: str) -> tuple[float, float, float]:
    """Return the low quartile, the median and the high quartile of a cause, in seconds."""
    row = result["row"]
    low, high = row["loss_quartiles"][cause]
    share = (row["loss"] | row["other"])[cause]
    return low * row["step_s"], share * row["step_s"], high * row["step_s"]


def compare(result: dict[str, Any], nothing: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the printed figures of a planted cause with the planted seconds."""
    case, row, planted = result["case"], result["row"], result["planted_s"]
    name = CAUSES[case["cause"]]
    always = own = median(printed(other, name)[1] for other in nothing) if nothing else 0.0
    if name == "wait" and case["kind"] != "fsdp2":
        own = 0.0
    if case["kind"] == "tutti" and name == "input" and nothing:
        planted = row["step_s"] - median(other["row"]["step_s"] for other in nothing)

    def is_right(subtracted: float) -> bool:
        low, found, high = (seconds - subtracted for seconds in printed(result, name))
        return abs(found / planted - 1) <= TOLERANCE or low <= planted <= high

    low, found, high = (seconds - own for seconds in printed(result, name))
    error = found / planted - 1
    return case | {
        "planted_ms": 1e3 * planted,
        "found_ms": 1e3 * found,
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "own_ms": 1e3 * own,
        "error": error,
        "within_quartiles": low <= planted <= high,
        "right": is_right(own),
        "right_if_own_loss_is_subtracted": is_right(always),
        "right_if_nothing_is_subtracted": is_right(0.0),
        "named": row["named"],
        "step_ms": 1e3 * row["step_s"],
        "unexplained": row["other"]["unexplained"],
        "verdict": row["verdict"],
    }


def plan(options: argparse.Namespace) -> list[Case]:
    """Return the cases in the order in which they begin."""
    loads = {"quiet": (False,), "busy": (True,), "both": (False, True)}[options.load]
    kinds, causes = options.kinds.split(","), options.causes.split(",")
    nothing = [Case(kind, "nothing", 0, busy) for busy in loads for kind in kinds]
    again = [Case("ddp", "nothing", 0, False, n) for n in range(1, options.stability)]
    grid = [
        Case(kind, cause, float(size), busy)
        for kind in kinds
        for cause in causes
        for size in options.milliseconds.split(",")
        for busy in loads
    ]
    random.Random(options.seed).shuffle(grid)
    seen: Counter[tuple[str, str]] = Counter()
    rounds = []
    for case in grid:
        rounds.append(seen[case.kind, case.cause])
        seen[case.kind, case.cause] += 1
    order = sorted(range(len(grid)), key=lambda index: rounds[index])
    ordered = [grid[index] for index in order]
    once = len(kinds) * len(causes)  # every pair of program and cause
    return nothing + ordered[:once] + again + ordered[once:]


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare all results with what was planted, and count."""
    measured = [result for result in results if "error" not in result]
    nothing: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for result in measured:
        if result["case"]["cause"] == "nothing":
            key = result["case"]["kind"], result["case"]["busy"]
            nothing.setdefault(key, []).append(result)
    compared = [
        compare(result, nothing.get((result["case"]["kind"], result["case"]["busy"]), ()))
        for result in measured
        if result["case"]["cause"] != "nothing"
    ]

    def counts(key: str) -> dict[str, str]:
        groups: dict[str, list[bool]] = {}
        for each in compared:
            groups.setdefault(str(each[key]), []).append(each["right"])
        return {name: f"{sum(right)} of {len(right)}" for name, right in sorted(groups.items())}

    stability = [
        {"named": result["row"]["named"], "verdict": result["row"]["verdict"]}
        for result in nothing.get(("ddp", False), [])
    ]
    largest = Counter((each["named"] or ["none"])[0] for each in stability)
    unexplained = [abs(result["row"]["other"]["unexplained"]) for result in measured]
    rules = ("right", "right_if_own_loss_is_subtracted", "right_if_nothing_is_subtracted")
    return {
        **{rule: f"{sum(each[rule] for each in compared)} of {len(compared)}" for rule in rules},
        "by_cause": counts("cause"),
        "by_kind": counts("kind"),
        "by_milliseconds": counts("milliseconds"),
        "by_busy": counts("busy"),
        "planted_is_largest_named": sum(
            each["named"][:1] == [CAUSES[each["cause"]]] for each in compared
        ),
        "median_unexplained": median(unexplained) if unexplained else None,
        "largest_named_with_nothing_planted": dict(largest),
        "failed": [result for result in results if "error" in result],
        "cases": compared,
        "nothing_planted": stability,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8, help="time limit of the benchmark")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sample of cases")
    parser.add_argument("--cpus", type=int, default=4, help="number of CPUs of each case")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--milliseconds", default="20,40,80")
    parser.add_argument("--load", choices=("both", "quiet", "busy"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, and recorded steps")
    parser.add_argument("--stability", type=int, default=STABILITY_RUNS)
    parser.add_argument("--nothing", type=Path, help="JSON with results with nothing planted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    available = sorted(os.sched_getaffinity(0), key=_core)
    size = min(options.cpus, len(available))
    sets = [available[n : n + size] for n in range(0, len(available) - size + 1, size)]
    cases = plan(options)
    results: list[dict[str, Any]] = []
    if options.nothing is not None:
        read = json.loads(options.nothing.read_text())["results"]
        results = [result for result in read if result["case"]["cause"] == "nothing"]
        cases = [case for case in cases if case.cause != "nothing"]
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    start = time.monotonic()
    end = start + 60 * options.minutes
    lock = threading.Lock()

    def content() -> dict[str, Any]:
        return {
            "schema": "tutti.benchmarks.planted_causes/1",
            "command": sys.argv,
            "machine": {
                "processor": _processor(),
                "cpus": len(available),
                "cpus_of_a_case": sets,
                "python": platform.python_version(),
                "torch": version("torch"),
            },
            "planned": len(cases),
            "minutes": (time.monotonic() - start) / 60,
            "summary": summarize(results),
            "results": results,
        }

    def work(cpus: Sequence[int]) -> None:
        seconds: list[float] = []
        while time.monotonic() + (median(seconds) if seconds else 0.0) < end:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            try:
                result = run_case(case, cpus, options, server, end)
            except Exception as error:  # the other cases still run
                result = {"case": asdict(case), "error": repr(error)}
            if result is None:
                return
            seconds.append(time.monotonic() - began)
            with lock:
                results.append(result)
                print(f"{case.title} ({seconds[-1]:.0f} s): ", end="")
                print(result.get("error", result.get("row", {}).get("verdict")), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps(content()))

    server = str(Path(tempfile.mkdtemp()) / "fork_server")
    forks = subprocess.Popen([sys.executable, str(FORKED), "serve", server])
    while not Path(server).exists():
        time.sleep(0.1)
    threads = [threading.Thread(target=work, args=(cpus,)) for cpus in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    forks.kill()
    shutil.rmtree(Path(server).parent)
    summary = summarize(results)
    for each in summary.pop("cases"):
        print(
            "{kind:<10} {cause:<8} busy={busy!s:<5} planted {planted_ms:6.1f} ms, found "
            "{found_ms:6.1f} ({error:+.0%}), quartiles {quartiles_ms[0]:.1f} to "
            "{quartiles_ms[1]:.1f}, right: {right}, unexplained {unexplained:+.1%}".format(**each)
        )
    print(json.dumps(summary, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(content()))


def _core(cpu: int) -> tuple[int, int]:
    """Return the first CPU of the same core, and the CPU."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = re.match(r"\d+", path.read_text()) if path.exists() else None
    return int(first[0]) if first else cpu, cpu


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
