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


def test_configs_do_not_import_torch() -> None:
    code = (
        "import sys, tutti.models; tutti.models.GPTConfig.gpt2().flops_per_token();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'AlexNet'"):
        _ = models.AlexNet


@pytest.mark.parametrize("name", SMALL)
def test_weights_of_a_seed_are_equal_if_built_directly_or_on_meta(
    name: str,
) -> None:
    torch.manual_seed(3)
    direct = SMALL[name]()
    with torch.device("meta"):
        late = SMALL[name]()
    assert all(p.is_meta for p in everything(late).values())
    late.to_empty(device="cpu")
    for tensor in everything(late).values():  # the values after to_empty are arbitrary
        tensor.data.fill_(-1)
    torch.manual_seed(3)
    late.init_weights()

    expected, got = everything(direct), everything(late)
    assert expected.keys() == got.keys()
    for key in expected:
        assert torch.equal(expected[key], got[key]), key


@pytest.mark.parametrize("name", ["wideresnet", "efficientnet"])
def test_synchronised_batch_norms_are_also_initialised(name: str) -> None:
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
def test_another_seed_gives_other_weights(name: str) -> None:
    torch.manual_seed(3)
    model = SMALL[name]()
    before = {k: v.detach().clone() for k, v in model.named_parameters() if v.ndim > 1}
    model.init_weights()
    assert not any(torch.equal(before[k], dict(model.named_parameters())[k]) for k in before)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_with_a_loaded_state_has_the_same_outputs(name: str) -> None:
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
        (lambda: LeNetConfig(image_size=3), "image_size must be at least 4, got 3"),
        (lambda: LeNetConfig(channels=0), "channels.*got 0"),
        (lambda: WideResNetConfig(depth=27), r"depth.*6n \+ 4.*got 27.*Use depth 28"),
        (lambda: WideResNetConfig(depth=4), "Use depth 10"),
        (lambda: WideResNetConfig(dropout=1.0), "dropout.*less than 1, got 1.0"),
        (lambda: EfficientNetConfig(size="xl"), "size.*s, m or l"),  # type: ignore[arg-type]
        (
            lambda: EfficientNetConfig(stochastic_depth=-0.1),
            "stochastic_depth.*at least 0.*got -0.1",
        ),
        (lambda: GPTConfig(dim=100, heads=12), "100 / 12 = 8.33333.*Use dim 120"),
        (lambda: GPTConfig(dim=12, heads=4), "12 / 4 = 3.*Use dim 16"),
        (lambda: GPTConfig(heads=4, kv_heads=3), "kv_heads 3.*divides 4"),
        (lambda: GPTConfig(kv_heads=0), "kv_heads.*got 0"),
    ],
)
def test_invalid_settings_are_named_in_the_error(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()
