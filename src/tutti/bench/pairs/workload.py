"""What the training pairs train: a perceptron, whose gradients are as large as one likes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.pairs.pair import Setting

Future = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class Size:
    """Layers of width × width without biases, so that all gradients are large."""

    layers: int
    width: int
    batch: int  # samples on each rank

    @property
    def about(self) -> str:
        """For the note under a row."""
        megabytes = self.layers * self.width**2 * 4 / 1e6
        return (
            f"{self.layers} layers of {self.width} × {self.width} ({megabytes:.3g} MB of "
            f"gradients), batch {self.batch} on each rank"
        )


def large(setting: Setting) -> Size:
    """Gradients that no cache holds: sending them takes as long as computing them."""
    if setting.quick:
        return _QUICK
    return Size(12, 2048, batch=1024) if setting.on_gpu else Size(16, 1024, batch=8)


def layered(setting: Setting) -> Size:
    """Many layers of one size, whose backward takes several times as long as a message."""
    if setting.quick:
        return _QUICK
    return Size(12, 2048, batch=1024) if setting.on_gpu else Size(12, 512, batch=128)


def small(setting: Setting) -> Size:
    """What one develops with: a message weighs as much as the computing."""
    if setting.quick:
        return _QUICK
    return Size(12, 1024, batch=64) if setting.on_gpu else Size(10, 512, batch=8)


_QUICK = Size(layers=3, width=64, batch=4)


def model_of(size: Size, setting: Setting) -> nn.Module:
    """The same weights on every rank and for both sides."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(size.layers):
        layers += [nn.Linear(size.width, size.width, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(setting.device)


def inputs_of(size: Size, setting: Setting, rank: int | None = None) -> Tensor:
    """This rank's samples, or those of `rank`."""
    seed = 1 + (setting.world.rank if rank is None else rank)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size.batch, size.width, generator=generator).to(setting.device)


def replica(
    size: Size,
    setting: Setting,
    *,
    bucket_mb: float,
    group: dist.ProcessGroup | None = None,
) -> DistributedDataParallel:
    """The model in DDP, its gradients inside the buckets."""
    return DistributedDataParallel(
        model_of(size, setting),
        process_group=group,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
    )


def gradients_of(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """Forward and backward of each batch, from no gradients at all: what a step adds up."""
    model.zero_grad()
    for batch in batches:
        _add_gradients(model, batch)
    return _gradients(model)


def gradients_sent_once(model: DistributedDataParallel, batches: Sequence[Tensor]) -> list[Tensor]:
    """The same; only the last batch's backward communicates."""
    model.zero_grad()
    with model.no_sync():
        for batch in batches[:-1]:
            _add_gradients(model, batch)
    _add_gradients(model, batches[-1])
    return _gradients(model)


def _add_gradients(model: nn.Module, batch: Tensor) -> None:
    # Something to learn: the inputs, turned by one place.
    loss = (model(batch) - batch.roll(1, -1)).square().mean()
    loss.backward()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


class SendAtOnce:
    """What DDP itself does: a bucket is all-reduced as soon as backward has filled it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def take(self, bucket: dist.GradBucket) -> Future:
        """The future of the bucket's mean over ranks."""
        return _begin(bucket.buffer(), self.ranks)


class SendAfterBackward(SendAtOnce):
    """The same buckets in the same order, held back until backward has filled the last of them."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._held: list[tuple[Tensor, Future]] = []

    def take(self, bucket: dist.GradBucket) -> Future:
        """The future of the bucket's mean over ranks."""
        device = bucket.buffer().device
        # On a GPU a future must know it, for DDP to wait for the stream that the sum is made on.
        promised: Future = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        self._held.append((bucket.buffer(), promised))
        if bucket.is_last():
            held, self._held = self._held, []
            for buffer, future in held:
                _begin(buffer, self.ranks).then(_pass_on(future))
        return promised


def hook(sender: SendAtOnce, bucket: dist.GradBucket) -> Future:
    """As DDP wants it."""
    return sender.take(bucket)


def _begin(buffer: Tensor, ranks: int) -> Future:
    work: Any = dist.all_reduce(buffer.div_(ranks), async_op=True)
    first: Future = work.get_future().then(lambda done: done.value()[0])
    return first


def _pass_on(future: Future) -> Callable[[Future], None]:
    def give(done: Future) -> None:
        future.set_result(done.value())

    return give
