"""Does the plan choose a fast layout? Predicts all layouts of 4 CPU ranks, then measures them.

    tutti plan --calibrate rates.json --gpus 4xcpu
    python benchmarks/plan_cpu_layouts.py --calibration rates.json --out plan_cpu_layouts_DATE.json

For each of 10 small jobs, `tutti plan` predicts the step time of every layout of 4 ranks, with the
best settings of the layout. Then 4 ranks train with them, all layouts in turns. The regret
is the measured time of the layout that the plan ranks first, divided by the time of the fastest
measured layout, minus 1. `rank_correlation` is Spearman's, over the layouts of a job.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tutti
from tutti.machine.environment import describe_environment
from tutti.models.config import GPTConfig, WideResNetConfig
from tutti.plan.calibration_file import read_calibration
from tutti.plan.cluster_spec import named_cluster
from tutti.plan.planned_job import PlannedJob
from tutti.train.loop import Trainer
from tutti.train.recipe import RECIPES, Recipe
from tutti.train.run_directory import RunDirectory
from tutti.world.exchange import gather_json
from tutti.world.launch import LocalWorld

RANKS, WARM_UP, STEPS, ROUNDS = 4, 1, 2, 3


def jobs() -> dict[str, Recipe]:
    """Return the jobs by name: GPTs of several shapes and batches, and convolutional networks."""

    def gpt(layers: int, dim: int, vocabulary: int, seq_len: int, batch: int) -> Recipe:
        model = GPTConfig(
            vocab_size=vocabulary, max_seq_len=seq_len, layers=layers, dim=dim, heads=dim // 64
        )
        return _job("gpt", model, batch, seq_len)

    return {
        "deep GPT": gpt(16, 256, 512, 128, 16),
        "wide GPT": gpt(4, 1024, 512, 128, 8),
        "GPT with a large vocabulary": gpt(4, 256, 16_384, 64, 16),
        "GPT with long sequences": gpt(4, 256, 512, 1024, 4),
        "GPT with short sequences": gpt(8, 512, 512, 32, 8),
        "GPT with a small batch": gpt(8, 512, 512, 128, 4),
        "GPT with a large batch": gpt(4, 256, 512, 64, 128),
        "large GPT": gpt(8, 1024, 2048, 64, 8),
        "WideResNet": _job("wideresnet", WideResNetConfig(depth=10, width=2, classes=100), 16, 0),
        "LeNet": _job("lenet", RECIPES["lenet"].architecture, 256, 0),
    }


def _job(base: str, model: Any, batch: int, seq_len: int) -> Recipe:
    recipe = RECIPES[base]
    data = replace(recipe.data, dataset="synthetic", workers=0)
    data = replace(data, seq_len=seq_len) if seq_len else replace(data, pixels=recipe.data.pixels)
    if base == "wideresnet":
        data = replace(data, pixels=32)
    return replace(
        recipe,
        architecture=model,
        data=data,
        batching=replace(recipe.batching, batch=batch, global_batch=batch),
        compute=replace(recipe.compute, precision="float32"),
        length=replace(recipe.length, steps=1000, evaluate=False),
    )


def with_layout(recipe: Recipe, row: dict[str, Any]) -> Recipe:
    """Return the recipe with the layout and the settings of a row of `predict`."""
    return replace(
        recipe,
        batching=replace(recipe.batching, accumulation=row["accumulation"]),
        parallel=replace(
            recipe.parallel,
            layout=row["layout"],
            pipeline_schedule=row["schedule"],
            stages_per_rank=row["stages_per_rank"],
        ),
        engine=replace(recipe.engine, bucket_mb=row["bucket_mb"]),
        compute=replace(recipe.compute, checkpoint_activations=row["recompute"]),
    )


def predict(recipe: Recipe, calibration: Path) -> list[dict[str, Any]]:
    """Return the best settings of every layout that fits, in the order of the predicted times."""
    cluster = named_cluster("cpu", RANKS)
    rates = read_calibration(calibration, cluster)[0]
    plan = PlannedJob.of(recipe, "cpu", calibration=rates).plan(cluster)
    best: dict[str, dict[str, Any]] = {}
    for planned in plan.layouts:
        candidate, options = planned.candidate, planned.candidate.options
        if not planned.fits or planned.step is None:
            continue
        row = {
            "layout": str(candidate.layout),
            "accumulation": options.accumulation,
            "recompute": options.recompute,
            "schedule": options.schedule,
            "stages_per_rank": options.stages_per_rank,
            "bucket_mb": options.bucket_mb,
            "predicted_s": planned.step.step_s,
        }
        known = best.get(row["layout"])
        if known is None or row["predicted_s"] < known["predicted_s"]:
            best[row["layout"]] = row
    return sorted(best.values(), key=lambda row: row["predicted_s"])


def measure(world: tutti.World, recipes: list[Recipe]) -> list[list[float]]:
    """Return the seconds of a step for every recipe and round. The recipes take turns."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = []
        for number, recipe in enumerate(recipes):
            run = RunDirectory(Path(folder) / f"{world.rank}-{number}")
            trainers.append(Trainer(world, recipe, run, save=False))
            trainers[-1].runner.run(WARM_UP)
        seconds: list[list[float]] = [[] for _ in recipes]
        for _ in range(ROUNDS):
            for trainer, times in zip(trainers, seconds, strict=True):
                gather_json(None)  # a barrier
                began = time.perf_counter()
                trainer.runner.run(STEPS)
                times.append(max(gather_json(time.perf_counter() - began)) / STEPS)
        for trainer in trainers:
            trainer.runner.close()
            trainer.test_loader.close()
            trainer.metrics.close()
        del trainers
        gc.collect()
    return seconds


def run_rank(out: Path) -> None:
    """Measure all layouts of all jobs. Rank 0 adds the times to the file after each job."""
    result = json.loads(out.read_text())
    with tutti.init(device="cpu") as world:
        for row in result["rows"]:
            recipe, layouts = jobs()[row["job"]], row["layouts"]
            rounds = measure(world, [with_layout(recipe, layout) for layout in layouts])
            measured = [statistics.median(times) for times in rounds]
            for layout, times, seconds in zip(layouts, rounds, measured, strict=True):
                layout |= {"measured_s": seconds, "rounds_s": times}
            row |= {
                "chosen": layouts[0]["layout"],
                "fastest": layouts[measured.index(min(measured))]["layout"],
                "regret": measured[0] / min(measured) - 1,
                "rank_correlation": _spearman([x["predicted_s"] for x in layouts], measured),
            }
            if world.is_first:
                done = [each["regret"] for each in result["rows"] if "regret" in each]
                result["median_regret"] = statistics.median(done)
                result["regrets_up_to_5_percent"] = sum(regret <= 0.05 for regret in done)
                out.write_text(json.dumps(result, indent=1) + "\n")
                print(
                    f"{row['job']}: chosen {row['chosen']}, fastest {row['fastest']}, regret "
                    f"{100 * row['regret']:.1f} %, correlation {row['rank_correlation']:.2f}",
                    flush=True,
                )


def _spearman(first: list[float], second: list[float]) -> float:
    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(number)) for number in range(len(values))]

    return statistics.correlation(ranks(first), ranks(second)) if len(first) > 1 else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.out)
        return
    result = {
        "schema": "tutti.benchmarks.plan_cpu_layouts/1",
        "command": ["python", *sys.argv],
        "environment": describe_environment(),
        "calibration": json.loads(options.calibration.read_text()),
        "rows": [
            {"job": name, "layouts": predict(recipe, options.calibration)}
            for name, recipe in jobs().items()
        ],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    command = [sys.executable, *sys.argv, "--rank"]
    sys.exit(LocalWorld(command, ranks=RANKS, device="cpu").run())


if __name__ == "__main__":
    main()
