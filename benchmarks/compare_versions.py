"""Measure two checkouts of tutti in turns on this machine, and compare every figure.

    python benchmarks/compare_versions.py --old PATH --new PATH --rounds 5 --json FILE
    python benchmarks/compare_versions.py --old PATH --new PATH --rounds 12 --rows 'hash map'

PATH is a checkout. If its compiled parts are missing, they are built in place. Each round runs
every bench with the old version and with the new version, in an order that changes from round to
round. With --rows, only rows that match the regular expression are compared, and after the first
round only their benches, operations and sizes are measured. A figure is the median over the rounds;
its spread is the quartile range over the rounds. A figure counts as slower or faster if the
quartile ranges of old and new do not overlap and the medians differ by more than --tolerance. Exit
code 1: at least one figure is slower.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

BENCHES = {
    "collectives": "--backends shm --budget 0.02 --sizes 4:64M:x8 --ops all",
    "symmetric": "--sizes 1K",
    "pairs": "--budget 1",
}
# The time of a row, in the unit of its own bench: ratios are compared, not times.
TIMES = {"collectives": "time_us.p50", "symmetric": "p50_us", "pairs": "optimized_ms"}
KEYS = ("op", "name", "backend", "bytes", "placement", "timing", "group")


def build_if_missing(checkout: Path) -> None:
    """Build the compiled parts of a checkout in place."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if len(list(checkout.glob(f"src/tutti/comm/shm/*{suffix}"))) < 2:
        print(f"building the compiled parts of {checkout}", file=sys.stderr, flush=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=checkout, check=True)


def measure(checkout: Path, bench: str, flags: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Run one bench with one version; returns {row: the bench's figures, with its time}."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        output = ["--device", "cpu", "--ranks", str(ranks), "--json", str(path)]
        command = [sys.executable, "-m", "tutti", "bench", bench, *flags.split(), *output]
        paths = [str(checkout / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{checkout}: bench {bench} failed:\n{done.stdout}\n{done.stderr}")
        rows = json.loads(path.read_text())["rows"]
    found = {}
    for row in rows:
        value: Any = row
        for part in TIMES[bench].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if row.get("wrong"):
            sys.exit(f"{checkout}: bench {bench}: a wrong result in {row}")
        if value:
            name = " ".join(str(row[key]) for key in KEYS if key in row)
            found[name] = {**row, "time": float(value)}
    return found


def narrowed(flags: dict[str, str], chosen: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the flags of the benches that measure only the chosen rows."""
    flags = {bench: text for bench, text in flags.items() if chosen[bench]}
    if "collectives" in flags:
        ops = ",".join(sorted({row["op"] for row in chosen["collectives"]}))
        sizes = ",".join(str(size) for size in sorted({r["bytes"] for r in chosen["collectives"]}))
        flags["collectives"] = f"--backends shm --budget 0.1 --sizes {sizes} --ops {ops}"
    return flags


def judge(old: list[float], new: list[float], tolerance: float) -> dict[str, Any]:
    """Compare the times of one row over the rounds."""
    quartiles = [statistics.quantiles(times, n=4, method="inclusive") for times in (old, new)]
    (old_low, old_median, old_high), (new_low, new_median, new_high) = quartiles
    ratio = new_median / old_median
    verdict = "same"
    if new_low > old_high and ratio > 1 + tolerance:
        verdict = "slower"
    elif new_high < old_low and ratio < 1 - tolerance:
        verdict = "faster"
    return {"old": quartiles[0], "new": quartiles[1], "ratio": round(ratio, 3), "verdict": verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--benches", default=",".join(BENCHES))
    parser.add_argument("--rows", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    versions = {"old": options.old.resolve(), "new": options.new.resolve()}
    for checkout in versions.values():
        build_if_missing(checkout)
    flags = {bench: BENCHES[bench] for bench in options.benches.split(",")}
    times: dict[str, dict[str, dict[str, list[float]]]] = {}
    for round_number in range(options.rounds):
        order = list(versions) if round_number % 2 == 0 else list(versions)[::-1]
        chosen: dict[str, list[dict[str, Any]]] = {}
        for bench in flags:
            chosen[bench] = []
            for version in order:
                measured = measure(versions[version], bench, flags[bench], options.ranks)
                for name, figures in measured.items():
                    if options.rows.search(f"{bench} {name}"):
                        chosen[bench].append(figures)
                        both = times.setdefault(bench, {}).setdefault(name, {"old": [], "new": []})
                        both[version].append(figures["time"])
        if options.rows.pattern and round_number == 0:
            flags = narrowed(flags, chosen)
        print(f"round {round_number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    rows = []
    for bench, found in times.items():
        for name, both in found.items():
            if min(map(len, both.values())) < 2:
                print(f"not compared, because only one version has it: {bench} {name}")
            else:
                verdict = judge(both["old"], both["new"], options.tolerance)
                rows.append({"bench": bench, "row": name, **verdict})
        ratios = [row["ratio"] for row in rows if row["bench"] == bench]
        counts = dict.fromkeys(("slower", "same", "faster"), 0)
        for row in rows:
            counts[row["verdict"]] += row["bench"] == bench
        middle = statistics.median(ratios)
        print(f"{bench}: {len(ratios)} rows, new/old median {middle:.3f}, {counts}")
    for row in rows:
        if row["verdict"] == "slower":
            print(f"slower: {row['bench']} {row['row']}: {row['ratio']} ×")
    if options.json:
        content = {
            "schema": "tutti.benchmarks.compare_versions/1",
            "command": sys.argv,
            "cpus": len(os.sched_getaffinity(0)),
            "rounds": options.rounds,
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row["verdict"] == "slower" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
