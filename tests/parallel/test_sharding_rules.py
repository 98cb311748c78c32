"""Sharding rules: the default roles of layers, and errors for rules that cannot be applied."""

import pytest
from torch import nn

from tutti import UsageError
from tutti.models import GPT, GPTConfig, LeNet, LeNetConfig
from tutti.parallel.sharding_rules import (
    check_between,
    check_rules_divide,
    default_rules,
    resolve_rules,
    splits_sequence,
)


def _gpt(**changes: int) -> GPT:
    values = {"vocab_size": 32, "max_seq_len": 16, "layers": 2, "dim": 32, "heads": 4, **changes}
    return GPT(GPTConfig(**values))


class _Usual(nn.Module):
    """Blocks with the usual layer names of published models, without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.self_attn = nn.Module()
            layer.self_attn.q_proj = nn.Linear(8, 8)
            layer.self_attn.o_proj = nn.Linear(8, 8)
            layer.input_layernorm = nn.LayerNorm(8)


def test_the_gpt_is_split_from_its_embedding_to_its_head() -> None:
    model = _gpt()
    rules = default_rules(model)
    assert {name: role for name, role in rules.items() if not name.startswith("blocks.1")} == {
        "embed": "vocabulary",
        "blocks.0.attention_norm": "norm",
        "blocks.0.attention": "input",
        **{f"blocks.0.attention.w{each}": "column" for each in "qkv"},
        "blocks.0.attention.wo": "row",
        "blocks.0.mlp_norm": "norm",
        "blocks.0.mlp": "input",
        "blocks.0.mlp.gate": "column",
        "blocks.0.mlp.up": "column",
        "blocks.0.mlp.down": "row",
        "norm": "norm",
        "head": "head",
    }
    assert splits_sequence(rules, model)
    check_between(rules, model)


def test_usual_names_are_split_and_without_an_embedding_the_sequence_stays_whole() -> None:
    model = _Usual()
    rules = default_rules(model)
    assert rules == {
        **{f"layers.{n}.self_attn.q_proj": "column" for n in range(2)},
        **{f"layers.{n}.self_attn.o_proj": "row" for n in range(2)},
    }
    assert not splits_sequence(rules, model)
    check_between(rules, model)  # the norm is outside of the attention


def test_a_layer_between_split_layers_needs_a_role() -> None:
    model = _Usual()
    model.layers[1].self_attn.q_norm = nn.RMSNorm(4)  # would get the heads of one rank only
    with pytest.raises(UsageError, match=r"layers.1.self_attn.q_norm.weight.*role"):
        check_between(default_rules(model), model)


def test_torchs_attention_stays_whole_and_its_feed_forward_is_split() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert default_rules(layer) == {"linear1": "column", "linear2": "row"}


def test_a_layer_without_a_rule_keeps_the_sequence_whole() -> None:
    model = _gpt()
    assert splits_sequence(default_rules(model), model)
    model.scale = nn.Linear(32, 32)
    assert not splits_sequence(default_rules(model), model)


def test_a_star_stands_for_one_part_of_a_name() -> None:
    resolved = resolve_rules({"blocks.*.mlp.up": "column", "head": "head"}, _gpt())
    assert resolved == {
        "blocks.0.mlp.up": "column",
        "blocks.1.mlp.up": "column",
        "head": "head",
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"blocks.*.mlp.upp": "column"}, r"no module 'blocks.\*.mlp.upp'.*did you mean"),
        ({"embed": "vocabulry"}, r"role 'vocabulry': did you mean vocabulary\?"),
        ({"embed": "column"}, r"embed is a Embedding.*'column' needs a Linear"),
        ({"norm": "row"}, r"norm is a RMSNorm.*'row' needs a Linear"),
    ],
)
def test_rules_that_do_not_fit_the_model_are_refused(rules: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_rules(rules, _gpt())  # type: ignore[arg-type]


def test_a_model_without_usual_names_needs_rules() -> None:
    with pytest.raises(UsageError, match=r"LeNet.*give rules"):
        default_rules(LeNet(LeNetConfig()))


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, r"tp3 does not divide the 32 tokens of embed .32 / 3 = 10.67.: use tp2 or tp4"),
        ({}, 8, r"tp8 does not divide the 4 heads of blocks.0.attention.wq .*: use tp2 or tp4"),
        ({"kv_heads": 2}, 4, r"tp4 does not divide the 2 heads of blocks.0.attention.wk"),
        ({"mlp_dim": 10}, 4, r"tp4 does not divide the 10 outputs of blocks.0.mlp.gate"),
    ],
)
def test_a_split_through_a_head_or_a_token_is_refused(
    changes: dict[str, int], tp: int, message: str
) -> None:
    model = _gpt(**changes)
    with pytest.raises(UsageError, match=message):
        check_rules_divide(default_rules(model), model, tp)
