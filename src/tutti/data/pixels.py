"""From the bytes of an image to the numbers of a model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Standardise:
    """(x / 255 - mean) / std for each channel of byte images [N, C, H, W], as float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        numbers = images.float()
        # Channel by channel with plain numbers: tensors of constants would have to be copied to
        # the device for every batch.
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            numbers[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
        return numbers
