"""EfficientNetV2: published sizes, the auxiliary head, stochastic depth."""

import pytest
import torch
from torch import nn

from tiny_models import torchvision_or_skip
from tutti.models import EfficientNet, EfficientNetConfig
from tutti.models.efficientnet import Block, SqueezeExcite, Stage, StochasticDepth

PUBLISHED = {"s": 21_458_488, "m": 54_139_356, "l": 118_515_272}
AUXILIARY_CHANNELS = {"s": 160, "m": 176, "l": 224}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_number_of_parameters_is_as_published(size: str) -> None:
    with torch.device("meta"):
        plain = EfficientNet(EfficientNetConfig(size=size, auxiliary=False))  # type: ignore[arg-type]
        both = EfficientNet(EfficientNetConfig(size=size))  # type: ignore[arg-type]
    assert count(plain) == PUBLISHED[size]
    assert count(both) - count(plain) == 1000 * (AUXILIARY_CHANNELS[size] + 1)


@pytest.mark.parametrize("size", PUBLISHED)
def test_weights_have_the_shapes_of_torchvision(size: str) -> None:
    torchvision = torchvision_or_skip()
    with torch.device("meta"):
        ours = EfficientNet(EfficientNetConfig(size=size, auxiliary=False))  # type: ignore[arg-type]
        theirs = getattr(torchvision.models, f"efficientnet_v2_{size}")()
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]


@pytest.mark.parametrize("training", [True, False])
def test_the_output_is_main_plus_three_tenths_of_auxiliary(
    training: bool,
) -> None:
    torch.manual_seed(0)
    model = EfficientNet(EfficientNetConfig(classes=10)).train(training)
    x = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    output = model(x)
    torch.manual_seed(1)
    main, auxiliary = model.classify(x)
    assert auxiliary is not None and auxiliary.abs().max() > 0
    assert torch.equal(output, main + 0.3 * auxiliary)


def test_the_auxiliary_head_reads_the_last_features_at_stride_16() -> None:
    model = EfficientNet(EfficientNetConfig(classes=10)).eval()
    recorded = {}
    model.stages[4].register_forward_hook(lambda _m, _i, out: recorded.update(features=out))
    _, auxiliary = model.classify(torch.randn(2, 3, 64, 64))
    features = recorded["features"]
    assert features.shape == (2, 160, 4, 4)
    means = features.flatten(2).mean(-1)
    expected = means @ model.auxiliary.weight.T + model.auxiliary.bias
    torch.testing.assert_close(auxiliary, expected)


def test_without_an_auxiliary_head_the_output_is_that_of_the_main_head() -> None:
    model = EfficientNet(EfficientNetConfig(classes=10, auxiliary=False)).eval()
    x = torch.randn(2, 3, 64, 64)
    main, auxiliary = model.classify(x)
    assert auxiliary is None
    assert torch.equal(model(x), main)


@pytest.mark.parametrize(("stem_stride", "side"), [(2, 1), (1, 2)])
def test_the_stem_stride_sets_the_size_of_the_last_features(stem_stride: int, side: int) -> None:
    with torch.device("meta"):
        model = EfficientNet(EfficientNetConfig(classes=100, stem_stride=stem_stride))
        recorded = {}
        model.last.register_forward_hook(lambda _m, _i, out: recorded.update(shape=out.shape))
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 100)
    assert recorded["shape"] == (2, 1280, side, side)


def test_stochastic_depth_drops_or_scales_whole_samples() -> None:
    torch.manual_seed(0)
    skip = StochasticDepth(0.25)
    y = skip(torch.ones(4000, 2, 3, 3)).flatten(1)
    values = y[:, 0]
    assert torch.equal(y, values[:, None].expand_as(y))
    assert set(values.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # The mean is 1, its standard error √(0.25 / 0.75 / 4000) = 0.009; five of them are allowed.
    assert abs(values.mean().item() - 1) < 0.046
    assert torch.equal(skip.eval()(y), y)


def test_stochastic_depth_grows_linearly_from_zero() -> None:
    with torch.device("meta"):
        model = EfficientNet(EfficientNetConfig(stochastic_depth=0.2))
    found = [m.p for m in model.modules() if isinstance(m, StochasticDepth)]
    assert found == pytest.approx([0.2 * i / 40 for i in range(40)])


def test_squeeze_excite_with_zero_weights_halves_every_channel() -> None:
    gate = SqueezeExcite(8, 2)
    nn.init.zeros_(gate.excite.weight)
    nn.init.zeros_(gate.excite.bias)
    x = torch.randn(2, 8, 3, 3)
    assert torch.equal(gate(x), x / 2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("stride", "channels"), [(1, 8), (2, 8), (1, 12)])
def test_a_block_adds_its_input_only_if_shapes_agree(
    fused: bool, stride: int, channels: int
) -> None:
    block = Block(Stage(fused, 4, stride, channels, 1), 8, stride, skip_probability=0.0)
    x = torch.randn(2, 8, 6, 6)
    expected = block.layers(x) + x if (stride, channels) == (1, 8) else block.layers(x)
    torch.testing.assert_close(block(x), expected)
