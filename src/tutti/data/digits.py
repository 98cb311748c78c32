"""scikit-learn's digits: 1,797 handwritten digits, 8 × 8, that come with the package.

Real data with no download: what the demo and the first run use. A fifth of it is the test split,
the same on every machine.
"""

import numpy as np
import torch
from torch.nn.functional import interpolate

from tutti.data.dataset import Dataset, TensorSamples
from tutti.data.errors import DataError
from tutti.data.order import shuffled

TEST = 360
CLASSES = 10
BRIGHTEST = 16  # the pixels count from 0 to 16


def digits_dataset(size: int = 28) -> Dataset:
    """The digits as [N, 1, size, size], standardised: 8 as they are, 28 so that LeNet takes them.

    Other sizes are scaled bilinearly as well.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "data set digits comes with scikit-learn, which is not installed: "
            "pip install 'tutti[demo]'"
        ) from error
    if size < 8:
        raise DataError(f"digits are 8 × 8, they cannot be shrunk to {size} × {size}: use >= 8")
    pixels, labels = load_digits(return_X_y=True)
    # The images come writer after writer: mixed once, so that both splits have all the writers.
    mixed = shuffled(np.arange(len(labels)), len(labels), seed=0, epoch=0)
    images = torch.from_numpy(pixels[mixed]).float().div(BRIGHTEST).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[mixed]).long()
    if size != 8:
        images = interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    train = images[TEST:]
    images = (images - train.mean()) / train.std()
    return Dataset(
        name="digits",
        train=TensorSamples(images[TEST:], targets[TEST:]),
        test=TensorSamples(images[:TEST], targets[:TEST]),
        classes=CLASSES,
    )
