"""The single-device reference compared with textbook formulas, and the sizes of workloads."""

import pytest
import torch
from torch import nn

from tutti import UsageError
from tutti.models.config import GPTConfig, WideResNetConfig
from tutti.parallel.layout import Layout, ParallelOptions
from tutti.parity.diagnosis import compare_tensors
from tutti.parity.parity_options import (
    ParityOptions,
    full_size_options,
    microbatches_of,
    samples_for,
    small_options,
)
from tutti.parity.single_device import (
    Scales,
    Workload,
    derive_scales,
    first_names,
    global_microbatches,
    make_workload,
    parameter_roles,
    random_samples,
    train_single_device,
)
from tutti.train.task import class_dim

CPU = torch.device("cpu")
DP1, DP2 = Layout(), Layout(dp=2)


def _tiny(**changes: object) -> Workload:
    shape = GPTConfig(vocab_size=16, max_seq_len=8, layers=1, dim=16, heads=2, mlp_dim=32)
    options = ParityOptions(architecture=shape, seq_len=8, **changes)  # type: ignore[arg-type]
    return make_workload("gpt", options, [DP2])


def test_a_workload_alternates_full_and_uneven_steps() -> None:
    workload = _tiny(steps=3)
    assert workload.counts == [6, 3, 6]
    assert [len(workload.step(number)[0]) for number in range(3)] == [6, 3, 6]
    first, again = workload.make_model(), workload.make_model()
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sgd_matches_the_formula_with_momentum_and_clipping() -> None:
    workload = _tiny(steps=2)
    scales = derive_scales(workload, CPU)
    one, two = train_single_device(workload, "sgd", scales, DP1, CPU)
    start = dict(workload.make_model().double().named_parameters())
    for number, step in enumerate((one, two)):
        squares = sum(float(each.square().sum()) for each in step.gradients.values())
        assert step.norm == pytest.approx(squares**0.5, rel=1e-12)
        assert step.norm > scales.clip, f"clipping must act in step {number}"
    decay = 0.1
    for name in start:
        weight, rate = start[name].detach(), decay * (start[name].dim() > 1)
        speed = one.gradients[name] * scales.clip / (one.norm + 1e-6) + rate * weight
        change = -scales.sgd_lr * speed
        torch.testing.assert_close(one.updates[name], change, rtol=1e-9, atol=1e-15)
        push = two.gradients[name] * scales.clip / (two.norm + 1e-6) + rate * (weight + change)
        change = change - scales.sgd_lr * (0.9 * speed + push)
        torch.testing.assert_close(two.updates[name], change, rtol=1e-9, atol=1e-15)


def test_adamw_adds_eps_to_the_root_of_v() -> None:
    """In the first step, m / √v is ±1, the sign of the gradient, if the gradient exceeds eps."""
    workload = _tiny(steps=2)
    scales = derive_scales(workload, CPU)
    step = next(train_single_device(workload, "adamw", scales, DP1, CPU))
    gradient = step.gradients["norm.weight"] * scales.clip / (step.norm + 1e-6)
    change = -scales.adamw_lr * gradient / (gradient.abs() + scales.eps)
    torch.testing.assert_close(step.updates["norm.weight"], change, rtol=1e-9, atol=1e-15)
    every = torch.cat([g.flatten() for g in step.gradients.values()]) * scales.clip / step.norm
    assert (every[every != 0].abs() > scales.eps).float().mean() > 0.9


def test_padding_is_not_in_the_mean() -> None:
    workload = _tiny(steps=2, padded=True)
    inputs, targets = workload.step(0)
    logits = workload.make_model().double()(inputs).log_softmax(-1).detach()
    losses = [
        -float(logits[i, j, targets[i, j]])
        for i in range(len(targets))
        for j in range(targets.shape[1])
        if targets[i, j] != -100
    ]
    assert workload.padded and len(losses) < targets.numel()
    step = next(train_single_device(workload, "sgd", derive_scales(workload, CPU), DP1, CPU))
    assert step.loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_a_global_microbatch_has_the_samples_of_all_ranks() -> None:
    parts = global_microbatches(8, data_ranks=2, microbatches=2)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    parts = global_microbatches(7, data_ranks=4, microbatches=4)  # the last rank has one sample
    assert [part.tolist() for part in parts] == [[0, 2, 4, 6], [1, 3, 5]]


def test_with_batch_norms_the_loss_depends_on_the_microbatches() -> None:
    shape = WideResNetConfig(depth=10, width=1)
    workload = make_workload(
        "wideresnet", ParityOptions(architecture=shape, pixels=8, steps=2), [DP2]
    )
    assert workload.batch_norms
    scales = Scales(clip=1.0, sgd_lr=0.1, adamw_lr=1e-3, eps=1e-6)
    alone, in_two = (
        next(train_single_device(workload, "sgd", scales, layout, CPU)) for layout in (DP1, DP2)
    )
    assert abs(alone.loss - in_two.loss) > 1e-6


def test_a_difference_has_a_factor_and_a_residual() -> None:
    b = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    twice = compare_tensors("w", 2 * b, b, min_scale=0.0)
    assert (twice.error, twice.factor, twice.residual) == (1.0, 2.0, 0.0)
    small = compare_tensors("w", b * 1e-9, torch.zeros_like(b), min_scale=1.0)
    assert small.error == pytest.approx(4e-9) and small.factor == 1.0


def test_nan_at_the_same_places_is_equal_only_in_buffers() -> None:
    b = torch.tensor([1.0, torch.nan, -torch.inf], dtype=torch.float64)
    assert compare_tensors("w", b, b, min_scale=0.0).error == torch.inf
    assert compare_tensors("mask", b, b, min_scale=0.0, finite_only=False).error == 0.0


@pytest.mark.parametrize(
    ("outputs", "targets", "cure"),
    [
        ({"logits": torch.zeros(2, 3)}, torch.zeros(2).long(), 'outputs["logits"]'),
        ((torch.zeros(2, 3), None), torch.zeros(2).long(), "tuple of Tensor, NoneType"),
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 5, 4).long(), "in dim 1"),
        (torch.zeros(2, 3), torch.zeros(2), "targets.long()"),
        (torch.zeros(2), torch.zeros(2).long(), "one logit per class"),
    ],
)
def test_outputs_that_are_no_logits_are_refused_with_a_cure(
    outputs: object, targets: torch.Tensor, cure: str
) -> None:
    with pytest.raises(UsageError) as error:
        class_dim(outputs, targets, "mine:net")
    assert cure in str(error.value) and "\n" not in str(error.value)
    for shape, dim in (((2, 4, 5, 3), 3), ((2, 3, 4, 5), 1), ((2, 4, 4, 4), 1), ((2, 4, 5), 2)):
        right = torch.zeros(2, 4, 5)[..., : shape[-1]] if dim < 3 else torch.zeros(2, 4, 5)
        right = right[:, :, 0] if len(shape) == 3 else right
        assert class_dim(torch.zeros(shape), right.long(), "mine:net") == dim


def test_a_tied_parameter_has_one_name_and_its_own_role() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(4, 3), nn.LayerNorm(3)
            self.layers = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(3, 3)})])
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    roles = parameter_roles(Tied())
    assert roles["embed.weight"] == "tied embedding" and "head.weight" not in roles
    assert roles["norm.bias"] == "norm" and roles["layers.0.fc.weight"] == "layers.fc"
    assert first_names(Tied())["head.weight"] == "embed.weight"


@pytest.mark.parametrize("layout", ["dp1", "tp4", "shard2.tp2", "pp2", "dp2.pp4"])
def test_a_single_layout_has_an_uneven_step(layout: str) -> None:
    batch, uneven = samples_for([Layout.parse(layout)], ParityOptions(), batch_norms=False)
    assert 0 < uneven < batch


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_no_microbatch_of_a_batch_norm_is_a_single_sample(ranks: int) -> None:
    options = ParityOptions()
    layouts = Layout.every(ranks)
    for some in ([Layout(dp=ranks)], layouts):
        for count in samples_for(some, options, batch_norms=True):
            for layout in some:
                microbatches = microbatches_of(layout, options.parallel)
                parts = global_microbatches(count, layout.data_ranks, microbatches)
                assert min(len(part) for part in parts) > 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_small_sizes_divide_by_every_layout_of_the_ranks(ranks: int) -> None:
    layouts = Layout.every(ranks)
    parallel = ParallelOptions(pipeline_schedule="interleaved")
    options = small_options("gpt", layouts, parallel)
    shape = options.architecture
    assert isinstance(shape, GPTConfig)
    for layout in layouts:
        assert not shape.heads % layout.tp and not shape.max_seq_len % layout.tp
        assert not shape.vocab_size % layout.tp and not shape.hidden % layout.tp
        assert not shape.layers % (layout.pp * 2)
        batch, uneven = samples_for(layouts, options, batch_norms=False)
        assert not batch % (layout.data_ranks * microbatches_of(layout, options.parallel))
        assert 0 < uneven < batch


def test_full_size_options_are_those_of_the_recipe() -> None:
    assert full_size_options("gpt").architecture == GPTConfig()
    with pytest.raises(UsageError, match="--recipe gtp: did you mean gpt"):
        full_size_options("gtp")


def test_random_samples_fit_the_first_and_the_last_layer() -> None:
    options = ParityOptions(seq_len=5, pixels=6)
    text = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 9))
    samples = random_samples(text, 10, options)
    assert samples.inputs.shape == (10, 5) and samples.inputs.max() < 7
    assert samples.targets.shape == (10, 5) and samples.targets.max() < 9
    images = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    assert random_samples(images, 10, options).inputs.shape == (10, 3, 6, 6)
    with pytest.raises(UsageError, match=r"no embedding, linear layer .*add --dataset"):
        random_samples(nn.LayerNorm(3), 10, options)
    with pytest.raises(UsageError, match="does not accept numbers of shape"):
        random_samples(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)), 10, options)
