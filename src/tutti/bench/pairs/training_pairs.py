"""Pairs of training steps with equal gradients that are communicated in different ways.

The model is a stack of linear layers without biases, so the size of its gradients is easy to set.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.collectives.backends import process_group
from tutti.bench.pairs import Pair, Setting
from tutti.parallel.ddp import narrow_hook
from tutti.world.exchange import gather_json

Future = torch.futures.Future[Tensor]

# Bucket sizes to try, in MiB. The gradients have 64 MiB on the CPU and 192 MiB on a GPU.
_CPU_BUCKETS, _GPU_BUCKETS = (4.0, 8.0, 16.0), (12.0, 25.0, 50.0)
_ONE_BUCKET = 1 << 20
_MICROBATCHES = 4


# ---- The pairs ----


def data_parallel(setting: Setting) -> Pair:
    """DataParallel, in which rank 0 uses all GPUs, or DDP, in which each rank uses one GPU."""
    world = setting.world
    gpus = torch.cuda.device_count() if setting.on_gpu else 0
    enough = world.size > 1 and world.nodes == 1 and gpus >= world.size and not world.sharing_note
    setting.need(
        enough,
        "DataParallel splits a batch over the GPUs of one process: it needs at least two ranks on "
        f"one host and as many GPUs; there are {gpus} GPUs for {world.size} ranks",
    )
    size = _size(setting, "large")
    replica = _ddp(size, setting)
    whole_batch = [torch.cat([_inputs(size, setting, rank) for rank in range(world.size)])]
    own_batch = [_inputs(size, setting)]
    data_parallel = nn.DataParallel(_model(size, setting), device_ids=list(range(world.size)))

    def one_process() -> list[Tensor]:
        return _backward(data_parallel, whole_batch) if world.is_first else []

    def one_process_per_gpu() -> list[Tensor]:
        gradients = _backward(replica, own_batch)
        return gradients if world.is_first else []

    return Pair(
        baseline=one_process,
        optimized=one_process_per_gpu,
        tolerance=1e-4,
        reason=f"{size.about}; matrix products of another shape sum in another order",
    )


def overlap(setting: Setting) -> Pair:
    """All-reduce the same buckets in the same order, either after backward or during backward."""
    size = _size(setting, "many layers")
    bucket_mb = size.width**2 * 4 / 2**20  # one bucket per layer
    after, during = (_ddp(size, setting, bucket_mb=bucket_mb) for _ in range(2))
    after.register_comm_hook([], _reduce_after_backward)
    during.register_comm_hook(None, _reduce_immediately)
    batch = [_inputs(size, setting)]
    return Pair(
        baseline=partial(_backward, after, batch),
        optimized=partial(_backward, during, batch),
        reason=f"{size.about}, one bucket per layer",
    )


def buckets(setting: Setting) -> Pair:
    """One bucket, all-reduced after backward, or smaller buckets, each with its own fixed cost."""
    size = _size(setting, "large")
    batch = [_inputs(size, setting)]
    one = _ddp(size, setting, bucket_mb=_ONE_BUCKET)
    candidates = _GPU_BUCKETS if setting.on_gpu else _CPU_BUCKETS
    models = {mb: _ddp(size, setting, bucket_mb=mb) for mb in candidates}
    steps = {mb: partial(_backward, model, batch) for mb, model in models.items()}
    best = _fastest(setting, steps)
    tried = ", ".join(f"{each:g}" for each in candidates)
    return Pair(
        baseline=partial(_backward, one, batch),
        optimized=steps[best],
        reason=f"{size.about}; {best:g} MiB was the fastest of {tried}",
    )


def shm(setting: Setting) -> Pair:
    """The same DDP step on a gloo group and on an shm group."""
    setting.need(not setting.on_gpu, "gloo and shm are compared on CPU tensors: use --device cpu")
    size = _size(setting, "small")
    batch = [_inputs(size, setting)]
    groups = [process_group(name)[0] for name in ("gloo", "shm")]
    over_gloo, over_shm = (_ddp(size, setting, group=each) for each in groups)

    def close() -> None:
        for group in groups:
            dist.destroy_process_group(group)

    # A sum of two numbers does not depend on their order, a sum of three rounded numbers does.
    exact = setting.world.size <= 2
    return Pair(
        baseline=partial(_backward, over_gloo, batch),
        optimized=partial(_backward, over_shm, batch),
        tolerance=0.0 if exact else 1e-5,
        reason=size.about + ("" if exact else "; ranks are summed in another order"),
        close=close,
    )


def accumulation(setting: Setting) -> Pair:
    """The same samples, with gradients all-reduced after each microbatch or once per step."""
    size = _size(setting, "small")
    whole = _inputs(replace(size, batch=size.batch * _MICROBATCHES), setting)
    microbatches = [each.clone() for each in whole.chunk(_MICROBATCHES)]
    every, last = (_ddp(size, setting) for _ in range(2))
    return Pair(
        baseline=partial(_backward, every, microbatches),
        optimized=partial(_backward, last, microbatches, sync_once=True),
        tolerance=1e-5,
        reason=f"{size.about}, {_MICROBATCHES} microbatches; sums are in another order",
    )


def bf16_gradients(setting: Setting) -> Pair:
    """float32 gradients, or half the bytes with gradients rounded to 8 significant bits."""
    size = _size(setting, "large")
    batch = [_inputs(size, setting)]
    full, rounded = (_ddp(size, setting) for _ in range(2))
    rounded.register_comm_hook(setting.world.size, narrow_hook(torch.bfloat16))
    return Pair(
        baseline=partial(_backward, full, batch),
        optimized=partial(_backward, rounded, batch),
        # Each rank's gradient and the sum are rounded: at most 2 × 2⁻⁹ of a value.
        tolerance=1e-2,
        reason=f"{size.about}; bfloat16 has 8 significant bits",
    )


def _fastest(setting: Setting, calls: Mapping[float, Callable[[], Any]]) -> float:
    """Return the key of the fastest call, timed on the slowest rank, in turns. Collective."""
    times: dict[float, list[float]] = {key: [] for key in calls}
    for _ in range(setting.pick(5, 1) + 2):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            if setting.on_gpu:
                torch.cuda.synchronize(setting.device)
            times[key].append(time.perf_counter() - started)
    # The first two calls build DDP's buckets and warm up.
    medians = {key: median(each[2:]) for key, each in times.items()}
    slowest = [max(each) for each in zip(*gather_json(list(medians.values())), strict=True)]
    return min(zip(slowest, medians, strict=True))[1]


# ---- The workload ----


@dataclass(frozen=True)
class _Size:
    layers: int
    width: int
    batch: int  # samples per rank

    @property
    def about(self) -> str:
        megabytes = self.layers * self.width**2 * 4 / 1e6
        return (
            f"{self.layers} layers of {self.width} × {self.width} ({megabytes:.3g} MB of "
            f"gradients), batch {self.batch} per rank"
        )


# {name: (size on the CPU, size on a GPU)}
_SIZES = {
    # Gradients larger than the caches; their communication takes as long as their computation.
    "large": (_Size(16, 1024, 8), _Size(12, 2048, 1024)),
    # Layers of equal size. The backward of a layer takes several times as long as a message.
    "many layers": (_Size(12, 512, 128), _Size(12, 2048, 1024)),
    # A development-sized model: communication takes as long as computation.
    "small": (_Size(10, 512, 8), _Size(12, 1024, 64)),
}


def _size(setting: Setting, name: str) -> _Size:
    return setting.pick(_SIZES[name][setting.on_gpu], _Size(layers=3, width=64, batch=4))


def _model(size: _Size, setting: Setting) -> nn.Module:
    """Return a model whose weights are the same on every rank and for both sides."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(size.layers):
        layers += [nn.Linear(size.width, size.width, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(setting.device)


def _inputs(size: _Size, setting: Setting, rank: int | None = None) -> Tensor:
    """Return the samples of `rank` (default: this rank)."""
    seed = 1 + (setting.world.rank if rank is None else rank)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size.batch, size.width, generator=generator).to(setting.device)


def _ddp(
    size: _Size, setting: Setting, *, bucket_mb: float = 25, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    model = _model(size, setting)
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


def _backward(model: Any, batches: Sequence[Tensor], sync_once: bool = False) -> list[Tensor]:
    """Forward and backward of each batch; returns the accumulated gradients.

    With `sync_once`, only the backward of the last batch communicates.
    """
    model.zero_grad()
    for number, batch in enumerate(batches, 1):
        local = sync_once and number < len(batches)
        with model.no_sync() if local else nullcontext():
            # The target is the input, shifted by one element.
            (model(batch) - batch.roll(1, -1)).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


# ---- Communication hooks of DDP: (state, bucket) → future with the mean of the bucket ----


def _reduce_immediately(state: None, bucket: dist.GradBucket) -> Future:
    """DDP's default: all-reduce a bucket as soon as backward has filled it."""
    return _start_all_reduce(bucket.buffer())


def _reduce_after_backward(pending: list[tuple[Tensor, Future]], bucket: dist.GradBucket) -> Future:
    """All-reduce the same buckets in the same order, after backward has filled the last bucket."""
    device = bucket.buffer().device
    # On a GPU the future needs the device, so that DDP waits for the right stream.
    future: Future = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
    pending.append((bucket.buffer(), future))
    if bucket.is_last():
        for buffer, promised in pending:
            _start_all_reduce(buffer).then(partial(_complete, promised))
        pending.clear()
    return future


def _start_all_reduce(buffer: Tensor) -> Future:
    work: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    first: Future = work.get_future().then(lambda done: done.value()[0])
    return first


def _complete(promised: Future, done: Future) -> None:
    promised.set_result(done.value())
