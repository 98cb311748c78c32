"""WideResNet: published sizes, pre-activation, dropout."""

import pytest
import torch

from tutti.models import WideResNet, WideResNetConfig
from tutti.models.wideresnet import Block


def count_by_hand(depth: int, width: int, classes: int) -> int:
    """Every weight of WideResNet-depth-width, from the paper's table 1."""
    n = (depth - 4) // 6
    total, inputs = 3 * 16 * 9, 16
    for outputs in (16 * width, 32 * width, 64 * width):
        first = 2 * inputs + 9 * inputs * outputs + 2 * outputs + 9 * outputs**2
        shortcut = inputs * outputs if inputs != outputs else 0
        other = 2 * outputs + 9 * outputs**2 + 2 * outputs + 9 * outputs**2
        total += first + shortcut + (n - 1) * other
        inputs = outputs
    return total + 2 * inputs + inputs * classes + classes


@pytest.mark.parametrize(
    ("depth", "width", "classes", "published"),
    # The paper's tables give 36.5M, 11.0M and 8.9M; the exact figures are the sums by hand.
    [(28, 10, 10, 36_479_194), (16, 8, 10, 10_961_370), (40, 4, 10, 8_949_210)],
)
def test_the_number_of_parameters_is_as_published(
    depth: int, width: int, classes: int, published: int
) -> None:
    with torch.device("meta"):
        model = WideResNet(WideResNetConfig(depth=depth, width=width, classes=classes))
    count = sum(p.numel() for p in model.parameters())
    assert count == published == count_by_hand(depth, width, classes)


@pytest.mark.parametrize(("depth", "width", "classes"), [(10, 1, 10), (16, 4, 100), (22, 2, 7)])
def test_the_number_of_parameters_is_the_sum_over_layers(
    depth: int, width: int, classes: int
) -> None:
    with torch.device("meta"):
        model = WideResNet(WideResNetConfig(depth=depth, width=width, classes=classes))
    assert sum(p.numel() for p in model.parameters()) == count_by_hand(depth, width, classes)


@pytest.mark.parametrize("size", [8, 31, 32])
def test_outputs_have_one_logit_per_class(size: int) -> None:
    model = WideResNet(WideResNetConfig(depth=10, width=1, channels=1, classes=7))
    assert model(torch.randn(2, 1, size, size)).shape == (2, 7)


def test_a_block_with_a_zero_last_convolution_is_the_identity() -> None:
    block = Block(4, 4, stride=1, dropout=0.0)
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 5, 5)  # also its negative values: the shortcut is not activated
    assert torch.equal(block(x), x)


def test_dropout_changes_outputs_only_in_training() -> None:
    torch.manual_seed(0)
    model = WideResNet(WideResNetConfig(depth=10, width=1, dropout=0.5))
    x = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_training_on_one_batch_reduces_the_loss() -> None:
    torch.manual_seed(0)
    model = WideResNet(WideResNetConfig(depth=10, width=1))
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
