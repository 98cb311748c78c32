"""scikit-learn's digits: 1,797 handwritten digits, 8 × 8, that come with the package.

Real data with no download: what the demo and the first run use. A fifth of it is the test split,
the same on every machine.
"""

from importlib.util import find_spec
from pathlib import Path

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
    if size < 8:
        raise DataError(f"digits are 8 × 8, they cannot be shrunk to {size} × {size}: use >= 8")
    rows = np.loadtxt(_file(), delimiter=",")  # 64 pixels and the digit
    pixels, labels = rows[:, :-1], rows[:, -1]
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


def _file() -> Path:
    """Where scikit-learn keeps them: to import it takes a second of every rank, to read 0.05 s."""
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or []:
        if (file := Path(folder, "datasets", "data", "digits.csv.gz")).is_file():
            return file
    raise DataError(
        "data set digits comes with scikit-learn, which is not installed: "
        "pip install 'tutti-torch[demo]'"
    )
