"""Measure two checkouts of tutti in turns on this machine, and compare every figure.

    python benchmarks/compare_versions.py --old PATH --new PATH --rounds 5 --json FILE

PATH is a checkout whose compiled parts are built in place (python setup.py build_ext --inplace).
Each round runs every bench with the old version and with the new version, in an order that changes
from round to round. A figure is the median over the rounds; its spread is the quartile range over
the rounds. A figure counts as slower or faster if the quartile ranges of old and new do not overlap
and the medians differ by more than --tolerance. Exit code 1: at least one figure is slower.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BENCHES = {
    "collectives": "--backends shm --sizes 4:64M:x8 --ops all --budget 0.02",
    "symmetric": "--sizes 1K",
    "pairs": "--budget 1",
}
# The time of a row, in the unit of its own bench: ratios are compared, not times.
TIMES = {"collectives": "time_us.p50", "symmetric": "p50_us", "pairs": "optimized_ms"}
KEYS = ("op", "name", "backend", "bytes", "placement", "timing", "group")


def measure(checkout: Path, bench: str, ranks: int) -> dict[str, float]:
    """Run one bench with one version; returns {row: time}."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        flags = ["--device", "cpu", "--ranks", str(ranks), "--json", str(path)]
        command = [sys.executable, "-m", "tutti", "bench", bench, *BENCHES[bench].split(), *flags]
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
            found[" ".join(str(row[key]) for key in KEYS if key in row)] = float(value)
    return found


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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    versions = {"old": options.old.resolve(), "new": options.new.resolve()}
    times: dict[str, dict[str, dict[str, list[float]]]] = {}
    for round_number in range(options.rounds):
        order = list(versions) if round_number % 2 == 0 else list(versions)[::-1]
        for bench in options.benches.split(","):
            for version in order:
                for row, value in measure(versions[version], bench, options.ranks).items():
                    both = times.setdefault(bench, {}).setdefault(row, {"old": [], "new": []})
                    both[version].append(value)
        print(f"round {round_number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    rows = []
    for bench, found in times.items():
        for row, both in found.items():
            if min(map(len, both.values())) >= 2:
                verdict = judge(both["old"], both["new"], options.tolerance)
                rows.append({"bench": bench, "row": row, **verdict})
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
