"""Properties that every model has."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tutti import models
from tutti.models import (
    GPT,
    EfficientNet,
    EfficientNetConfig,
    GPTConfig,
    LeNet,
    LeNetConfig,
    WideResNet,
    WideResNetConfig,
)

SMALL = {
    "lenet": lambda: LeNet(LeNetConfig(image_size=8)),
    "wideresnet": lambda: WideResNet(WideResNetConfig(depth=10, width=1)),
    "efficientnet": lambda: EfficientNet(EfficientNetConfig(classes=10)),
    "gpt": lambda: GPT(GPTConfig(layers=2, dim=32, heads=2)),
    "gpt-tied": lambda: GPT(GPTConfig(layers=2, dim=32, heads=2, tied=True)),
}


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_given_only_the_configs_when_imported_then_torch_is_not() -> None:
    code = (
        "import sys, tutti.models; tutti.models.GPTConfig.gpt2().flops_per_token();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_given_an_unknown_name_when_fetched_then_it_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'AlexNet'"):
        _ = models.AlexNet


@pytest.mark.parametrize("name", SMALL)
def test_given_one_seed_when_built_directly_or_through_meta_then_weights_are_equal(
    name: str,
) -> None:
    torch.manual_seed(3)
    direct = SMALL[name]()
    with torch.device("meta"):
        late = SMALL[name]()
    assert all(p.is_meta for p in everything(late).values())
    late.to_empty(device="cpu")
    for tensor in everything(late).values():  # what to_empty leaves behind is arbitrary
        tensor.data.fill_(-1)
    torch.manual_seed(3)
    late.init_weights()

    expected, got = everything(direct), everything(late)
    assert expected.keys() == got.keys()
    for key in expected:
        assert torch.equal(expected[key], got[key]), key


@pytest.mark.parametrize("name", ["wideresnet", "efficientnet"])
def test_given_synchronised_batch_norms_when_initialised_then_they_are_reset_too(name: str) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(SMALL[name]())
    for tensor in everything(model).values():
        tensor.data.fill_(-1)
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(3)
    expected = everything(SMALL[name]())
    for key, tensor in everything(model).items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", SMALL)
def test_given_another_seed_when_initialised_again_then_weights_differ(name: str) -> None:
    torch.manual_seed(3)
    model = SMALL[name]()
    before = {k: v.detach().clone() for k, v in model.named_parameters() if v.ndim > 1}
    model.init_weights()
    assert not any(torch.equal(before[k], dict(model.named_parameters())[k]) for k in before)


@pytest.mark.parametrize("name", SMALL)
def test_given_its_own_state_when_loaded_into_another_then_outputs_are_equal(name: str) -> None:
    source, target = SMALL[name]().eval(), SMALL[name]().eval()
    target.load_state_dict(source.state_dict())
    if name.startswith("gpt"):
        x = torch.randint(256, (2, 9))
    else:
        x = torch.randn(2, 1, 8, 8) if name == "lenet" else torch.randn(2, 3, 32, 32)
    assert torch.equal(source(x), target(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LeNetConfig(image_size=3), "image_size is 3, it must be at least 4"),
        (lambda: LeNetConfig(channels=0), "channels is 0"),
        (lambda: WideResNetConfig(depth=27), "depth is 27, it must be 6n \\+ 4: use depth 28"),
        (lambda: WideResNetConfig(depth=4), "use depth 10"),
        (lambda: WideResNetConfig(dropout=1.0), "dropout is 1.0, it must be in"),
        (lambda: EfficientNetConfig(size="xl"), "must be s, m or l"),  # type: ignore[arg-type]
        (lambda: EfficientNetConfig(stochastic_depth=-0.1), "stochastic_depth is -0.1"),
        (lambda: GPTConfig(dim=100, heads=12), "is 8.33333 each.*use dim 120"),
        (lambda: GPTConfig(dim=12, heads=4), "is 3 each.*use dim 16"),
        (lambda: GPTConfig(heads=4, kv_heads=3), "use a kv_heads that divides 4"),
        (lambda: GPTConfig(kv_heads=0), "key_value_heads is 0"),
    ],
)
def test_given_impossible_settings_when_configured_then_the_error_names_them(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()
