"""How well `tutti scale` measures causes that are planted into a plain DDP program.

    python benchmarks/planted_causes.py --json planted_causes_MACHINE_DATE.json

With two ranks the program loses a known time in each step, with one rank it does not:

    input     the dataset sleeps
    gap       all ranks sleep in the training loop
    compute   all ranks multiply matrices
    wait      rank 1 sleeps, and rank 0 waits for it
    exposed   all ranks all-reduce a tensor while nothing computes

The program times the planted part of each step itself. `nothing` is planted first: the loss that
the program has anyway is subtracted. A cause is right if its error is at most 15 %, or if the
planted time lies within its quartiles. `--busy` also runs everything with a busy loop
beside it.
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

import numpy as np

CAUSES = {
    "input": "input",
    "gap": "gaps",
    "compute": "compute",
    "wait": "wait",
    "exposed": "exposed_comm",
}
PARTS = {"gaps": "host_gap", "exposed_comm": "exposed"}  # where part and cause differ in name
TOLERANCE = 0.15


def train(cause: str, seconds: float, times: Path) -> None:
    """One rank of plain DDP; rank 0 (for `wait`, rank 1) writes the planted seconds per step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, planted = dist.get_rank(), dist.get_world_size() > 1
    measured: list[float] = []
    matrix, message = torch.randn(192, 192), torch.ones(250_000)

    def plant(where: str, only_rank: int | None = None) -> None:
        if not planted or cause != where or only_rank not in (None, rank):
            return
        began = time.perf_counter()
        if where == "compute":
            while time.perf_counter() - began < seconds:
                torch.mm(matrix, matrix)
        elif where == "exposed":
            for _ in range(messages):
                dist.all_reduce(message)
        else:
            time.sleep(seconds)
        measured.append(time.perf_counter() - began)

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if index % 64 == 0:
                plant("input")
            return torch.zeros(256)

    messages = 1
    if planted and cause == "exposed":  # how many messages take this long
        plant("exposed")
        measured.clear()
        for _ in range(20):
            dist.barrier()
            plant("exposed")
        count = torch.tensor([seconds / median(measured)])
        dist.broadcast(count, 0)
        messages = max(1, round(count.item()))
        measured.clear()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for number, batch in enumerate(DataLoader(Samples(), batch_size=64)):
        optimizer.zero_grad()
        loss = model(batch.repeat(8, 1)).square().mean()
        plant("gap")
        plant("compute")
        plant("wait", only_rank=1)
        if planted and cause == "exposed":
            dist.barrier()
            plant("exposed")
        loss.backward()
        optimizer.step()
        if number == 20 and rank == (1 if cause == "wait" else 0) and planted:
            times.write_text(json.dumps(measured[6:]))  # before the steps are recorded


def scale(cause: str, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run tutti scale on the program; returns its row with two ranks and the planted seconds."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "planted.json"
        out = Path(folder) / "out"
        words = ["scale", "--ranks", "1,2", "--repeats", str(options.repeats), "--out", str(out)]
        words += ["--device", "cpu", "--", __file__, "--train", cause, str(seconds), str(times)]
        done = subprocess.run(
            [sys.executable, "-m", "tutti", *words], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        result = json.loads((out / "scale.json").read_text())
        row = result["rows"][1]
        planted = median(json.loads(times.read_text())) if cause != "nothing" else 0.0
        runs = {(run["ranks"], run["repeat"]): run["parts_s"] for run in result["runs"]}
        parts = {name: PARTS.get(name, name) for name in CAUSES.values()}
        # The excess of two ranks over one rank in each repeat, in seconds.
        excess = {
            name: [
                runs[2, repeat][part] - runs[1, repeat][part] for repeat in range(options.repeats)
            ]
            for name, part in parts.items()
        }
        return {"cause": cause, "planted_s": planted, "row": row, "excess_s": excess}


def compare(found: dict[str, Any], nothing: dict[str, Any]) -> dict[str, Any]:
    """Compare the median and the quartiles of a planted cause with the planted seconds.

    Seconds of a step are compared, not shares: the other parts of a step may vary.
    """
    row, name = found["row"], CAUSES[found["cause"]]
    by_itself = median(nothing["excess_s"][name])
    low, measured, high = (
        float(np.percentile(found["excess_s"][name], percent)) - by_itself
        for percent in (25, 50, 75)
    )
    error = measured / found["planted_s"] - 1
    return {
        "cause": found["cause"],
        "planted_ms": 1e3 * found["planted_s"],
        "measured_ms": 1e3 * measured,
        "error": error,
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "right": abs(error) <= TOLERANCE or low <= found["planted_s"] <= high,
        "largest_named": row["named"][:1] == [name],
        "named": row["named"],
        "unexplained": row["other"]["unexplained"],
        "verdict": row["verdict"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--milliseconds", default="20,40,80")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trials", type=int, default=1, help="how often everything is run")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for busy in (False, True) if options.busy else (False,):
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            for _ in range(options.trials):
                nothing = scale("nothing", 0.0, options)
                print(f"busy={busy} nothing: {nothing['row']['verdict']}", flush=True)
                for cause in options.causes.split(","):
                    for milliseconds in options.milliseconds.split(","):
                        found = scale(cause, float(milliseconds) / 1e3, options)
                        result = compare(found, nothing) | {"busy": busy}
                        results.append(result)
                        print(
                            "busy={busy} {cause:<8} planted {planted_ms:6.1f} ms, measured "
                            "{measured_ms:6.1f} ({error:+.0%}), right: {right}, largest named: "
                            "{largest_named}, unexplained {unexplained:+.1%}\n    {verdict}".format(
                                **result
                            ),
                            flush=True,
                        )
                        if options.json is not None:
                            content = {"command": sys.argv, "results": results}
                            options.json.write_text(json.dumps(content, indent=1))
        finally:
            if loop is not None:
                loop.kill()
    for busy in sorted({result["busy"] for result in results}):
        chosen = [result for result in results if result["busy"] is busy]
        right = sum(result["right"] for result in chosen)
        named = sum(result["largest_named"] for result in chosen)
        print(f"busy={busy}: {right} of {len(chosen)} right, {named} named as the largest cause")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
