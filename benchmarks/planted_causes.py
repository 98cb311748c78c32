"""How well `tutti scale` finds causes of known size that are planted into six kinds of program.

    python benchmarks/planted_causes.py --minutes 8 --json planted_causes_MACHINE_DATE.json

`planted_programs.py` has the programs and the causes. The grid is every kind of program, cause and
size, on quiet CPUs and with a busy loop beside the program. Cases run at the same time, each on its
own set of CPUs (`--cpus`, whole cores if possible), to which also its busy loop is bound. If
`--minutes` are too short for the grid, a random sample of it is run, chosen by `--seed`, with every
pair of program and cause before any pair comes twice.

First, every kind of program runs with nothing planted, quiet and busy: the loss that the program
has anyway is subtracted. Waiting is not subtracted where the ranks meet once per step, because the
planted late rank takes the place of other delays. A planted cause is right if the figure that
`tutti scale` prints (share of the step × step) differs from the planted seconds, which the program
measures itself, by at most 15 %, or if its printed quartiles include the planted seconds. The
loader of tutti loads ahead, so of its planted input only the growth of the step counts. Plain DDP
with nothing planted runs 10 times: the largest named cause should be the same each time, or none.
`--nothing FILE` reads the results with nothing planted from the JSON of an earlier run instead.
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
FORKED = PROGRAMS.with_name("forked_programs.py")  # runs them without the time of their imports


@dataclass(frozen=True)
class Case:
    kind: str
    cause: str
    milliseconds: float
    busy: bool
    number: int = 0  # of the runs with nothing planted

    @property
    def title(self) -> str:
        load = "busy" if self.busy else "quiet"
        return f"{self.kind:<10} {load:<5} {self.cause:<7} {self.milliseconds:3.0f} ms"


def run_case(
    case: Case, cpus: Sequence[int], options: argparse.Namespace, server: str
) -> dict[str, Any]:
    """Run tutti scale on the program; returns its row with two ranks and the planted seconds."""
    with tempfile.TemporaryDirectory() as folder:
        times, out = Path(folder) / "times", Path(folder) / "out"
        times.mkdir()
        command = [sys.executable, "-m", "tutti", "scale", "--ranks", "1,2", "--device", "cpu"]
        command += ["--repeats", str(options.repeats), "--out", str(out)]
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
            )
        finally:
            if loop is not None:
                loop.kill()
                loop.wait()
        if done.returncode:
            return {"case": asdict(case), "error": (done.stdout + done.stderr)[-4000:]}
        results = json.loads((out / "scale.json").read_text())
        # The first steps of each run are not timed.
        lost = [s for path in times.iterdir() for s in json.loads(path.read_text())[8:]]
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
    own = median(printed(other, name)[1] for other in nothing) if nothing else 0.0
    if name == "wait" and case["kind"] != "fsdp2":
        own = 0.0
    if case["kind"] == "tutti" and name == "input" and nothing:
        planted = row["step_s"] - median(other["row"]["step_s"] for other in nothing)
    low, found, high = (seconds - own for seconds in printed(result, name))
    error = found / planted - 1
    return case | {
        "planted_ms": 1e3 * planted,
        "found_ms": 1e3 * found,
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "own_ms": 1e3 * own,
        "error": error,
        "within_quartiles": low <= planted <= high,
        "right": abs(error) <= TOLERANCE or low <= planted <= high,
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
    return {
        "right": f"{sum(each['right'] for each in compared)} of {len(compared)}",
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
    parser.add_argument("--minutes", type=float, default=8, help="no case ends much later")
    parser.add_argument("--seed", type=int, default=0, help="of the sample of the grid")
    parser.add_argument("--cpus", type=int, default=4, help="number of CPUs of each case")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--milliseconds", default="20,40,80")
    parser.add_argument("--load", choices=("both", "quiet", "busy"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
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
    end = time.monotonic() + 60 * options.minutes
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
            "summary": summarize(results),
            "results": results,
        }

    def work(cpus: Sequence[int]) -> None:
        longest = 0.0
        while time.monotonic() + longest < end:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            result = run_case(case, cpus, options, server)
            longest = max(longest, time.monotonic() - began)
            with lock:
                results.append(result)
                print(f"{case.title} ({time.monotonic() - began:.0f} s): ", end="")
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
