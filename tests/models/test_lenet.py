"""LeNet: the published sizes, and smaller images."""

import pytest
import torch

from tutti.models import LeNet, LeNetConfig


def test_for_28_pixels_the_parameters_are_those_of_the_classical_form() -> None:
    conv1, conv2 = 20 * (1 * 25 + 1), 50 * (20 * 25 + 1)
    hidden, head = 128 * (50 * 4 * 4 + 1), 10 * (128 + 1)
    count = sum(p.numel() for p in LeNet(LeNetConfig()).parameters())
    assert count == conv1 + conv2 + hidden + head == 129_388


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 100), (1, 8, 10)])
def test_images_of_any_size_give_one_logit_per_class(
    channels: int, size: int, classes: int
) -> None:
    model = LeNet(LeNetConfig(channels=channels, image_size=size, classes=classes))
    assert model(torch.randn(5, channels, size, size)).shape == (5, classes)


@pytest.mark.parametrize("size", range(4, 40))
def test_the_feature_map_has_the_computed_size(
    size: int,
) -> None:
    with torch.device("meta"):
        model = LeNet(LeNetConfig(image_size=size))
        assert model(torch.empty(1, 1, size, size)).shape == (1, 10)


def test_every_pixel_of_a_small_image_changes_the_logits() -> None:
    torch.manual_seed(0)
    model = LeNet(LeNetConfig(image_size=8)).double()
    images = torch.rand(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    model(images).square().sum().backward()
    assert (images.grad != 0).all()


def test_gradients_equal_numerical_derivatives() -> None:
    torch.manual_seed(0)
    model = LeNet(LeNetConfig(image_size=4, classes=2)).double()
    images = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, images)
