"""What the recorder of `tutti why` costs: steps with 50 collectives, with and without it.

    python benchmarks/recorder_cost.py --out benchmarks/recorder_cost_MACHINE_DATE.json

New processes with and without the recorder take turns, because it cannot be switched off again. Two
cases are timed: 50 all-reduces of 4 bytes in a group of one rank, which need only the CPU time of
torch and gloo, and a DDP-like step of about 5 ms on two ranks with 50 all-reduces of 4 KiB on shm.
Each process reports the median time of its steps and checks the sums.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLLECTIVES = 50


def run_rank(backend: str, elements: int, compute_s: float, steps: int, store: str) -> None:
    """Time steps on this rank. Rank 0 prints the median and the resident memory."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    values = torch.ones(elements)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        while time.perf_counter() - start < compute_s:
            pass
        for _ in range(COLLECTIVES):
            dist.all_reduce(values)
        times.append(time.perf_counter() - start)
        assert values[0] == size**COLLECTIVES if size == 1 else values[0] > 0
        values.fill_(1.0)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(statistics.median(times[steps // 5 :])))


def time_once(case: list[str], ranks: int, recorded: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",  # names the job; the ranks meet through a file
                "TUTTI_OBSERVE": str(int(recorded)),
                "CUDA_VISIBLE_DEVICES": "",
            }
            command = [sys.executable, __file__, "--rank", *case, f"{folder}/store"]
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    return float(json.loads(outputs[0]))


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        backend, elements, compute_s, steps, store = sys.argv[2:]
        run_rank(backend, int(elements), float(compute_s), int(steps), store)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    from tutti.machine.environment import describe_environment

    cases = {
        "50 all-reduces of 4 B, one rank, gloo": (["gloo", "1", "0", "2000"], 1),
        "5 ms step with 50 all-reduces of 4 KiB, two ranks, shm": (
            ["shm", "1024", "0.0045", "600"],
            2,
        ),
    }
    rows = []
    for name, (case, ranks) in cases.items():
        pairs = []
        for number in range(options.rounds):
            order = (True, False) if number % 2 else (False, True)
            seconds = {recorded: time_once(case, ranks, recorded) for recorded in order}
            pairs.append((seconds[False], seconds[True]))
        extra = sorted((with_ - without) * 1e6 for without, with_ in pairs)
        row = {
            "case": name,
            "step_us": statistics.median(without for without, _ in pairs) * 1e6,
            "extra_us_per_step": {
                "p50": statistics.median(extra),
                "p25": extra[len(extra) // 4],
                "p75": extra[-1 - len(extra) // 4],
            },
            "extra_share": statistics.median(with_ / without - 1 for without, with_ in pairs),
            "pairs_s": pairs,
        }
        rows.append(row)
        print(f"{name}: step {row['step_us']:.0f} µs, recorder {row['extra_us_per_step']}")
    result = {
        "schema": "tutti.benchmarks.recorder_cost/1",
        "command": ["python", *sys.argv],
        "environment": describe_environment(),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
