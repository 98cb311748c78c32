"""Built-in pairs about communication: whole training steps, then single messages and collectives.

The model in the training steps is a stack of linear layers without biases, because the total size
of its gradients is easy to set.
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tutti import comm
from tutti.bench.collectives.backends import process_group, send_recv
from tutti.bench.pairs import Pair, Setting
from tutti.comm.collectives import all_reduce_coalesced
from tutti.comm.symmetric import Heap, all_reduce
from tutti.models import WideResNet, WideResNetConfig
from tutti.parallel.ddp import narrow_hook
from tutti.parallel.teaching import all_reduce_each
from tutti.world.exchange import gather_json

Future = torch.futures.Future[Tensor]

# Bucket sizes to try, in MiB. All gradients together have 64 MiB on the CPU and 192 MiB on a GPU.
_CPU_BUCKETS, _GPU_BUCKETS = (4.0, 8.0, 16.0), (12.0, 25.0, 50.0)
_ONE_BUCKET = 1 << 20  # in MiB, more than all gradients together
_MICROBATCHES = 4


# ---- Training steps ----


def data_parallel(setting: Setting) -> Pair:
    """Compare DataParallel (rank 0 uses all GPUs) with DDP (each rank uses one GPU)."""
    world = setting.world
    gpus = torch.cuda.device_count() if setting.on_gpu else 0
    enough = world.size > 1 and world.nodes == 1 and gpus >= world.size and not world.sharing_note
    found = f"{gpus} GPUs are visible to {world.size} ranks"
    setting.need(
        enough, f"DataParallel needs two or more ranks on one host and one GPU per rank: {found}"
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

    reason = f"{size.about}; the order of sums depends on the batch size per GPU"
    return Pair(one_process, one_process_per_gpu, tolerance=1e-4, reason=reason)


def overlap(setting: Setting) -> Pair:
    """Compare all-reduces of all buckets after backward with all-reduces during backward."""
    size = _size(setting, "many layers")
    bucket_mb = size.width**2 * 4 / 2**20  # one bucket per layer
    after, during = (_ddp(size, setting, bucket_mb=bucket_mb) for _ in range(2))
    after.register_comm_hook([], _reduce_after_backward)
    during.register_comm_hook(None, allreduce_hook)
    return _step_pair(size, setting, after, during, 0.0, ", one bucket per layer")


def buckets(setting: Setting) -> Pair:
    """Compare one bucket, reduced after backward, with several buckets, reduced during backward."""
    size = _size(setting, "large")
    batch = [_inputs(size, setting)]
    one = _ddp(size, setting, bucket_mb=_ONE_BUCKET)
    candidates = _GPU_BUCKETS if setting.on_gpu else _CPU_BUCKETS
    models = {mb: _ddp(size, setting, bucket_mb=mb) for mb in candidates}
    best = _fastest(setting, {mb: partial(_backward, models[mb], batch) for mb in models})
    tried = ", ".join(f"{mb:g}" for mb in candidates)
    reason = f"; {best:g} MiB was the fastest bucket size of {tried} MiB"
    return _step_pair(size, setting, one, models[best], 0.0, reason)


def shm(setting: Setting) -> Pair:
    """Compare the same DDP step on a gloo group and on an shm group."""
    setting.need(not setting.on_gpu, "this pair compares gloo and shm on the CPU: use --device cpu")
    size = _size(setting, "small")
    groups = [process_group(name)[0] for name in ("gloo", "shm")]
    over_gloo, over_shm = (_ddp(size, setting, group=group) for group in groups)

    def close() -> None:
        for group in groups:
            dist.destroy_process_group(group)

    pair = _step_pair(size, setting, over_gloo, over_shm, *_sum_tolerance(setting))
    return replace(pair, close=close)


def accumulation(setting: Setting) -> Pair:
    """Compare an all-reduce of the gradients after each microbatch with one all-reduce per step."""
    size = _size(setting, "small")
    whole = _inputs(replace(size, batch=size.batch * _MICROBATCHES), setting)
    microbatches = [chunk.clone() for chunk in whole.chunk(_MICROBATCHES)]
    every, last = (_ddp(size, setting) for _ in range(2))
    baseline = partial(_backward, every, microbatches)
    optimized = partial(_backward, last, microbatches, sync_once=True)
    reason = f"{size.about}, {_MICROBATCHES} microbatches; the order of sums differs"
    return Pair(baseline, optimized, tolerance=1e-5, reason=reason)


def bf16_gradients(setting: Setting) -> Pair:
    """Compare gradient all-reduces in float32 with all-reduces in bfloat16 (half the bytes)."""
    size = _size(setting, "large")
    full, rounded = (_ddp(size, setting) for _ in range(2))
    rounded.register_comm_hook(setting.world.size, narrow_hook(torch.bfloat16))
    # Tolerance: the gradients of each rank and their sum are rounded, each time by at most 2⁻⁸ of
    # the value.
    return _step_pair(size, setting, full, rounded, 1e-2, "; bfloat16 has 8 significant bits")


def _sum_tolerance(setting: Setting) -> tuple[float, str]:
    """Return (tolerance, reason) for two backends that may sum over ranks in different orders."""
    if setting.world.size <= 2:  # a sum of two numbers does not depend on their order
        return 0.0, ""
    return 1e-5, "; the order of the sum over ranks differs"


def _step_pair(
    size: "_Size", setting: Setting, baseline: Any, optimized: Any, tolerance: float, reason: str
) -> Pair:
    """Return a pair that compares forward and backward of two models on the same batch."""
    batch = [_inputs(size, setting)]
    sides = partial(_backward, baseline, batch), partial(_backward, optimized, batch)
    return Pair(*sides, tolerance, size.about + reason)


def _fastest(setting: Setting, calls: Mapping[float, Callable[[], Any]]) -> float:
    """Return the key of the fastest call. All ranks must call this function.

    The calls are timed in turn. The time of a call is its median time on the slowest rank.
    """
    times: dict[float, list[float]] = {key: [] for key in calls}
    for _ in range(setting.pick(5, 1) + 2):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            if setting.on_gpu:
                torch.cuda.synchronize(setting.device)
            times[key].append(time.perf_counter() - started)
    # The first two calls build DDP's buckets and warm up.
    medians = {key: median(seconds[2:]) for key, seconds in times.items()}
    slowest = [max(ranks) for ranks in zip(*gather_json(list(medians.values())), strict=True)]
    return min(zip(slowest, medians, strict=True))[1]


# ---- The model, its inputs, and forward and backward ----


@dataclass(frozen=True)
class _Size:
    layers: int
    width: int
    batch: int  # number of samples per rank

    @property
    def about(self) -> str:
        gradients = f"{self.layers * self.width**2 * 4 / 1e6:.3g} MB of gradients"
        return f"{self.layers} layers of {self.width}², {gradients}, batch {self.batch} per rank"


# {name: (size on the CPU, size on a GPU)}
_SIZES = {
    # All gradients together are larger than the caches, and their communication takes about as long
    # as their computation.
    "large": (_Size(16, 1024, 8), _Size(12, 2048, 1024)),
    # The backward of a layer takes several times as long as the all-reduce of its gradient.
    "many layers": (_Size(12, 512, 128), _Size(12, 2048, 1024)),
    # The size of a small model on a development machine, for which communication takes about as
    # long as computation.
    "small": (_Size(10, 512, 8), _Size(12, 1024, 64)),
}


def _size(setting: Setting, name: str) -> _Size:
    return setting.pick(_SIZES[name][setting.on_gpu], _Size(layers=3, width=64, batch=4))


def _model(size: _Size, setting: Setting) -> nn.Module:
    """Return a model. Its weights are the same on every rank and for both sides of a pair."""
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
    """Run forward and backward of each batch, and return the accumulated gradients.

    With `sync_once`, only the backward of the last batch communicates.
    """
    model.zero_grad()
    for number, batch in enumerate(batches, 1):
        local = sync_once and number < len(batches)
        with model.no_sync() if local else nullcontext():
            # The target of the squared error is the input, shifted by one element.
            (model(batch) - batch.roll(1, -1)).square().mean().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


# ---- A DDP communication hook: (state, bucket) → future of the bucket's mean over all ranks ----


def _reduce_after_backward(pending: list[tuple[Tensor, Future]], bucket: dist.GradBucket) -> Future:
    """Return a future of the reduced bucket. All-reduces start when the last bucket is ready."""
    device = bucket.buffer().device
    # On a GPU, the future needs the device, so that DDP waits for the stream of the all-reduce.
    future: Future = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
    pending.append((bucket.buffer(), future))
    if bucket.is_last():
        for buffer, promised in pending:
            work: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
            work.get_future().then(partial(_complete, promised))
        pending.clear()
    return future


def _complete(promised: Future, reduced: "torch.futures.Future[list[Tensor]]") -> None:
    promised.set_result(reduced.value()[0])


# ---- Single messages and collectives ----


def grouped(setting: Setting) -> Pair:
    """Compare single small all-reduces with the same all-reduces in one comm.group().

    In a group, the latency is paid once instead of once per all-reduce.
    """
    count, elements = setting.pick(64, 8), 256
    generator = torch.Generator().manual_seed(setting.world.rank)
    sent = torch.randint(1, 9, (count, elements), generator=generator).float().to(setting.device)
    received = [torch.empty_like(sent) for _ in range(2)]

    def one_by_one(results: Tensor) -> Tensor:
        for tensor, out in zip(sent, results, strict=True):
            comm.all_reduce(tensor, out=out)
        return results

    def in_one_group() -> Tensor:
        with comm.group():
            return one_by_one(received[1])

    reason = f"{count} all-reduces of {elements * 4} bytes"
    return Pair(partial(one_by_one, received[0]), in_one_group, reason=reason)


def from_scratch(setting: Setting) -> Pair:
    """Compare one all-reduce per gradient (parallel/teaching.py) with a coalesced all-reduce."""
    depth = setting.pick(28, 10)
    with torch.device("meta"):
        model = WideResNet(WideResNetConfig(depth=depth, width=1))
    generator = torch.Generator().manual_seed(setting.world.rank)
    shapes = [parameter.shape for parameter in model.parameters()]
    gradients = [torch.randn(shape, generator=generator).to(setting.device) for shape in shapes]
    sums = [[torch.empty_like(gradient) for gradient in gradients] for _ in range(2)]

    def side(number: int, reduce: Callable[[list[Tensor]], None]) -> list[Tensor]:
        for result, gradient in zip(sums[number], gradients, strict=True):
            result.copy_(gradient)
        reduce(sums[number])
        return sums[number]

    megabytes = sum(gradient.nbytes for gradient in gradients) / 1e6
    tolerance, reason = _sum_tolerance(setting)
    return Pair(
        baseline=partial(side, 0, all_reduce_each),
        optimized=partial(side, 1, all_reduce_coalesced),
        tolerance=tolerance,
        reason=f"{len(gradients)} gradients of WideResNet-{depth}-1, {megabytes:.2g} MB{reason}",
    )


def symmetric(setting: Setting) -> Pair:
    """Compare send and recv, which synchronize both ranks, with a one-sided put_signal."""
    world = setting.world
    setting.need(world.size > 1, "a message needs a peer: use --ranks 2")
    setting.need(world.nodes == 1, "symmetric memory works within one host only")
    if setting.on_gpu:
        return _one_shot_all_reduce(setting)
    elements, rank = 64, world.rank
    following, previous = (rank + 1) % world.size, (rank - 1) % world.size
    sent = torch.arange(elements, dtype=torch.float32) + 1000 * rank
    received = torch.empty_like(sent)
    group, _ = process_group("shm")  # the fastest backend within a host
    exchange = RingExchange(elements, following, previous)

    def by_collective() -> Tensor:
        send_recv(sent, received, following, previous, group)
        return received

    def close() -> None:
        exchange.heap.close()
        dist.destroy_process_group(group)

    optimized = partial(exchange.exchange, sent)
    reason = f"each rank sends {sent.nbytes} bytes to the next rank: shm send and recv → put_signal"
    return Pair(by_collective, optimized, reason=reason, close=close)


def _one_shot_all_reduce(setting: Setting) -> Pair:
    """Compare dist.all_reduce with an all-reduce kernel that reads the other GPUs' memory."""
    elements = 4096
    heap = Heap(bytes=1 << 20, device=setting.device)
    shared = heap.empty(elements, dtype=torch.float32)
    sent = torch.arange(elements, device=setting.device).remainder(97).float() + setting.world.rank
    plain = torch.empty_like(sent)

    def by_collective() -> Tensor:
        dist.all_reduce(plain.copy_(sent))
        return plain

    def by_symmetric_memory() -> Tensor:
        shared.local.copy_(sent)
        all_reduce(shared)
        return shared.local

    reason = f"all-reduce of {sent.nbytes} bytes, {heap.reason}"
    return Pair(by_collective, by_symmetric_memory, reason=reason, close=heap.close)


class RingExchange:
    """Every rank puts a message into the memory of the next rank, and signals its arrival.

    Exchanges use two buffers in turn, so message n overwrites message n - 2. At the start of
    exchange n, each rank signals to the previous rank that it has read n - 1 messages. Before a
    rank sends message n, it waits until the next rank has signalled that n - 2 messages are read.
    """

    _ARRIVED, _READ = 0, 1  # signal slots; the value of a signal is the number of messages so far

    def __init__(self, elements: int, following: int, previous: int) -> None:
        self.heap = Heap(bytes=1 << 16, device="cpu")
        self._buffers = [self.heap.zeros(elements) for _ in range(2)]
        self._following, self._previous = following, previous
        self._sent = 0

    def exchange(self, message: Tensor) -> Tensor:
        """Send a message. Return the received message, which is valid until the next exchange."""
        heap, before = self.heap, self._sent
        self._sent = number = before + 1
        buffer = self._buffers[number % 2]
        heap.signal(self._previous, self._READ, before)
        if before > 1:
            heap.wait(self._READ, before - 1, self._following)
        buffer.put_signal(message, self._following, self._ARRIVED, number)
        heap.wait(self._ARRIVED, number, self._previous)
        return buffer.local
