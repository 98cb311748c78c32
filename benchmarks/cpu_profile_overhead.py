"""How much `tutti profile` slows down a step, while it records (on) and otherwise (off).

    python benchmarks/cpu_profile_overhead.py --json cpu_profile_overhead_MACHINE_DATE.json

Two programs without a profiler run on two CPU ranks with DDP: ten linear layers, and the GPT. Each
program runs alone and under `tutti profile`, alternately, and measures the time of its steps. A
pair of runs gives two ratios:

    off   p50 of the steps before and after the recorded steps, under tutti profile / alone
    on    p50 of the recorded steps / p50 of the steps before and after, in the same run

The result has the p50 and the range of each ratio over all pairs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

BEFORE, WARMUP, ACTIVE, AFTER = 30, 2, 20, 30
WARM = 10  # number of steps at the start that are not counted


def train(model_name: str, file: Path) -> None:
    """Run as one rank of the program. Rank 0 writes the seconds of each step to `file`."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if model_name == "gpt":
        from tutti.models import GPT, GPTConfig

        plain: nn.Module = GPT(GPTConfig(layers=4, dim=128, heads=4, vocab_size=256))
        batch = torch.randint(0, 256, (2, 128))
    else:
        plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
        batch = torch.randn(256, 256)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    # tutti profile counts steps from the end of the program's first step.
    for _ in range(1 + BEFORE + WARMUP + ACTIVE + AFTER):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(seconds[1:]))
    dist.destroy_process_group()


def run(model_name: str, ranks: int, captured: bool) -> list[float]:
    """Run the program, under tutti profile if `captured`. Return the seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seconds.json")
        tutti = [sys.executable, "-m", "tutti"]
        program = ["run", "-n", str(ranks), "--device", "cpu", __file__]
        program += ["--program", model_name, "--file", str(file)]
        schedule = ["--wait", str(BEFORE), "--warmup", str(WARMUP), "--active", str(ACTIVE)]
        profile = ["profile", *schedule, "--out", f"{folder}/out", "--", "tutti"]
        done = subprocess.run(
            [*tutti, *(profile if captured else []), *program],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise SystemExit(f"{model_name} failed:\n{done.stdout}{done.stderr}")
        seconds: list[float] = json.loads(file.read_text())
        return seconds


def off(seconds: list[float]) -> float:
    """Return the p50 of the steps before and after the recorded steps."""
    return median(seconds[WARM:BEFORE] + seconds[BEFORE + WARMUP + ACTIVE + 1 :])


def on(seconds: list[float]) -> float:
    """Return the p50 of the recorded steps, without the last, which also writes the trace."""
    return median(seconds[BEFORE + WARMUP : BEFORE + WARMUP + ACTIVE - 1])


def spread(values: list[float]) -> dict[str, float]:
    """Return p50, min and max."""
    return {
        "p50": round(median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def main() -> None:
    """Run all measurements, or run as the measured program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        train(options.program, options.file)
        return
    rows: list[dict[str, Any]] = []
    for model_name in ("linear", "gpt"):
        pairs = []
        for repeat in range(options.repeats):
            order = [False, True] if repeat % 2 else [True, False]
            both = {captured: run(model_name, options.ranks, captured) for captured in order}
            pairs.append((both[False], both[True]))
        rows.append(
            {
                "program": model_name,
                "ranks": options.ranks,
                "step_ms": spread([1e3 * off(alone) for alone, _ in pairs]),
                "off": spread([off(captured) / off(alone) for alone, captured in pairs]),
                "on": spread([on(captured) / off(captured) for _, captured in pairs]),
                # The ratio `on` of runs without tutti profile, which would be 1 without noise.
                "noise": spread([on(alone) / off(alone) for alone, _ in pairs]),
                "repeats": options.repeats,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        from tutti.machine.environment import describe_environment

        results = {
            "schema": "tutti.benchmarks.cpu_profile_overhead/1",
            "command": sys.argv,
            "environment": describe_environment(),
            "load_average": os.getloadavg()[0],
            "rows": rows,
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
