"""Models on meta: initial weights do not depend on the layout; no rank holds the whole model."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
from tutti.models import GPT, GPTConfig, LeNet, LeNetConfig, WideResNet, WideResNetConfig
from tutti.parallel import EngineOptions, build_engine
from tutti.parallel.engine import Engine
from tutti.parallel.layout import ParallelOptions
from tutti.parallel.materialize import (
    CopiedWeights,
    ModuleInit,
    Weights,
    build_on_meta,
    check_replicas_equal,
    materialize,
)
from tutti.parallel.tensor import loss_context
from tutti.world.errors import RanksDiffer, UsageError
from worlds import in_world

SEED = 3
TOKENS = torch.arange(16).view(2, 8)


class Scaled(nn.Linear):
    """A layer with its own initialisation."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.1)
        nn.init.constant_(self.bias, 0.5)


class Block(nn.Module):
    """With a buffer that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = Scaled(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) @ self.mask


def own_module() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *[Block() for _ in range(3)], nn.Linear(8, 4))


class Learned(nn.Module):
    """Weights that only the constructor can set."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def made_in_the_constructor() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Learned(), nn.Linear(8, 8), nn.Linear(8, 4))


def _ours(make: Callable[[], nn.Module]) -> tuple[nn.Module, Weights]:
    with torch.device("meta"):
        model = make()
    return model, ModuleInit(model, SEED)


def _users(make: Callable[[], nn.Module]) -> tuple[nn.Module, Weights]:
    return build_on_meta(make, SEED)[:2]


def _gpt(tied: bool = False) -> nn.Module:
    return GPT(GPTConfig(vocab_size=32, max_seq_len=8, layers=4, dim=16, heads=2, tied=tied))


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Weights]], Tensor]] = {
    "gpt": (lambda: _ours(_gpt), TOKENS),
    "tied gpt": (lambda: _ours(lambda: _gpt(tied=True)), TOKENS),
    "lenet": (lambda: _ours(lambda: LeNet(LeNetConfig())), torch.zeros(1, 1, 28, 28)),
    "wideresnet": (
        lambda: _ours(lambda: WideResNet(WideResNetConfig(depth=10, width=1))),
        torch.zeros(1, 3, 8, 8),
    ),
    "own": (lambda: _users(own_module), torch.zeros(2, 6)),
    "constructor": (lambda: _users(made_in_the_constructor), torch.zeros(2, 6)),
}
LAYOUTS = {
    1: {"dp1": MODELS},
    2: {
        "dp2": MODELS,
        "shard2": MODELS,
        "tp2": ("gpt", "tied gpt"),
        "pp2": ("gpt", "tied gpt", "own", "constructor"),
    },
    4: {
        "dp2.tp2": ("gpt", "tied gpt"),
        "shard2.tp2": ("gpt", "tied gpt"),
        "shard2.pp2": ("gpt", "tied gpt", "own", "constructor"),
        "tp2.pp2": ("gpt", "tied gpt"),
        "dp2.shard2": MODELS,
    },
}


def _differing(world: tutti.World) -> dict[str, list[str]]:
    """Names of parameters and buffers that differ in any bit from those of one device."""
    found = {}
    for layout, names in LAYOUTS[world.size].items():
        for name in names:
            make, example = MODELS[name]
            whole, weights = make()
            materialize(whole, torch.device("cpu"))
            weights.fill(whole)
            tensors = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()]
            right = dict(tensors)
            model, weights = make()
            engine = build_engine(
                model,
                world,
                EngineOptions(engine="single") if world.size == 1 else None,
                ParallelOptions(layout=layout),
                example=example,
                microbatches=4,
                microbatch_size=2,
                weights=weights,
            )
            check_replicas_equal(engine.model, engine.mesh)
            held = [*engine.model.named_parameters(), *engine.model.named_buffers()]
            assert held and not any(tensor.is_meta for _, tensor in held)
            found[f"{layout} {name}"] = [
                key for key, tensor in held if not torch.equal(_full(tensor), right[key])
            ]
    return found


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_initial_weights_are_those_of_one_device_in_every_layout(ranks: int) -> None:
    for found in in_world(_differing, ranks, timeout=200):
        assert len(found) == sum(len(names) for names in LAYOUTS[ranks].values())
        assert not {name: tensors for name, tensors in found.items() if tensors}


def test_seeds_and_modules_have_different_weights() -> None:
    def weights_of(seed: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = _gpt()
        weights = ModuleInit(model, seed)
        materialize(model, torch.device("cpu"))
        weights.fill(model)
        return dict(model.named_parameters())

    first, second = weights_of(0), weights_of(1)
    assert torch.equal(first["head.weight"], weights_of(0)["head.weight"])
    assert not torch.equal(first["head.weight"], second["head.weight"])
    wo = [first[f"blocks.{n}.attention.wo.weight"] for n in range(4)]
    assert not torch.equal(wo[0], wo[1])
    # Written to the residual stream: scaled by 1 / √(2 layers), here √8.
    ratio = first["blocks.0.attention.wq.weight"].std() / torch.cat(wo).std()
    assert 2.0 < float(ratio) < 4.0


def test_building_does_not_change_the_random_generator() -> None:
    with torch.device("meta"):
        model = _gpt()
    weights = ModuleInit(model, 0)
    materialize(model, torch.device("cpu"))
    torch.manual_seed(7)
    weights.fill(model)
    drawn = torch.randn(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.randn(3))


def _loaded() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    return model


def _applied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)  # type: ignore[return-value]


def _through_data() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.data.fill_(1.0)
    return model


class _Extra(nn.Linear):
    """A parameter that the inherited reset_parameters does not set."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_loaded, "0.weight"),
        (_applied, "0.weight"),
        (_through_data, "weight"),
        (_Extra, "scale"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2), "layers.0"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "parametrizations"),
    ],
)
def test_weights_that_modules_cannot_draw_are_copied_from_a_real_model(
    make: Callable[[], nn.Module], name: str
) -> None:
    torch.manual_seed(SEED)
    right = make().state_dict()
    model, weights, note = build_on_meta(make, SEED)
    assert isinstance(weights, CopiedWeights)
    assert note is not None and name in note
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, torch.device("cpu"))
    weights.fill(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, right[key]), key


def test_plain_modules_are_built_without_memory_and_freezing_them_changes_nothing() -> None:
    def make() -> nn.Module:
        model = own_module()
        model[0].weight.requires_grad = False
        model[1].up.requires_grad_(False)
        return model

    model, weights, note = build_on_meta(make, SEED)
    assert isinstance(weights, ModuleInit) and note is None
    materialize(model, torch.device("cpu"))
    weights.fill(model)
    assert not model[0].weight.requires_grad and not model[1].up.bias.requires_grad
    assert torch.equal(model[1].up.bias, torch.full((16,), 0.5))
    assert torch.equal(model[1].mask, torch.tril(torch.ones(8, 8)))


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(UsageError, match="lazy"):
        build_on_meta(lambda: nn.Sequential(nn.LazyLinear(3)), SEED)


def test_a_half_materialised_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with tutti.init(device="cpu") as world, pytest.raises(UsageError, match=r"1\.weight"):
        build_engine(model, world, EngineOptions(engine="single"))


def _one_rank_differs(world: tutti.World) -> str:
    model, weights = _ours(_gpt)
    engine = build_engine(
        model, world, None, ParallelOptions(layout="dp2.tp2"), example=TOKENS, weights=weights
    )
    with torch.no_grad():
        if world.rank == 3:
            norm = engine.model.get_parameter("norm.weight")
            assert isinstance(norm, DTensor)
            norm.to_local().add_(1)
    try:
        check_replicas_equal(engine.model, engine.mesh)
    except RanksDiffer as error:
        return str(error)
    return ""


def test_a_replica_that_differs_is_named_on_every_rank() -> None:
    for message in in_world(_one_rank_differs, 4):
        assert "rank 3" in message and "norm.weight" in message


# 46 million parameters, 184 MB in float32; with gradients and AdamW's state 736 MB.
CONFIG = GPTConfig(vocab_size=1024, max_seq_len=16, layers=14, dim=512, heads=8)
WHOLE = 4 * CONFIG.parameters()


def _vm_data() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def _limit(more: int) -> None:
    """Limit the private memory that the process may still map to this many bytes."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_vm_data() + more, hard))


def _gpt_engine(world: tutti.World, config: GPTConfig, layout: str) -> Engine:
    model, weights = _ours(lambda: GPT(config))
    return build_engine(
        model,
        world,
        None,
        ParallelOptions(layout=layout),
        example=torch.zeros(1, 16, dtype=torch.int64),
        microbatches=4,
        microbatch_size=1,
        weights=weights,
    )


def _one_step(engine: Engine) -> float:
    tokens = torch.arange(4 * 16).view(4, 16) % 32
    parts = list(zip(tokens.split(1), tokens.split(1), strict=True))
    optimizer = torch.optim.AdamW(engine.model.parameters(), fused=True)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss

    with loss_context(engine.mesh.layout.tp > 1):
        loss = engine.run(parts, loss_fn)
    optimizer.step()
    return float(loss)


def _under_a_limit(world: tutti.World, layout: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    small = GPTConfig(vocab_size=64, max_seq_len=16, layers=4, dim=16, heads=4)
    _one_step(_gpt_engine(world, small, layout))  # threads and buffers that any step needs
    results: dict[str, Any] = {}
    _limit(int(0.6 * WHOLE))
    try:
        torch.empty(WHOLE // 4)
        results["whole"] = "fits"
    except RuntimeError:
        results["whole"] = "refused"
    engine = _gpt_engine(world, CONFIG, layout)
    held = sum(
        parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes
        for parameter in engine.model.parameters()
    )
    results["share"] = held / WHOLE
    # Gradients, AdamW's two moments and activations: much less than 4 × WHOLE.
    _limit(int(3 * held + 0.8 * WHOLE))
    results["loss"] = _one_step(engine)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return results


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["shard4", "tp4", "pp4", "shard2.tp2"])
def test_a_model_that_no_rank_could_hold_is_built_and_trained(layout: str) -> None:
    for results in in_world(_under_a_limit, 4, layout, timeout=200):
        assert results["whole"] == "refused"
        assert results["share"] < 0.35
        assert results["loss"] == results["loss"]  # not NaN
