"""A pipeline gives the loss and every gradient of one device, with every schedule.

Tolerance: sums in another order differ by a few units of 2⁻⁵³; 1e-10 relative leaves room for the
depth of the model and catches any sample, microbatch or copy that is counted twice or not at all.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from tutti.models.config import GPTConfig
from tutti.models.gpt import GPT
from tutti.parallel import EngineOptions, build_engine
from tutti.parallel.engine import LossFunction, Microbatch
from tutti.parallel.layout import ParallelOptions
from tutti.parallel.materialize import ModuleInit
from tutti.parallel.pipeline.executor import Pipeline
from tutti.parallel.pipeline.stages import layer_units, measured_seconds
from worlds import in_world

TOLERANCE = 1e-10
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")


def _gpt(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=32, max_seq_len=8, layers=6, dim=16, heads=2, tied=tied)
    return GPT(config).double()


def _sequential() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(7) for layer in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), *hidden, nn.Linear(12, 5)).double()


def _batch(kind: str, samples: int) -> Microbatch:
    generator = torch.Generator().manual_seed(samples)
    if kind == "sequential":
        inputs = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
        return inputs, torch.randint(5, (samples,), generator=generator)
    tokens = torch.randint(32, (samples, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _loss_fn(count: int) -> LossFunction:
    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = outputs.flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / count

    return loss_fn


def _times_8(loss: torch.Tensor) -> torch.Tensor:
    """A loss scale, which must change gradients but not the loss."""
    return loss * 8


def _plain(model: nn.Module, batch: Microbatch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and every gradient, times 8, of the whole batch on one device."""
    inputs, targets = batch
    outputs = model(inputs).flatten(0, -2)
    loss = F.cross_entropy(outputs, targets.flatten(), reduction="mean")
    (loss * 8).backward()
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: each.grad.clone() for name, each in named}  # type: ignore[union-attr]
    model.zero_grad()
    return loss.item(), gradients


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


def _compare(
    engine: Pipeline, whole: nn.Module, kind: str, data_rank: int, data_ranks: int
) -> dict[str, Any]:
    """Run steps of full and of incomplete batches; returns the largest errors and the losses."""
    found: dict[str, Any] = {"loss": [], "worst": 0.0, "names": []}
    size, most = engine.microbatch_size, engine.microbatches
    # A full batch, an incomplete one, one with fewer microbatches, and a full batch again.
    full = size * most * data_ranks
    for samples in (full, full - 3, data_ranks, full):
        batch = _batch(kind, samples)
        loss, gradients = _plain(whole, batch)
        share = samples // data_ranks + (data_rank < samples % data_ranks)
        before = sum(samples // data_ranks + (r < samples % data_ranks) for r in range(data_rank))
        local = [tensor[before : before + share] for tensor in batch]
        microbatches = list(zip(*[tensor.split(size) for tensor in local], strict=True))
        count = batch[1].numel()
        engine.model.zero_grad()
        part = engine.run(microbatches, _loss_fn(count), example=batch[0][:1], scale=_times_8)
        found["loss"].append([part.item(), loss])
        for name, parameter in engine.model.named_parameters():
            assert parameter.grad is not None, name
            error = _error(_full(parameter.grad), gradients[name])
            found["worst"] = max(found["worst"], error)
    found["names"] = [name for name, _ in engine.model.named_parameters()]
    found["aliases"] = engine.aliases
    found["described"] = engine.description
    inputs = _batch(kind, 5)[0]
    outputs = engine.infer(inputs)
    found["outputs"] = None if outputs is None else _error(outputs, whole(inputs))
    found["nothing"] = engine.infer(inputs[:0], inputs[:1]) is None
    return found


def _build(
    world: tutti.World,
    kind: str,
    schedule: str,
    whole: nn.Module,
    layout: str | None = None,
    size: int = 3,
    keep: bool = False,
    **options: Any,
) -> Pipeline:
    engine = build_engine(
        whole if keep else copy.deepcopy(whole),
        world,
        parallel=ParallelOptions(
            layout=layout or f"pp{world.size}",
            pipeline_schedule=schedule,  # type: ignore[arg-type]
            balance="even",
        ),
        example=_batch(kind, 2)[0],
        microbatches=4,
        microbatch_size=size,
        **options,
    )
    assert isinstance(engine, Pipeline)
    return engine


def _all_schedules(world: tutti.World, kind: str) -> dict[str, Any]:
    results = {}
    for schedule in SCHEDULES:
        whole = _sequential() if kind == "sequential" else _gpt(kind == "tied")
        engine = _build(world, kind, schedule, whole)
        results[schedule] = _compare(engine, whole, kind, 0, 1)
    return results


def _sharded(world: tutti.World) -> dict[str, Any]:
    results = {}
    for schedule in SCHEDULES:
        whole = _gpt(tied=True)
        engine = _build(world, "tied", schedule, whole, "shard2.pp2", size=2)
        results[schedule] = _compare(engine, whole, "tied", engine.mesh.data_rank, 2)
    return results


def _recomputed(world: tutti.World) -> float:
    """Zero-bubble runs backward in two halves, which both use the recomputed activations."""
    whole = _gpt(tied=False)
    engine = _build(world, "untied", "zero-bubble", whole, recompute="full")
    batch = _batch("untied", 12)
    _, gradients = _plain(whole, batch)
    pairs = list(zip(*[tensor.split(3) for tensor in batch], strict=True))
    engine.run(pairs, _loss_fn(batch[1].numel()), example=batch[0][:1], scale=_times_8)
    worst = 0.0
    for name, parameter in engine.model.named_parameters():
        assert parameter.grad is not None
        worst = max(worst, _error(parameter.grad, gradients[name]))
    return worst


class Normed(nn.Module):
    """A block, so that it can be recomputed, with all kinds of norms over several samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.instance_norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(self.fc(x)))
        return x + self.instance_norm(y.view(-1, 2, 6)).flatten(1)


# Samples of each microbatch of a step: full microbatches; short ones; one without samples on the
# last data rank (if there are several data ranks); two without samples on any rank.
SIZES = ([3, 3, 3, 3], [3, 2, 2, 2], [2, 2, 2, 0], [3, 2])


def _batch_norms(world: tutti.World, layout: str, schedule: str, recompute: str) -> Any:
    """The largest errors of gradients and statistics after steps of these sizes.

    The reference is a plain loop in which a microbatch has the samples of all data ranks.
    """
    torch.manual_seed(0)
    blocks = [Normed() for _ in range(6)]
    whole = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), *blocks, nn.Linear(12, 5)).double()
    engine = build_engine(
        copy.deepcopy(whole),
        world,
        EngineOptions(sync_batchnorm=True),
        ParallelOptions(layout=layout, pipeline_schedule=schedule, balance="even"),  # type: ignore[arg-type]
        example=_batch("sequential", 2)[0],
        microbatches=4,
        microbatch_size=3,
        recompute=recompute,  # type: ignore[arg-type]
    )
    rank, ranks = engine.mesh.data_rank, engine.mesh.layout.data_ranks
    gradients = 0.0
    for sizes in SIZES:
        sizes_of_ranks = [
            sizes if r == ranks - 1 else [size or 2 for size in sizes] for r in range(ranks)
        ]
        batch = _batch("sequential", sum(map(sum, sizes_of_ranks)))
        loss_fn = _loss_fn(len(batch[0]))
        parts = [
            tensor.split([sum(rank_sizes) for rank_sizes in sizes_of_ranks]) for tensor in batch
        ]
        cut = [[part[r].split(sizes_of_ranks[r]) for part in parts] for r in range(ranks)]
        pairs = [list(zip(*rank_sizes, strict=True)) for rank_sizes in cut]
        whole.zero_grad()
        for microbatch in zip(*pairs, strict=True):
            inputs, targets = (torch.cat(tensors) for tensors in zip(*microbatch, strict=True))
            if len(inputs):
                _times_8(loss_fn(whole(inputs), targets)).backward()  # type: ignore[no-untyped-call]
        engine.model.zero_grad()
        engine.run(pairs[rank], loss_fn, example=batch[0][:1], scale=_times_8)
        for name, parameter in engine.model.named_parameters():
            right = whole.get_parameter(name).grad
            assert parameter.grad is not None and right is not None, name
            gradients = max(gradients, float((_full(parameter.grad) - right).abs().max()))
    statistics = {
        name: float((_full(buffer) - whole.get_buffer(name)).abs().max())
        for name, buffer in engine.model.named_buffers()
        if ranks == 1 or ".instance_norm." not in name  # statistics of one rank's samples only
    }
    return gradients, statistics


def _refusals(world: tutti.World) -> list[str]:
    whole = _sequential()
    engine = _build(world, "sequential", "1f1b", whole)
    inputs, targets = _batch("sequential", 4)
    loss_fn = _loss_fn(4)
    compiled = copy.deepcopy(whole)
    for layer in compiled.children():
        layer.compile()
    messages = []
    for attempt in (
        lambda: engine.run([(inputs, targets)], loss_fn),
        lambda: engine.run([(inputs[:1], targets[:1])] * 5, loss_fn),
        lambda: engine(inputs),
        lambda: _build(world, "sequential", "zbv", compiled, keep=True),
        lambda: build_engine(
            _gpt(tied=False),
            world,
            parallel=ParallelOptions(layout="pp2", pipeline_schedule="zbv"),
            recompute="selective",
        ),
        lambda: build_engine(
            _gpt(tied=False),
            world,
            parallel=ParallelOptions(layout="pp2", pipeline_schedule="zbv"),
            recompute="full",
            compile=True,
        ),
    ):
        try:
            attempt()
        except tutti.UsageError as error:
            messages.append(str(error))
    return messages


def _measured(model: nn.Module) -> list[float]:
    return measured_seconds(
        model, layer_units(model), _batch("untied", 2)[0], ModuleInit(model, 0), torch.device("cpu")
    )


def _two_ranks(world: tutti.World) -> dict[str, Any]:
    with torch.device("meta"):
        model = _gpt(tied=False)
    return {
        "sequential": _all_schedules(world, "sequential"),
        "tied": _all_schedules(world, "tied"),
        "recomputed": _recomputed(world),
        "batch norms": [
            _batch_norms(world, "pp2", "1f1b", "none"),
            _batch_norms(world, "pp2", "1f1b", "full"),
            _batch_norms(world, "pp2", "zbv", "full"),
        ],
        "refusals": _refusals(world),
        "measured": _measured(model),
        "clean": all(
            parameter.grad is None and parameter.is_meta for parameter in model.parameters()
        ),
    }


def _four_ranks(world: tutti.World) -> dict[str, Any]:
    return {
        "untied": _all_schedules(world, "untied"),
        "sharded": _sharded(world),
        "joint batch norms": [
            _batch_norms(world, "dp2.pp2", "1f1b", "full"),
            _batch_norms(world, "shard2.pp2", "interleaved", "none"),
        ],
    }


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """The results of ranks for the tests below, in two worlds, since a start takes seconds."""
    worlds = [in_world(_two_ranks, 2), in_world(_four_ranks, 4)]
    return {key: [rank[key] for rank in ranks] for ranks in worlds for key in ranks[0]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["sequential", "tied", "untied", "sharded"])
def test_a_pipeline_gives_the_loss_and_gradients_of_one_device(
    results: dict[str, list[Any]], kind: str, schedule: str
) -> None:
    of = [rank[schedule] for rank in results[kind]]
    reporting_ranks = 2 if kind == "sharded" else 1  # one per part of the batch
    for step in range(4):
        losses = [rank["loss"][step] for rank in of]
        assert sum(part for part, _ in losses) == pytest.approx(losses[0][1], rel=TOLERANCE)
        assert sum(part != 0 for part, _ in losses) == reporting_ranks
    for rank in of:
        assert rank["worst"] < TOLERANCE
        assert rank["nothing"]
        assert rank["described"] == of[0]["described"]
    outputs = [rank["outputs"] for rank in of if rank["outputs"] is not None]
    assert len(outputs) == reporting_ranks and max(outputs) < TOLERANCE


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["sequential", "tied", "untied"])
def test_every_parameter_is_on_one_rank_under_its_name_in_the_whole_model(
    results: dict[str, list[Any]], kind: str, schedule: str
) -> None:
    whole = _sequential() if kind == "sequential" else _gpt(kind == "tied")
    of = [rank[schedule] for rank in results[kind]]
    names = [name for rank in of for name in rank["names"] if name not in rank["aliases"]]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    # The copies of a tied parameter are aliases of the first copy.
    aliases = [rank["aliases"] for rank in of if rank["aliases"]]
    assert aliases == ([{"head.weight": "embed.weight"}] if kind == "tied" else [])


def test_zero_bubble_gives_the_same_with_recomputed_activations(
    results: dict[str, list[Any]],
) -> None:
    assert all(worst < TOLERANCE for worst in results["recomputed"])


@pytest.mark.parametrize("key", ["batch norms", "joint batch norms"])
def test_norms_count_real_samples_only(results: dict[str, list[Any]], key: str) -> None:
    """Each microbatch counts once, without the padding that the schedule needs."""
    for variant in zip(*results[key], strict=True):
        names = {name for _, statistics in variant for name in statistics}
        assert len(names) == (7 + (key == "batch norms") * 6) * 3
        for gradients, statistics in variant:
            assert gradients < TOLERANCE
            wrong = {name: error for name, error in statistics.items() if error > TOLERANCE}
            assert not wrong


def test_ranks_cut_by_the_same_measured_costs_and_measuring_leaves_no_gradients(
    results: dict[str, list[Any]],
) -> None:
    first, second = results["measured"]
    assert first == second and len(first) == 9 and all(cost > 0 for cost in first)
    assert results["clean"] == [True, True]


def test_a_pipeline_refuses_steps_that_do_not_fit(results: dict[str, list[Any]]) -> None:
    for messages in results["refusals"]:
        assert (
            "a microbatch of 4 samples does not fit a pipeline that was built for 3" in messages[0]
        )
        assert "5 microbatches does not fit a pipeline that was built for 4" in messages[1]
        assert "use run() or infer()" in messages[2]
        assert "--compile" in messages[3] and "--pipeline-schedule zbv" in messages[3]
        assert "--checkpoint-activations selective" in messages[4] and "1f1b" in messages[4]
        assert messages[5] == messages[3]
