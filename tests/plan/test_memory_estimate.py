"""Predicted memory against the allocations of real steps, and against figures measured on a GPU."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import tutti
from tutti.models.config import GPTConfig
from tutti.parallel.layout import Layout
from tutti.plan.cluster_spec import named_cluster
from tutti.plan.memory_estimate import MemoryEstimate, MemoryModel
from tutti.plan.model_trace import ModelTracer
from tutti.plan.step_simulation import StepOptions, step_model
from tutti.plan.workload import block_bytes
from tutti.train.init import load_dataset
from tutti.train.loop import Trainer
from tutti.train.recipe import RECIPES, Recipe
from tutti.train.run_directory import RunDirectory
from worlds import in_world

MIB = 2**20
TOLERANCE = 0.02


def _recipe(config: GPTConfig, layout: str = "dp1", **compute: Any) -> Recipe:
    recipe = RECIPES["gpt"]
    return replace(
        recipe,
        architecture=config,
        data=replace(recipe.data, dataset="synthetic", seq_len=config.max_seq_len),
        parallel=replace(recipe.parallel, layout=layout),
        compute=replace(recipe.compute, **compute),
        length=replace(recipe.length, steps=3, evaluate=False),
    )


def _estimates(
    recipe: Recipe, device: str, batch: int, accumulation: int = 1
) -> list[MemoryEstimate]:
    layout = Layout.parse(str(recipe.parallel.layout))
    cluster = named_cluster("cpu" if device == "cpu" else "H200", layout.size)
    tracer = ModelTracer(recipe, load_dataset(recipe), "cpu" if device == "cpu" else "cuda")
    sharded = layout.data_ranks > 1 and not layout.only_replicas
    workload = tracer.workload(layout.tp, batch, sharded)
    options = StepOptions(
        accumulation=accumulation, recompute=recipe.compute.checkpoint_activations, clip=True
    )
    cuts: tuple[int, ...] = (0,)
    if layout.pp > 1:
        cuts = step_model(cluster).stage_cuts(workload, layout.pp)
    return MemoryModel(cluster).estimate(workload, layout, options, cuts)


# -- the allocations of real steps on a CPU --------------------------------------------------------

# Large enough that one allocation more or less is far below the tolerance.
SMALL = GPTConfig(vocab_size=512, max_seq_len=128, layers=6, dim=128, heads=4)
BATCH = 4
CASES = (
    ("dp2", "none", 1),
    ("dp2", "selective", 2),
    ("shard2", "none", 1),
    ("shard2", "full", 1),
    ("tp2", "none", 1),
    ("pp2", "none", 4),
)


def _growth(world: tutti.World, layout: str, recompute: str, accumulation: int) -> int:
    """Return the largest growth of this rank's memory in the third step, by torch's profiler."""
    recipe = _recipe(SMALL, layout, checkpoint_activations=recompute)
    batching = replace(recipe.batching, batch=BATCH, accumulation=accumulation)
    recipe = replace(recipe, batching=batching)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(world, recipe, RunDirectory(Path(folder)), save=False)
        batch = next(iter(trainer.loader.stream()))
        for _ in range(2):
            trainer.stepper(batch)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.stepper(batch)
        trainer.runner.close()
        trainer.test_loader.close()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    waiting, events = list(results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = peak = 0
    for _, size in sorted(events):
        now += size
        peak = max(peak, now)
    return peak


def _growths(world: tutti.World) -> list[int]:
    return [_growth(world, *case) for case in CASES]


@pytest.mark.timeout(240)
def test_activations_gradients_and_gathered_units_are_those_of_real_steps() -> None:
    measured = in_world(_growths, 2, timeout=200)
    errors = {}
    for number, (layout, recompute, accumulation) in enumerate(CASES):
        recipe = _recipe(SMALL, layout, checkpoint_activations=recompute)
        estimates = _estimates(recipe, "cpu", BATCH, accumulation)
        for rank in range(2):
            each = estimates[rank if layout == "pp2" else 0]
            details = dict(each.details)
            # Receive buffers, inputs and buckets exist before the step.
            standing = details.get("inputs", 0) + details.get("receive buffers", 0)
            grown = each.activations + each.gradients + each.buffers - standing
            if layout == "dp2":
                grown -= each.parameters - 2 * 128 * 16 * 4  # buckets; rotary tables are buffers
            errors[f"{layout} {recompute} rank {rank}"] = grown / measured[rank][number] - 1
    wrong = {name: f"{100 * error:+.2f} %" for name, error in errors.items()}
    assert max(map(abs, errors.values())) <= TOLERANCE, wrong


# -- figures measured on one H200 ------------------------------------------------------------------

LARGE = GPTConfig(vocab_size=256, max_seq_len=128, layers=20, dim=2048, heads=16)


@pytest.mark.parametrize(
    ("layout", "accumulation", "peaks"),
    [
        # benchmarks/gpu_training_memory_h200_20261116.json: torch.cuda.max_memory_allocated
        ("shard4", 1, [4872556032]),
        ("tp4", 1, [4123718144]),
        ("pp4", 8, [4642191360, 4539843072, 4441492992, 4343902208]),
    ],
)
def test_the_peak_allocated_memory_is_that_of_an_h200(
    layout: str, accumulation: int, peaks: list[int]
) -> None:
    estimates = _estimates(_recipe(LARGE, layout), "cuda", 1, accumulation)
    for estimate, peak in zip(estimates, peaks, strict=True):
        assert estimate.allocated == pytest.approx(peak, rel=0.005)


def test_bf16_shards_of_a_large_model_are_those_of_an_h200() -> None:
    config = GPTConfig(vocab_size=256, max_seq_len=256, layers=24, dim=4096, heads=32)
    (estimate,) = _estimates(_recipe(config, "shard8", precision="bf16"), "cuda", 4)
    # benchmarks/gpu_training_4800m_shard8_h200_20261116.json
    assert estimate.allocated == pytest.approx(14704457216, rel=0.01)


# -- rules -----------------------------------------------------------------------------------------


def test_other_microbatch_sizes_follow_from_two_traces() -> None:
    tracer = ModelTracer(recipe := _recipe(SMALL, precision="bf16"), load_dataset(recipe))
    for size in (1, 8):
        derived, exact = tracer.workload(1, size), tracer.traced(1, size)
        for one, other in zip(derived.units, exact.units, strict=True):
            assert [each.flops for each in one.forward] == [each.flops for each in other.forward]
            assert [each.shape for each in one.backward] == [each.shape for each in other.backward]
            for mode in ("none", "selective", "full"):
                ours, theirs = one.memory[mode], other.memory[mode]
                assert ours.kept == pytest.approx(theirs.kept, rel=0.01, abs=8192)
                assert ours.forward_peak == pytest.approx(theirs.forward_peak, rel=0.01, abs=8192)


def test_recomputation_keeps_less_and_repeats_operators() -> None:
    tracer = ModelTracer(recipe := _recipe(SMALL), load_dataset(recipe))
    block = tracer.workload(1, 4).units[2]
    kept = [block.memory[mode].kept for mode in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2]
    assert kept[2] == 4 * 128 * 128 * 4  # the input of a block: batch × tokens × dim × float32
    names = [{each.name for each in block.recomputed[mode]} for mode in ("none", "selective")]
    assert not names[0] and "mm" not in names[1] and "silu" in names[1]
    flops = sum(each.flops for each in block.forward)
    again = sum(each.flops for each in block.recomputed["full"])
    assert 0.6 * flops < again <= flops  # the last matrix product needs no recomputation


def test_a_block_of_the_allocator_has_no_rest_below_one_mebibyte() -> None:
    assert block_bytes(1) == 512
    assert block_bytes(43 * MIB) == 44 * MIB
    assert block_bytes(42 * MIB + 512) == 42 * MIB + 512  # a rest of more than 1 MiB is split off
    assert block_bytes(9 * MIB + 1) == 9 * MIB + 512


def test_more_microbatches_in_flight_need_more_memory() -> None:
    tracer = ModelTracer(recipe := _recipe(SMALL), load_dataset(recipe))
    workload, layout = tracer.workload(1, 1), Layout(pp=2)
    cluster = named_cluster("H100", 2)
    cuts, model = step_model(cluster).stage_cuts(workload, 2), MemoryModel(cluster)
    kept = sum(unit.memory["none"].kept for unit in workload.units[: cuts[1]])
    rows = {
        (schedule, count): model.estimate(
            workload, layout, StepOptions(accumulation=count, schedule=schedule), cuts
        )[0].activations
        for schedule in ("gpipe", "1f1b")
        for count in (4, 8)
    }
    assert rows["gpipe", 8] - rows["gpipe", 4] == pytest.approx(4 * kept, rel=1e-6)
    assert rows["1f1b", 8] == rows["1f1b", 4] < rows["gpipe", 4]


def test_meta_traces_leave_no_process_group() -> None:
    tracer = ModelTracer(recipe := _recipe(SMALL), load_dataset(recipe))
    tracer.workload(2, 1)
    assert not torch.distributed.is_initialized()
