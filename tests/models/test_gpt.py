"""GPT: comparison with formulas, sizes and FLOPs, and the properties that stages rely on."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tutti.models import GPT, GPTConfig
from tutti.models.gpt import Rotary

SMALL = GPTConfig(vocab_size=64, max_seq_len=32, layers=2, dim=32, heads=4)


def double(config: GPTConfig, seed: int = 0) -> GPT:
    """A model and its tables in float64, with random gains, so that tests notice the gains."""
    torch.manual_seed(seed)
    model = GPT(config).double()
    model.init_weights()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


def tokens(config: GPTConfig, batch: int = 2, length: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


# --- reference implementation ---------------------------------------------------------------------


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.size(-1) + eps).sqrt() * gain


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate x (seq, head_dim): pairs are complex numbers, times e^(i · position · frequency)."""
    half = x.size(1) // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    frequency = torch.tensor([theta ** (-2 * j / x.size(1)) for j in range(half)], dtype=x.dtype)
    angle = torch.arange(len(x)).to(x)[:, None] * frequency
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=1)


def by_hand(config: GPTConfig, w: dict[str, Tensor], sequence: Tensor) -> Tensor:
    """One sequence through the model, head by head and position by position."""
    size = config.dim // config.heads
    x = w["embed.weight"][sequence]
    for n in range(config.layers):
        block = f"blocks.{n}."
        y = rms_norm(x, w[block + "attention_norm.weight"], config.norm_eps)
        q, k, v = (y @ w[f"{block}attention.{m}.weight"].T for m in ("wq", "wk", "wv"))
        heads = []
        for h in range(config.heads):
            g = h * config.key_value_heads // config.heads
            qh = rotate(q[:, h * size : (h + 1) * size], config.rope_theta)
            kh = rotate(k[:, g * size : (g + 1) * size], config.rope_theta)
            vh = v[:, g * size : (g + 1) * size]
            rows = []
            for t in range(len(sequence)):
                weights = torch.exp(kh[: t + 1] @ qh[t] / math.sqrt(size))
                rows.append(weights @ vh[: t + 1] / weights.sum())
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, dim=1) @ w[block + "attention.wo.weight"].T
        y = rms_norm(x, w[block + "mlp_norm.weight"], config.norm_eps)
        gate = y @ w[block + "mlp.gate.weight"].T
        up = y @ w[block + "mlp.up.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ w[block + "mlp.down.weight"].T
    return rms_norm(x, w["norm.weight"], config.norm_eps) @ w["head.weight"].T


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_a_reference_implementation_in_float64(
    kv_heads: int | None, tied: bool
) -> None:
    config = dataclasses.replace(SMALL, kv_heads=kv_heads, tied=tied)
    model, x = double(config), tokens(config)
    expected = torch.stack([by_hand(config, model.state_dict(), row) for row in x])
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


def test_rms_norm_equals_its_formula_in_float64() -> None:
    model = double(SMALL)
    x = 1e-3 * torch.randn(3, 5, 32, dtype=torch.float64)  # small, so that eps matters
    torch.testing.assert_close(
        model.norm(x), rms_norm(x, model.norm.weight, 1e-5), rtol=1e-12, atol=0
    )


@settings(deadline=None, max_examples=50)
@given(m=st.integers(0, 31), n=st.integers(0, 31), shift=st.integers(0, 31))
def test_attention_scores_depend_only_on_the_distance_of_positions(
    m: int, n: int, shift: int
) -> None:
    rotary = Rotary(dataclasses.replace(SMALL, max_seq_len=64)).double()
    rotary.init_weights()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    at = [rotary(x.expand(1, 64, 1, 8))[0, :, 0] for x in (q, k)]
    score, shifted = at[0][m] @ at[1][n], at[0][m + shift] @ at[1][n + shift]
    torch.testing.assert_close(score, shifted, rtol=0, atol=1e-12)


def test_rotary_changes_scores_but_not_vector_lengths() -> None:
    rotary = Rotary(SMALL)
    rotary.init_weights()
    x = torch.randn(8).expand(1, 32, 1, 8)
    y = rotary(x)
    assert torch.equal(y[0, 0], x[0, 0])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert len({round(score.item(), 4) for score in y[0, :, 0] @ x[0, 0, 0]}) == 32


def test_grouped_query_attention_equals_attention_with_repeated_keys_and_values() -> None:
    grouped = double(dataclasses.replace(SMALL, kv_heads=2))
    plain = double(dataclasses.replace(SMALL, kv_heads=4), seed=1)
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith(("wk.weight", "wv.weight"))]:
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).flatten(0, 1)
    plain.load_state_dict(state)
    x = tokens(SMALL)
    torch.testing.assert_close(grouped(x), plain(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_changed_token_changes_only_its_own_and_later_logits(kv_heads: int) -> None:
    config = dataclasses.replace(SMALL, kv_heads=kv_heads)
    model, x = double(config), tokens(config)
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-13)
    assert ((before - after)[:, 9:].abs().amax(-1) > 1e-6).all()


def test_gradients_equal_numerical_derivatives() -> None:
    model = double(GPTConfig(vocab_size=8, max_seq_len=4, layers=1, dim=4, heads=2, kv_heads=1))
    model.embed = None
    hidden = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, hidden)


# --- sizes and FLOPs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (GPTConfig(), 0.92),
        (GPTConfig.gpt2(), 124),
        (dataclasses.replace(GPTConfig.gpt2(), layers=24, dim=1024, heads=16), 355),
        (dataclasses.replace(GPTConfig.gpt2(), layers=48, dim=1600, heads=25), 1560),
        (dataclasses.replace(SMALL, kv_heads=2, mlp_dim=48), 0.019616),
    ],
)
def test_a_model_has_the_number_of_parameters_computed_by_its_config(
    config: GPTConfig, millions: float
) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    assert config.parameters() == pytest.approx(millions * 1e6, rel=0.005)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_flops_counted_by_torch_are_6n_plus_12lds(tied: bool, kv_heads: int) -> None:
    config = dataclasses.replace(SMALL, tied=tied, kv_heads=kv_heads)
    model, x = GPT(config), tokens(config, batch=2, length=24)
    # The plain kernel computes the whole square, as the formula counts it.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() == x.numel() * config.flops_per_token(24)


def test_flops_per_token_of_gpt2_are_6n_plus_12lds() -> None:
    n = 12 * (4 * 768**2 + 3 * 768 * 2048) + 50_304 * 768
    assert GPTConfig.gpt2().matmul_parameters() == n
    assert GPTConfig.gpt2().flops_per_token(512) == 6 * n + 12 * 12 * 768 * 512
    assert GPTConfig.gpt2().flops_per_token() == GPTConfig.gpt2().flops_per_token(1024)


# --- initial weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_a_new_model_is_about_ln_of_the_vocabulary(tied: bool) -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=512, layers=2, dim=128, heads=4, tied=tied)
    x = torch.randint(512, (8, 129))
    loss = F.cross_entropy(GPT(config)(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(512) + 1 / 8, abs=0.1)


def test_initial_residual_projections_are_scaled_by_depth() -> None:
    model = GPT(GPTConfig(layers=8, dim=256, heads=4))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        scale = 4 if name.endswith(("wo.weight", "down.weight")) else 1  # √(2 × 8)
        assert parameter.std().item() == pytest.approx(0.5 / 16 / scale, rel=0.02), name
        assert abs(parameter.mean().item()) < 0.001, name


def test_tied_weights_built_on_meta_share_storage() -> None:
    config = dataclasses.replace(SMALL, tied=True)
    with torch.device("meta"):
        late = GPT(config)
    late.to_empty(device="cpu")
    late.init_weights()
    for model in (GPT(config), late):
        assert model.head.weight is model.embed.weight
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
        assert "head.weight" not in dict(model.named_parameters())
    untied = GPT(SMALL)
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_training_on_one_batch_reduces_the_loss() -> None:
    torch.manual_seed(0)
    model, x = GPT(SMALL), tokens(SMALL, length=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert losses[-1] < losses[0] / 4


# --- names, stages and limits ---------------------------------------------------------------------


def test_modules_have_the_names_that_sharding_rules_use() -> None:
    names = {n for n, _ in GPT(dataclasses.replace(SMALL, layers=1)).named_parameters()}
    block = ["attention_norm", "mlp_norm"]
    block += [f"attention.{m}" for m in ("wq", "wk", "wv", "wo")]
    block += [f"mlp.{m}" for m in ("gate", "up", "down")]
    parts = ["embed", "norm", "head"] + [f"blocks.0.{m}" for m in block]
    assert names == {f"{part}.weight" for part in parts}


def test_the_state_does_not_contain_rotary_tables() -> None:
    assert not [name for name in GPT(SMALL).state_dict() if "rotary" in name]


def test_two_stages_in_sequence_give_the_logits_of_the_whole_model() -> None:
    whole, x = double(SMALL), tokens(SMALL)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    first.norm = first.head = None
    del first.blocks["1"]
    second.embed = None
    del second.blocks["0"]
    assert torch.equal(second(first(x)), whole(x))
    names = {*first.state_dict(), *second.state_dict()}
    assert names == set(whole.state_dict())
    first.init_weights()  # a stage can be initialised alone
    second.init_weights()


def test_the_error_of_a_too_long_sequence_names_the_limit() -> None:
    model = GPT(SMALL)
    assert model(tokens(SMALL, length=32)).shape == (2, 32, 64)
    with pytest.raises(ValueError, match="33 tokens is longer than max_seq_len 32"):
        model(tokens(SMALL, length=33))


def test_with_bf16_autocast_logits_are_close_and_gradients_are_float32() -> None:
    torch.manual_seed(0)
    model, x = GPT(SMALL), tokens(SMALL)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    assert logits.dtype == torch.bfloat16
    # bfloat16 has 8 bits: 2^-8 per operation, on logits with a standard deviation of 0.5.
    torch.testing.assert_close(logits.float(), exact, rtol=0, atol=0.05)
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
