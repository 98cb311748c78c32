"""Time of a DDP step of a communication-bound model on CPU ranks, with several backends.

    python benchmarks/cpu_ddp_step.py --ranks 2 --json benchmarks/cpu_ddp_step_MACHINE_DATE.json

The model has ten layers of 1024 × 1024 (40 MB of gradients), and trains with SGD and batch 32 on
each rank. Every backend trains its own copy of the same model on the same batches. In each round,
the backends take turns, and each makes a few steps. The losses must be the same for all backends.
The time of a step is its time on the slowest rank. Ranks are pinned to CPUs. `--ranks 4` on two
cores shows the time if there are more ranks than cores.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tutti.measure.spread import summarize_us
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

LAYERS, WIDTH, BATCH = 10, 1024, 32


def measure(backends: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Return the step times of the slowest rank, and the losses of this rank, by backend."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import tutti
    from tutti.bench.collectives.backends import process_group
    from tutti.bench.rank_control import RankControl, pin_rank
    from tutti.world.exchange import gather_json

    with tutti.init(device="cpu") as world:
        cpus = gather_json(pin_rank(world))
        control = RankControl()
        runs = {}
        for backend in backends:
            torch.manual_seed(0)
            layers = [
                layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
            ]
            model = DistributedDataParallel(
                nn.Sequential(*layers[:-1]), process_group=process_group(backend)[0]
            )
            runs[backend] = (model, torch.optim.SGD(model.parameters(), lr=0.05))
        generator = torch.Generator().manual_seed(1 + world.rank)
        batches = torch.randn(rounds * steps, BATCH, WIDTH, generator=generator)
        times: dict[str, list[float]] = {backend: [] for backend in backends}
        losses: dict[str, list[float]] = {backend: [] for backend in backends}

        for number in range(rounds):
            turn = number % len(backends)
            for backend in backends[turn:] + backends[:turn]:
                model, optimizer = runs[backend]
                control.check_stop()
                for batch in batches[number * steps : (number + 1) * steps]:
                    began = time.perf_counter()
                    optimizer.zero_grad()
                    loss = (model(batch) - batch.roll(1, -1)).square().mean()
                    loss.backward()
                    optimizer.step()
                    times[backend].append(time.perf_counter() - began)
                    losses[backend].append(loss.item())
        slowest = {
            backend: control.max_over_ranks(each[steps:])  # the first round warms up
            for backend, each in times.items()
        }
        return {
            "first": world.is_first,
            "ranks": world.size,
            "cpus": cpus,
            "times": slowest,
            "losses": losses,
        }


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row per backend: step time, speed-up over the first backend, loss difference."""
    (first, reference), *_ = found["losses"].items()
    rows = []
    for backend, seconds in found["times"].items():
        losses = found["losses"][backend]
        spread = summarize_us(seconds)
        rows.append(
            {
                "backend": backend,
                "ranks": found["ranks"],
                "step_ms": {
                    name: value if name == "cv" else round(value / 1e3, 3)
                    for name, value in spread.items()
                },
                "speedup": 0.0,
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "largest_loss_difference": max(
                    abs(one - other) / abs(other)
                    for one, other in zip(losses, reference, strict=True)
                ),
            }
        )
    for row in rows:
        row["speedup"] = round(rows[0]["step_ms"]["p50"] / row["step_ms"]["p50"], 3)
    return {"baseline": first, "cpus": found["cpus"], "rows": rows}


def main() -> None:
    """Start the ranks, or run as one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", default="gloo,shm")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of one backend in each round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if identify(os.environ).launcher == "python":
        command = [sys.executable, *sys.argv]
        sys.exit(LocalWorld(command, options.ranks, device="cpu", show="first").run())

    from tutti.machine.environment import describe_environment

    found = measure(options.backends.split(","), options.rounds, options.steps)
    if not found["first"]:
        return
    results = {
        "schema": "tutti.benchmarks.cpu_ddp_step/1",
        "command": sys.argv,
        "environment": describe_environment(),
        "model": f"{LAYERS} layers of {WIDTH} × {WIDTH}, batch {BATCH} on each rank, SGD",
        **summary(found),
    }
    for row in results["rows"]:
        print(
            f"{row['backend']:<12} {row['step_ms']['p50']:8.2f} ms  {row['speedup']:.2f} ×  "
            f"loss {row['first_loss']:.6f} → {row['last_loss']:.6f}, "
            f"difference {row['largest_loss_difference']:.1e}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    # Backends may add the gradients of four ranks in different orders: losses differ by rounding.
    if any(row["largest_loss_difference"] > 1e-5 for row in results["rows"]):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
