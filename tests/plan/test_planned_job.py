"""The job of a plan equals the job of tutti train: batch, memory, flags and machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.cli import plan as command
from tutti.machine.cpu_numa import allowed_cpus
from tutti.parallel.layout import Layout
from tutti.plan import calibrate, cluster_spec
from tutti.plan.cluster_spec import cluster_of_device, named_cluster
from tutti.plan.memory_estimate import MemoryModel
from tutti.plan.model_trace import model_without_weights
from tutti.plan.planned_job import PlannedJob, job_of, planning_dataset
from tutti.plan.search import Candidate, candidates
from tutti.plan.step_simulation import StepOptions
from tutti.train.recipe import RECIPES, Recipe
from tutti.train.recipe_check import MANY_SAMPLES
from tutti.train.training_schedule import make_schedule
from tutti.world.errors import UsageError
from tutti.world.spawn import RankFailed

RECORDED = Path(__file__).parents[1] / "machine" / "machines" / "h100-nvswitch.json"


def _recipe(**sections: dict[str, Any]) -> Recipe:
    recipe = RECIPES["gpt"]
    sections = {"data": {"dataset": "synthetic", "seq_len": 16}} | sections
    sections["architecture"] = {"layers": 4, "dim": 32, "heads": 2, "max_seq_len": 16}
    changed = {name: replace(getattr(recipe, name), **each) for name, each in sections.items()}
    return replace(recipe, **changed)


@pytest.mark.parametrize("layout", [None, "dp4", "dp2.tp2", "dp2.pp2", "pp4"])
@pytest.mark.parametrize("accumulation", [None, 4])
def test_the_global_batch_is_that_of_training(layout: str | None, accumulation: int | None) -> None:
    recipe = _recipe(
        batching={"batch": 2, "accumulation": accumulation}, parallel={"layout": layout}
    )
    job = job_of(recipe, planning_dataset(recipe), 4)
    assert job.global_batch == make_schedule(recipe, 4, MANY_SAMPLES).global_batch


def test_the_search_keeps_the_accumulation_and_passes_options_on() -> None:
    recipe = _recipe(
        batching={"batch": 2, "accumulation": 4},
        compute={"compile": True},
        parallel={"async_tp": True},
        optimization={"ema": 0.99},
    )
    planned = PlannedJob.of(recipe, "cuda")
    job = job_of(recipe, planned.tracer.dataset, 2, ("--accumulation",))
    refused: dict[str, str] = {}
    found = list(candidates(planned.tracer.workload, named_cluster("H100", 2), job, refused))
    assert not refused
    assert {each.options.accumulation for each in found} == {4}
    assert len({each.layout for each in found}) == 4  # dp2, shard2, tp2 and pp2
    for each in found:
        assert each.options.compiled and each.options.ema
        assert each.options.async_tp == (each.layout.tp > 1)


def test_flags_name_defaults_that_a_recipe_file_may_have_changed() -> None:
    flags = Candidate(Layout(dp=2), 1, StepOptions()).flags()
    assert flags[flags.index("--checkpoint-activations") + 1] == "none"
    assert flags[flags.index("--bucket-mb") + 1] == "25"
    assert "--bucket-mb" not in Candidate(Layout(shard=2), 1, StepOptions()).flags()


def test_averages_of_ema_are_float32_and_part_of_the_optimizer() -> None:
    traced = PlannedJob.of(_recipe(), "cuda").tracer.workload(1, 1, False)
    memory = MemoryModel(named_cluster("H100", 1))
    for size in (2, 4):
        units = tuple(
            replace(each, parameters=tuple(replace(p, element_bytes=size) for p in each.parameters))
            for each in traced.units
        )
        workload = replace(traced, units=units)
        optimizer = [
            memory.peak(workload, Layout(), StepOptions(ema=ema), (0,)).optimizer
            for ema in (False, True)
        ]
        # Allocations are rounded up to 512 bytes.
        assert optimizer[1] - optimizer[0] == pytest.approx(4 * workload.parameters, rel=0.06)


def test_lora_freezes_a_module_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = "from torch import nn", "def make():", "    return nn.Sequential(nn.Linear(8, 8))"
    (tmp_path / "model_for_lora.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    recipe = replace(RECIPES["lenet"], model="model_for_lora:make", lora="rank=2")
    model = model_without_weights(recipe, None)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * 8 + 8 * 2


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_the_name_of_the_driver_finds_the_accelerator(device: str, name: str) -> None:
    assert cluster_of_device(device, 4).accelerator == name


def test_a_cpu_cluster_has_the_cores_and_memory_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert named_cluster("cpu", 1).processors <= len(allowed_cpus())
    monkeypatch.setattr(cluster_spec, "allowed_cpus", lambda: tuple(range(6)))
    monkeypatch.setattr(cluster_spec, "cpu_quota", lambda: 4)
    limits = replace(cluster_spec.read_limits(cluster_spec.SysFiles()), cgroup_memory_bytes=2**20)
    monkeypatch.setattr(cluster_spec, "read_limits", lambda files: limits)
    cluster = named_cluster("cpu", 2)
    assert (cluster.processors, cluster.memory_bytes) == (2, 2**19)


@pytest.mark.parametrize(
    ("options", "sizes", "per_node"),
    [
        (command.PlanFlags(gpus="1..12xH100"), [1, 2, 4, 8], 8),
        (command.PlanFlags(gpus="8..32xH100"), [8, 16, 32], 8),
        (command.PlanFlags(gpus="4..16", machine=RECORDED), [4, 8, 16], 8),
        (command.PlanFlags(machine=RECORDED), [8], 8),
    ],
)
def test_a_range_has_nodes_of_its_largest_size(
    options: command.PlanFlags, sizes: list[int], per_node: int
) -> None:
    clusters = command._clusters(options)
    assert [each.gpus for each in clusters] == sizes
    assert {each.per_node for each in clusters} == {per_node}


def test_a_failed_calibration_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankFailed("rank 1 on host failed: ValueError: x\nTraceback\n  more")

    monkeypatch.setattr("tutti.world.spawn.spawn", fail)
    words = ["--calibrate", str(tmp_path / "rates.json"), "--gpus", "2xcpu"]
    assert command.main(words) == 1
    assert capsys.readouterr().err == (
        "tutti plan: --calibrate: rank 1 on host failed: ValueError: x\n"
    )
    # An unknown GPU is refused before ranks start.
    monkeypatch.setattr("tutti.machine.gpus.visible_gpu_count", lambda: 1)
    unknown = {"gpus": [{"name": "NVIDIA L40S"}]}
    monkeypatch.setattr(calibrate, "describe_environment", lambda: unknown)
    with pytest.raises(UsageError, match=r"--calibrate: .*L40S"):
        calibrate.calibrate(tmp_path / "rates.json", ranks=None)
