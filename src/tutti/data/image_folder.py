"""Images of your own, one folder per class, decoded by the loader's workers."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tutti.data import DataError
from tutti.data.dataset import Dataset, Pair, Samples
from tutti.data.dataset_files import IMAGE_SUFFIXES, class_folders, parts_of
from tutti.data.image_datasets import Standardise

# Mean and standard deviation of ImageNet, which pretrained models expect.
IMAGENET_STANDARDISE = Standardise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_TEST_INTERVAL = 20  # every 20th image of a class is in the test set


class ImageFiles(Samples):
    """Image files with class numbers. An image is scaled and cut to pixels × pixels."""

    def __init__(self, files: list[tuple[Path, int]], pixels: int) -> None:
        self._files, self._pixels = files, pixels

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Tensor) -> Pair:
        chosen = [self._files[index] for index in indices.tolist()]
        images = torch.empty(len(chosen), 3, self._pixels, self._pixels, dtype=torch.uint8)
        for row, (path, _) in enumerate(chosen):
            images[row] = self._decode(path)
        return images, torch.tensor([label for _, label in chosen], dtype=torch.int64)

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return IMAGENET_STANDARDISE(inputs), targets

    def _decode(self, path: Path) -> Tensor:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as file:
                # The shorter side becomes `pixels`, and the centre is cut out.
                image = ImageOps.fit(
                    ImageOps.exif_transpose(file).convert("RGB"), (self._pixels,) * 2
                )
                return torch.from_numpy(np.array(image)).permute(2, 0, 1)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path} cannot be decoded ({reason}): replace or delete it") from None


def image_folder_dataset(folder: Path, pixels: int) -> Dataset:
    """Return the images below `folder`, which has one folder per class.

    If `folder` has the folders `train` and `test` (or `val`), each with one folder per class, these
    are the training set and the test set. Otherwise every 20th image of a class is in the test set.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError("--dataset images needs Pillow: pip install pillow") from None
    if pixels < 1:
        raise DataError(f"--pixels must be at least 1, got {pixels}")
    train_folder, test_folder = parts_of(folder)
    names = [part.name for part in class_folders(train_folder)]
    train = _list_images(train_folder, names)
    if test_folder is not None:
        test = _list_images(test_folder, names)
    else:
        test = {
            label: files[_TEST_INTERVAL - 1 :: _TEST_INTERVAL] for label, files in train.items()
        }
        # Every class has at least one test image, even if it has few images.
        test = {label: held_out or train[label][-1:] for label, held_out in test.items()}
        for label, files in train.items():
            train[label] = [file for file in files if file not in set(test[label])]
            if not train[label]:
                raise DataError(
                    f"{train_folder / names[label]} has 1 image: a training set and a test set "
                    "need at least 2"
                )
    train_set, test_set = (
        ImageFiles([(file, label) for label, files in part.items() for file in files], pixels)
        for part in (train, test)
    )
    return Dataset(folder.name, train_set, test_set, classes=len(names))


def _list_images(folder: Path, names: list[str]) -> dict[int, list[Path]]:
    """Return the files of each class of a folder, by class number."""
    found = {}
    for part in class_folders(folder):
        if part.name not in names:
            raise DataError(f"{part} is a class that the training set does not have: remove it")
        files = sorted(f for f in part.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            kinds = ", ".join(IMAGE_SUFFIXES)
            raise DataError(f"{part} has no images ({kinds}): add images or remove the folder")
        found[names.index(part.name)] = files
    return found
