"""Models that were not made for tutti: tp2 and pp2 give the gradients of one device.

Tolerance: float64, and another order of summation changes a gradient by about 1e-15 of the largest
gradient. A wrong split, mask or position changes it by more than 1e-6.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
from tutti.parallel import EngineOptions, build_engine
from tutti.parallel.layout import ParallelOptions
from tutti.parallel.pipeline.block_units import find_units
from tutti.parallel.tensor import loss_context
from tutti.train.init import _only_logits
from tutti.world.errors import UsageError
from worlds import in_world

pytestmark = pytest.mark.timeout(300)

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
BATCH, SEQ_LEN, MICROBATCHES = 8, 12, 4


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.output = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Any:
        return self.output(self.encoder(self.embedding(tokens)))


def make(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    model: nn.Module
    if name == "encoder":
        model = Encoder()
    elif name == "bert":  # keyword arguments, a tied decoder, rows in a module of their own
        model = hf.BertForMaskedLM(hf.BertConfig(**SIZES, hidden_dropout_prob=0.0))
    elif name == "qwen3":  # norms of each head
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    elif name == "phi3":  # fused projections, an embedding with a padding token
        model = hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))
    else:  # a vocabulary that tp does not divide, Conv1D
        sizes = {"vocab_size": 65, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    if hasattr(model, "config"):
        model.config.attention_probs_dropout_prob = 0.0
    model.register_forward_hook(_only_logits)
    return model.double().train()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten()) / MICROBATCHES
    return loss.to_local() if isinstance(loss, DTensor) else loss


def gradient_errors(world: tutti.World, names: list[str]) -> dict[str, float]:
    torch.manual_seed(1)
    inputs, targets = torch.randint(60, (2, BATCH, SEQ_LEN))
    parts = list(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))
    errors = {}
    for name in names:
        reference = make(name)
        for x, y in parts:
            loss_of(reference(x), y).backward()  # type: ignore[no-untyped-call]
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for layout in ("tp2", "pp2"):
            engine = build_engine(
                make(name),
                world,
                EngineOptions(),
                ParallelOptions(layout=layout),
                example=inputs[:1],
                microbatches=MICROBATCHES,
                microbatch_size=BATCH // MICROBATCHES,
            )
            with loss_context(layout == "tp2"):
                engine.run(parts, loss_of)
            worst = 0.0
            for key, parameter in engine.model.named_parameters():
                gradient = parameter.grad
                assert gradient is not None, key
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                difference = whole - expected[engine.aliases.get(key, key)]
                worst = max(worst, float(difference.abs().max()) / largest)
            errors[f"{name} {layout}"] = worst
    return errors


def test_gradients_are_those_of_one_device() -> None:
    names = ["encoder", "bert", "qwen3", "phi3", "gpt2"]
    for errors in in_world(gradient_errors, 2, names, timeout=250):
        assert len(errors) == 2 * len(names)
        assert max(errors.values()) < 1e-12, errors


class Shortcut(nn.Module):
    """Every block also gets the embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Sum() for _ in range(2)])
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Any:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, first: Tensor) -> Any:
        return self.layer(x) + first


def test_a_block_that_gets_more_than_its_input_is_refused() -> None:
    with pytest.raises(UsageError, match=r"embedding.weight has an effect on blocks.0"):
        find_units(Shortcut().to("meta"), torch.zeros(1, 3, dtype=torch.int64))
