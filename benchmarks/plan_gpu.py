"""Predicts memory and step time of 48 small jobs without a GPU, then measures them on one GPU.

    python benchmarks/plan_gpu.py --predict benchmarks/plan_gpu_H200_DATE.json
    python benchmarks/plan_gpu.py --measure benchmarks/plan_gpu_H200_DATE.json

--predict needs no GPU; with --calibration FILE, it uses the rates of a file of tutti plan
--calibrate. --measure runs every job of the file with the ordinary Trainer on synthetic
data, with 1, 2 and 4 ranks that share the first GPU, and writes measured values and errors next to
the predictions after each job. Two steps are warm-up: cuDNN tries kernels in the first step, and
the optimizer creates its state at its end. Then the peak of torch.cuda.memory_allocated is reset.
`first_peak_bytes` is the peak of the warm-up. Step times are compared for jobs with one rank only,
because ranks that share a GPU are not faster than one rank.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tutti.machine.environment import describe_environment
from tutti.models.config import EfficientNetConfig, GPTConfig, OwnModelConfig, WideResNetConfig
from tutti.parallel.layout import Layout
from tutti.plan.calibration_file import read_calibration
from tutti.plan.cluster_spec import named_cluster
from tutti.plan.memory_estimate import MemoryModel
from tutti.plan.model_trace import ModelTracer
from tutti.plan.step_simulation import Calibration, StepOptions, step_model
from tutti.train.init import load_dataset
from tutti.train.loop import Trainer
from tutti.train.recipe import RECIPES, Recipe
from tutti.train.run_directory import RunDirectory
from tutti.world.exchange import gather_json
from tutti.world.launch import LocalWorld

sys.path.insert(0, str(Path(__file__).parent))  # so that a recipe can name llama() and tokens()
SEQ_LEN, VOCABULARY = 1024, 32_000
WARM_UP, STEPS, SHARED_STEPS = 2, 10, 3

# (model, precision, recompute, layout, microbatch, accumulation, pipeline schedule)
Case = tuple[str, str, str, str, int, int, str]


def llama() -> nn.Module:
    """A Llama of Hugging Face transformers, from a config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=SEQ_LEN,
            use_cache=False,
        )
    )


def tokens() -> Any:
    """256 samples of random tokens; targets are the next tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (256, SEQ_LEN + 1), generator=generator)
    pair: tuple[Tensor, Tensor] = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    return pair, pair


def cases() -> list[Case]:
    """Return the jobs, those with one rank first."""
    found: list[Case] = []
    for precision in ("bf16", "float32"):
        for recompute in ("none", "selective", "full"):
            for batch in (2, 8):
                found.append(("gpt", precision, recompute, "dp1", batch, 1, "1f1b"))
        for recompute in ("none", "full"):
            found.append(("wideresnet", precision, recompute, "dp1", 256, 1, "1f1b"))
            found.append(("llama", precision, recompute, "dp1", 4, 1, "1f1b"))
        found.append(("efficientnet", precision, "none", "dp1", 256, 1, "1f1b"))
    found.append(("gpt", "bf16", "none", "dp1", 4, 4, "1f1b"))
    for precision in ("bf16", "float32"):
        found.append(("gpt", precision, "none", "dp2", 4, 1, "1f1b"))
        found.append(("gpt", precision, "none", "shard2", 4, 1, "1f1b"))
        found.append(("gpt", precision, "none", "tp2", 4, 1, "1f1b"))
        found.append(("gpt", precision, "none", "pp2", 2, 4, "1f1b"))
    found += [
        ("gpt", "bf16", "selective", "dp2", 4, 2, "1f1b"),
        ("gpt", "bf16", "full", "shard2", 4, 2, "1f1b"),
        ("gpt", "bf16", "selective", "tp2", 4, 1, "1f1b"),
        ("gpt", "bf16", "full", "pp2", 2, 4, "gpipe"),
        ("gpt", "bf16", "none", "pp2", 2, 4, "interleaved"),
        ("wideresnet", "bf16", "none", "dp2", 128, 1, "1f1b"),
        ("efficientnet", "bf16", "none", "shard2", 128, 1, "1f1b"),
        ("llama", "bf16", "none", "shard2", 4, 1, "1f1b"),
        ("llama", "float32", "full", "dp2", 4, 1, "1f1b"),
        ("gpt", "bf16", "none", "shard4", 4, 1, "1f1b"),
        ("gpt", "float32", "full", "shard4", 4, 1, "1f1b"),
        ("gpt", "bf16", "none", "tp4", 4, 1, "1f1b"),
        ("gpt", "float32", "none", "pp4", 2, 8, "1f1b"),
        ("gpt", "bf16", "none", "dp2.shard2", 4, 1, "1f1b"),
        ("gpt", "bf16", "none", "shard2.tp2", 4, 1, "1f1b"),
        ("gpt", "bf16", "none", "shard2.pp2", 2, 4, "1f1b"),
        ("gpt", "bf16", "none", "tp2.pp2", 2, 4, "1f1b"),
    ]
    return sorted(found, key=lambda case: Layout.parse(case[3]).size)


def recipe_of(case: Case) -> Recipe:
    """Return the training job of a case, on synthetic data."""
    model, precision, recompute, layout, batch, accumulation, schedule = case
    if model == "llama":
        recipe = replace(RECIPES["own"], model="plan_gpu:llama", architecture=OwnModelConfig())
        data = replace(recipe.data, dataset="plan_gpu:tokens", seq_len=SEQ_LEN)
    else:
        recipe = RECIPES[model]
        pixels = 28 if model == "gpt" else 32
        data = replace(recipe.data, dataset="synthetic", seq_len=SEQ_LEN, pixels=pixels)
    architectures = {
        "gpt": GPTConfig(vocab_size=VOCABULARY, max_seq_len=SEQ_LEN, layers=8, dim=1024, heads=16),
        "wideresnet": WideResNetConfig(depth=28, width=10, classes=100),
        "efficientnet": EfficientNetConfig(size="s", stem_stride=1, classes=100),
    }
    size = Layout.parse(layout).data_ranks
    return replace(
        recipe,
        architecture=architectures.get(model, recipe.architecture),
        data=data,
        batching=replace(
            recipe.batching,
            batch=batch,
            accumulation=accumulation,
            global_batch=batch * accumulation * size,
        ),
        parallel=replace(recipe.parallel, layout=layout, pipeline_schedule=schedule),
        compute=replace(recipe.compute, precision=precision, checkpoint_activations=recompute),
        length=replace(recipe.length, steps=1000, evaluate=False),
    )


# -- prediction ------------------------------------------------------------------------------------


def predict(accelerator: str, calibration: Calibration | None) -> list[dict[str, Any]]:
    """Return a row for every case, with the predicted peaks of all pipeline ranks."""
    rows = []
    tracers: dict[tuple[str, str], ModelTracer] = {}
    for case in cases():
        recipe = recipe_of(case)
        key = (case[0], case[1])
        if key not in tracers:
            tracers[key] = ModelTracer(recipe, load_dataset(recipe))
        layout = Layout.parse(case[3])
        workload = tracers[key].workload(
            layout.tp, case[4], layout.data_ranks > 1 and not layout.only_replicas
        )
        options = StepOptions(
            accumulation=case[5],
            schedule=recipe.parallel.pipeline_schedule,
            recompute=recipe.compute.checkpoint_activations,
            optimizer=recipe.optimization.optimizer,
            clip=recipe.optimization.clip is not None,
        )
        times = step_model(named_cluster(accelerator, layout.size), calibration)
        cuts: tuple[int, ...] = (0,)
        if layout.pp > 1:
            cuts = times.stage_cuts(workload, layout.pp * options.virtual_stages)
        memory = MemoryModel(times.cluster).estimate(workload, layout, options, cuts)
        step = times.simulate(workload, layout, options)
        rows.append(
            {
                "case": list(case),
                "predicted_peak_bytes": [each.allocated for each in memory],
                "predicted_memory": [each.row() for each in memory],
                "moment": [each.moment for each in memory],
                "predicted_step_s": step.step_s,
                "predicted_band_s": list(step.band),
                "predicted_parts": dict(step.parts),
            }
        )
        print(f"{' '.join(map(str, case))}: {memory[0].allocated / 2**30:.3f} GiB", flush=True)
    return rows


# -- measurement -----------------------------------------------------------------------------------


def measure_case(world: tutti.World, case: Case) -> dict[str, Any]:
    """Train a few steps of a case. Return the peaks of all ranks and the seconds of a step."""
    gc.collect()
    torch.cuda.empty_cache()
    device = world.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    steps = STEPS if world.size == 1 else SHARED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(world, recipe_of(case), RunDirectory(Path(folder)), save=False)
        trainer.runner.run(WARM_UP)
        torch.cuda.synchronize()
        first = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            trainer.runner.run(1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        # The host does not wait between these steps, as in training.
        began = time.perf_counter()
        trainer.runner.run(steps)
        torch.cuda.synchronize()
        mean = (time.perf_counter() - began) / steps
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        trainer.runner.close()
        trainer.test_loader.close()
        trainer.metrics.close()
        del trainer
    found = gather_json([peak, first, reserved, before, mean, statistics.median(seconds)])
    keys = ("peak_bytes", "first_peak_bytes", "reserved_bytes", "bytes_before", "step_s", "p50_s")
    return {key: [row[number] for row in found] for number, key in enumerate(keys)}


def run_rank(file: Path, ranks: int, deadline: float) -> None:
    """Measure all cases with this number of ranks. Rank 0 writes the file after each case."""
    content = json.loads(file.read_text())
    shared = ranks if ranks > 1 else None
    with tutti.init(device="cuda", ranks_per_gpu=shared) as world:
        for row in content["rows"]:
            case: Case = tuple(row["case"])
            if Layout.parse(case[3]).size != ranks or "measured" in row:
                continue
            # All ranks must make the same decision.
            if max(gather_json(time.time())) > deadline:
                break
            row["measured"] = measure_case(world, case)
            if world.is_first:
                _add_errors(row, Layout.parse(case[3]))
                file.write_text(json.dumps(content, indent=1) + "\n")
                error, name = row["memory_error"], " ".join(map(str, case))
                print(f"{name}: memory {100 * error:+.2f} %, step {_percent(row)}", flush=True)


def _add_errors(row: dict[str, Any], layout: Layout) -> None:
    peaks, per_stage = row["measured"]["peak_bytes"], layout.size // layout.pp
    errors = [
        row["predicted_peak_bytes"][rank // per_stage] / peak - 1 for rank, peak in enumerate(peaks)
    ]
    row["memory_error"] = max(errors, key=abs)
    row["step_error"] = None
    if layout.size == 1:
        row["step_error"] = row["predicted_step_s"] / row["measured"]["step_s"][0] - 1


def _percent(row: dict[str, Any]) -> str:
    return "not compared" if row["step_error"] is None else f"{100 * row['step_error']:+.1f} %"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and worst errors of all measured rows."""
    memory = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    steps = [abs(row["step_error"]) for row in rows if row.get("step_error") is not None]
    return {
        "measured": len(memory),
        "memory_median": statistics.median(memory) if memory else None,
        "memory_worst": max(memory, default=None),
        "memory_within_5_percent": sum(error <= 0.05 for error in memory),
        "step_mape": statistics.fmean(steps) if steps else None,
        "step_worst": max(steps, default=None),
        "step_geometric_mean_ratio": math.exp(
            statistics.fmean(
                math.log(1 + row["step_error"]) for row in rows if row.get("step_error") is not None
            )
        )
        if steps
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", type=Path, default=None)
    parser.add_argument("--measure", type=Path, default=None)
    parser.add_argument("--accelerator", default="H200")
    parser.add_argument("--calibration", type=Path, default=None, help="for --predict")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks to measure, such as 1")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds of --measure")
    parser.add_argument("--rank-of", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        run_rank(options.measure, options.rank_of, options.deadline)
        return
    if options.predict is not None:
        calibration = None
        if options.calibration is not None:
            calibration = read_calibration(options.calibration)[0]
        content = {
            "schema": "tutti.plan_gpu/1",
            "command": ["python", *sys.argv],
            "predicted_on": describe_environment(),
            "accelerator": options.accelerator,
            "calibration": None if options.calibration is None else options.calibration.name,
            "rows": predict(options.accelerator, calibration),
        }
        options.predict.write_text(json.dumps(content, indent=1) + "\n")
        return
    if options.measure is None:
        parser.error("give --predict FILE or --measure FILE")
    deadline = time.time() + options.budget
    failed = []
    for ranks in [int(text) for text in options.ranks.split(",")]:
        command = [sys.executable, __file__, "--measure", str(options.measure)]
        command += ["--rank-of", str(ranks), "--deadline", str(deadline)]
        code = LocalWorld(command, ranks=ranks, device="cuda", ranks_per_gpu=ranks).run()
        failed += [ranks] * (code != 0)
    content = json.loads(options.measure.read_text())
    content["environment"] = describe_environment()
    content["summary"] = summary(content["rows"])
    content["failed"] = failed
    options.measure.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["summary"], indent=1))
    if failed:
        sys.exit(f"the worlds with {failed} ranks ended with an error")


if __name__ == "__main__":
    main()
