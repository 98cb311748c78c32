"""Models of other libraries, without a wrapper: every layout passes the parity check or is refused.

The models are built from configurations, as their libraries build them. Their dropout
probabilities are not 0; the parity check sets them to 0.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tiny_models import torchvision_or_skip
from worlds import in_world

pytestmark = pytest.mark.timeout(300)

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}


def gpt2() -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    import transformers as hf

    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2))


def qwen2() -> nn.Module:
    import transformers as hf

    config = hf.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    return hf.Qwen2ForCausalLM(config)


def bert() -> nn.Module:
    import transformers as hf

    return hf.BertForMaskedLM(hf.BertConfig(**SIZES))


def mixtral() -> nn.Module:
    import transformers as hf

    config = hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return hf.MixtralForCausalLM(config)


def t5(vocab_size: int = 64) -> nn.Module:
    import transformers as hf

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=vocab_size, **sizes))


def t5_odd() -> nn.Module:
    """tp2 does not divide the vocabulary, so tp2 leaves the embeddings whole."""
    return t5(65)


class Encoder(nn.Module):
    """torch's own transformer layers, which contain nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
        )
        self.output = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Any:
        return self.output(self.encoder(self.embedding(tokens)))


class UnusualName(nn.Module):
    """An attention whose output layer has an unusual name, beside layers with usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.attention = nn.ModuleDict({name: nn.Linear(32, 32) for name in "qkv"})
        self.attention["mixed"] = nn.Linear(32, 32)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(32, 64), "fc2": nn.Linear(64, 32)})
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        q, k, v = (self.attention[name](x).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv")
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.attention["mixed"](heads)
        return self.head(x + self.mlp["fc2"](self.mlp["fc1"](x).relu()))


class OnlyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.last = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Any:
        x = self.tokens(tokens)
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


class ComputesInFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32, bias=False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = nn.functional.linear(x.float(), self.first.weight.float())
        return self.last(hidden.softmax(-1).to(x.dtype))


def check_models(world: tutti.World, cases: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the row of each (model, layouts, pixels), keyed by "model layout"."""
    from tutti.parallel.layout import Layout
    from tutti.parity.compare import Reference, check_layout
    from tutti.parity.parity_options import ParityOptions
    from tutti.parity.single_device import make_workload
    from tutti.train.init import agree

    if any(name.startswith("timm:") for name, _, _ in cases):
        torchvision_or_skip()  # timm imports it
    rows = {}
    for name, texts, pixels in cases:
        model = name if ":" in name else f"{__name__}:{name}"
        layouts = [Layout.parse(text) for text in texts.split()]
        options = ParityOptions(model=model, seq_len=8, steps=2, pixels=pixels)
        torch.set_default_dtype(torch.float32)
        workload = agree(lambda: make_workload("gpt", options, layouts))  # noqa: B023
        reference = Reference(workload, world)
        for layout in layouts:
            rows[f"{name} {layout}"] = check_layout(workload, layout, world, reference)
    return rows


def check_all(cases: list[tuple[str, str, int]]) -> dict[str, Any]:
    rows: dict[str, Any] = in_world(check_models, 2, cases, timeout=280)[0]
    for name, row in rows.items():
        assert row["ok"] or row["not_applicable"] or row["diagnosis"], (name, row)
    return rows


def test_models_pass_in_every_layout_or_are_refused_with_the_reason() -> None:
    every = "dp2 shard2 tp2 pp2"
    decoders = ["gpt2", "llama", "qwen2", "mixtral", "bert"]
    cases = [(name, every, 8) for name in decoders]
    cases += [("t5", every, 8), ("t5_odd", "tp2", 8), ("Encoder", "tp2 pp2", 8)]
    cases += [("UnusualName", "tp2", 8), ("OnlyAttention", "shard2 tp2", 8)]
    cases += [("ComputesInFloat32", "dp2", 8)]
    rows = check_all(cases)
    passed = {name for name, row in rows.items() if row["ok"]}
    expected = {f"{name} {layout}" for name in decoders for layout in every.split()}
    expected |= {"t5 dp2", "t5 shard2", "t5 tp2", "t5_odd tp2", "UnusualName tp2"}
    expected |= {"Encoder tp2", "Encoder pp2", "OnlyAttention shard2"}
    assert passed == expected, {name: rows[name] for name in expected ^ passed}
    # A refusal names the module or input, the reason and a layout that works.
    refused = rows["t5 pp2"]["not_applicable"]
    assert "decoder_input_ids" in refused and "use dp, shard or tp" in refused
    refused = rows["OnlyAttention tp2"]["not_applicable"]
    assert "attention is an nn.MultiheadAttention" in refused and "use shard or dp" in refused
    assert "--precision float32" in rows["ComputesInFloat32 dp2"]["diagnosis"]


def test_timm_models_pass() -> None:
    torchvision_or_skip()
    layouts = "dp2 shard2 pp2"
    rows = check_all([("timm:test_resnet", layouts, 64), ("timm:test_vit", f"{layouts} tp2", 160)])
    assert len(rows) == 7 and all(row["ok"] for row in rows.values()), rows
