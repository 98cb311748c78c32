"""Compare the times of `tutti bench collectives` with a plain loop, for gloo on two ranks.

    python benchmarks/cpu_gloo_by_hand.py --json benchmarks/cpu_gloo_by_hand_MACHINE_DATE.json

The plain loop uses torch.distributed in separate processes, and does not use tutti. It warms up,
and then reads the clock after each call. The time of a call is its time on the slowest rank. The
loop and `tutti bench` run alternately, each `--rounds` times. For one operation and size, the range
of the loop is from the lowest first quartile to the highest third quartile of all rounds. Both
agree if this range overlaps the range of tutti's p50s. The exit code is 1 if they do not agree.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OPS = ("all_reduce", "broadcast")
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
SECONDS = 0.5  # for each operation and size, in the loop and in tutti (--budget)


def be_a_rank(rank: int) -> None:
    """Run the plain loop as one of two ranks. Rank 0 prints p25, p50 and p75 in µs."""
    import torch
    import torch.distributed as dist

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found: dict[str, list[float]] = {}
    for op in OPS:
        for size in SIZES:
            tensor = torch.ones(size // 4)
            call = (
                (lambda t=tensor: dist.all_reduce(t))
                if op == "all_reduce"
                else (lambda t=tensor: dist.broadcast(t, 0))
            )
            began = time.perf_counter()
            for _ in range(10):
                call()
            once = torch.tensor((time.perf_counter() - began) / 10, dtype=torch.float64)
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
            times = int(min(5000, max(8, SECONDS / float(once))))
            dist.barrier()
            stamps = [time.perf_counter()]
            for _ in range(times):
                call()
                stamps.append(time.perf_counter())
            seconds = torch.tensor(stamps, dtype=torch.float64).diff()
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            quartiles = seconds.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
            found[f"{op} {size}"] = [round(each * 1e6, 3) for each in quartiles.tolist()]
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def by_hand() -> dict[str, list[float]]:
    """Run the plain loop. Return p25, p50 and p75 in µs, by operation and size."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank of the plain loop failed: see its messages above")
    found: dict[str, list[float]] = json.loads(outputs[0])
    return found


def by_tutti() -> dict[str, float]:
    """Run `tutti bench collectives`. Return its p50s in µs, by operation and size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        flags = ["--backends", "gloo", "--device", "cpu", "--ranks", "2", "--json", str(file)]
        flags += ["--ops", ",".join(OPS), "--sizes", ",".join(map(str, SIZES))]
        command = [sys.executable, "-m", "tutti", "bench", "collectives", *flags]
        subprocess.run([*command, "--budget", str(SECONDS)], check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(file.read_text())["rows"]
    return {f"{row['op']} {row['bytes']}": row["time_us"]["p50"] for row in rows}


def compare(
    hand: list[dict[str, list[float]]], ours: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Return a row per operation and size: both times, and whether they agree."""
    rows = []
    for what in hand[0]:
        op, _, size = what.partition(" ")
        low, high = min(run[what][0] for run in hand), max(run[what][2] for run in hand)
        middles, p50s = sorted(run[what][1] for run in hand), sorted(run[what] for run in ours)
        rows.append(
            {
                "op": op,
                "bytes": int(size),
                "by_hand_us": {"p50": middles, "p25": low, "p75": high},
                "tutti_us": {"p50": p50s},
                "ratio": round(p50s[len(p50s) // 2] / middles[len(middles) // 2], 3),
                "agree": low <= p50s[-1] and p50s[0] <= high,
            }
        )
    return rows


def main() -> None:
    """Run the loop and tutti alternately, or run as a rank of the loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_a_rank(options.rank)
        return

    from tutti.machine.environment import describe_environment

    hand, ours = [], []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        hand.append(by_hand())
        ours.append(by_tutti())
    rows = compare(hand, ours)
    print(f"{'':<10} {'bytes':>9} {'by hand (us)':>22} {'tutti (us)':>22} {'ratio':>6}")
    for row in rows:
        loop, p50s = row["by_hand_us"], row["tutti_us"]["p50"]
        spans = [f"{loop['p25']:.1f}–{loop['p75']:.1f}", f"{p50s[0]:.1f}–{p50s[-1]:.1f}"]
        end = "" if row["agree"] else "  APART"
        print(
            f"{row['op']:<10} {row['bytes']:>9} {spans[0]:>22} {spans[1]:>22} "
            f"{row['ratio']:>6.2f}{end}"
        )
    if options.json is not None:
        results = {
            "schema": "tutti.benchmarks.cpu_gloo_by_hand/1",
            "command": sys.argv,
            "environment": describe_environment(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if not all(row["agree"] for row in rows):
        sys.exit("tutti and the plain loop do not agree in the rows marked APART")


if __name__ == "__main__":
    main()
