"""What layouts are held to, held to something itself: textbook formulas and plain counting."""

import pytest
import torch
from torch import nn

from tutti import UsageError
from tutti.models.config import GPTConfig, WideResNetConfig
from tutti.parallel.layout import Layout
from tutti.parallel.options import ParallelOptions
from tutti.parity.candidate import difference
from tutti.parity.case import Case, make_case
from tutti.parity.noise import fitting_noise
from tutti.parity.options import (
    ParityOptions,
    microbatches_of,
    options_of,
    samples_for,
    small_options_of,
)
from tutti.parity.reference import Scales, global_microbatches, scales_of, train_alone
from tutti.parity.roles import aliases_of, roles_of

CPU = torch.device("cpu")
DP1, DP2 = Layout(), Layout(dp=2)


def _tiny(**changes: object) -> Case:
    shape = GPTConfig(vocab_size=16, max_seq_len=8, layers=1, dim=16, heads=2, mlp_dim=32)
    options = ParityOptions(architecture=shape, seq_len=8, **changes)  # type: ignore[arg-type]
    return make_case("gpt", options, [DP2])


def test_a_case_has_whole_steps_and_an_uneven_one_between() -> None:
    case = _tiny(steps=3)
    assert case.counts == [6, 3, 6]
    assert [len(case.step(number)[0]) for number in range(3)] == [6, 3, 6]
    first, again = case.make_model(), case.make_model()
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sgd_follows_the_textbook() -> None:
    case = _tiny(steps=2)
    scales = scales_of(case, CPU)
    one, two = train_alone(case, "sgd", scales, DP1, CPU)
    start = dict(case.make_model().double().named_parameters())
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


def test_adamw_with_our_eps_divides_by_the_root_of_v() -> None:
    """In the first step m / √v is the sign of the gradient, but where it is smaller than eps."""
    case = _tiny(steps=2)
    scales = scales_of(case, CPU)
    step = next(train_alone(case, "adamw", scales, DP1, CPU))
    gradient = step.gradients["norm.weight"] * scales.clip / (step.norm + 1e-6)
    change = -scales.adamw_lr * gradient / (gradient.abs() + scales.eps)
    torch.testing.assert_close(step.updates["norm.weight"], change, rtol=1e-9, atol=1e-15)
    every = torch.cat([g.flatten() for g in step.gradients.values()]) * scales.clip / step.norm
    assert (every[every != 0].abs() > scales.eps).float().mean() > 0.9


def test_only_targets_that_count_are_in_the_mean() -> None:
    case = _tiny(steps=2, padded=True)
    inputs, targets = case.step(0)
    logits = case.make_model().double()(inputs).log_softmax(-1).detach()
    told = [
        -float(logits[i, j, targets[i, j]])
        for i in range(len(targets))
        for j in range(targets.shape[1])
        if targets[i, j] != -100
    ]
    assert case.padded and len(told) < targets.numel()
    step = next(train_alone(case, "sgd", scales_of(case, CPU), DP1, CPU))
    assert step.loss == pytest.approx(sum(told) / len(told), rel=1e-12)


def test_a_global_microbatch_is_what_all_ranks_run_at_once() -> None:
    parts = global_microbatches(8, data_ranks=2, microbatches=2)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    parts = global_microbatches(7, data_ranks=4, microbatches=4)  # the last rank has one sample
    assert [part.tolist() for part in parts] == [[0, 2, 4, 6], [1, 3, 5]]


def test_with_batch_norms_it_matters_who_is_in_a_microbatch() -> None:
    shape = WideResNetConfig(depth=10, width=1)
    case = make_case("wideresnet", ParityOptions(architecture=shape, pixels=8, steps=2), [DP2])
    assert case.batch_norms
    scales = Scales(clip=1.0, sgd_lr=0.1, adamw_lr=1e-3, eps=1e-6)
    alone, in_two = (next(train_alone(case, "sgd", scales, layout, CPU)) for layout in (DP1, DP2))
    assert abs(alone.loss - in_two.loss) > 1e-6


def test_a_difference_has_its_factor_and_what_the_factor_leaves() -> None:
    b = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    twice = difference("w", 2 * b, b, least=0.0)
    assert (twice.error, twice.factor, twice.residual) == (1.0, 2.0, 0.0)
    small = difference("w", b * 1e-9, torch.zeros_like(b), least=1.0)
    assert small.error == pytest.approx(4e-9) and small.factor == 1.0


def test_a_tied_parameter_has_one_name_and_says_so() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(4, 3), nn.LayerNorm(3)
            self.layers = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(3, 3)})])
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    roles = roles_of(Tied())
    assert roles["embed.weight"] == "tied embedding" and "head.weight" not in roles
    assert roles["norm.bias"] == "norm" and roles["layers.0.fc.weight"] == "layers.fc"
    assert aliases_of(Tied())["head.weight"] == "embed.weight"


@pytest.mark.parametrize("layout", ["dp1", "tp4", "shard2.tp2", "pp2", "dp2.pp4"])
def test_one_layout_alone_has_an_uneven_step_too(layout: str) -> None:
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
    options = small_options_of("gpt", layouts, parallel)
    shape = options.architecture
    assert isinstance(shape, GPTConfig)
    for layout in layouts:
        assert not shape.heads % layout.tp and not shape.max_seq_len % layout.tp
        assert not shape.vocab_size % layout.tp and not shape.hidden % layout.tp
        assert not shape.layers % (layout.pp * 2)
        batch, uneven = samples_for(layouts, options, batch_norms=False)
        assert not batch % (layout.data_ranks * microbatches_of(layout, options.parallel))
        assert 0 < uneven < batch


def test_a_recipe_at_its_own_size() -> None:
    assert options_of("gpt").architecture == GPTConfig()
    with pytest.raises(UsageError, match="--recipe gtp: did you mean gpt"):
        options_of("gtp")


def test_noise_fits_the_first_and_the_last_layer() -> None:
    options = ParityOptions(seq_len=5, pixels=6)
    text = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 9))
    samples = fitting_noise(text, 10, options)
    assert samples.inputs.shape == (10, 5) and samples.inputs.max() < 7
    assert samples.targets.shape == (10, 5) and samples.targets.max() < 9
    images = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    assert fitting_noise(images, 10, options).inputs.shape == (10, 3, 6, 6)
    with pytest.raises(UsageError, match=r"begins with a LayerNorm.*give --dataset"):
        fitting_noise(nn.LayerNorm(3), 10, options)
    with pytest.raises(UsageError, match="does not take numbers of shape"):
        fitting_noise(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)), 10, options)
