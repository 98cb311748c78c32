"""Pairs of training steps: the same gradients, sent at another time or in another form."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.bench.pairs.pair import Pair, Setting
from tutti.bench.pairs.workload import (
    SendAfterBackward,
    SendAtOnce,
    Size,
    gradients_of,
    gradients_sent_once,
    hook,
    inputs_of,
    large,
    layered,
    replica,
    small,
)
from tutti.parallel.ddp import narrow_hook
from tutti.world.exchange import gather_json

# What is tried, in MiB: the model's gradients are 64 MiB on the CPU, and 192 on a GPU.
_CPU_BUCKETS, _GPU_BUCKETS = (4.0, 8.0, 16.0), (12.0, 25.0, 50.0)
_ONE_BUCKET = 1 << 20
_MICROBATCHES = 4


def overlap(setting: Setting) -> Pair:
    """Only the time at which buckets are sent differs: same buckets, same messages, same sums."""
    size, ranks = layered(setting), setting.world.size
    bucket_mb = size.width**2 * 4 / 2**20  # one for each layer
    late, soon = (replica(size, setting, bucket_mb=bucket_mb) for _ in range(2))
    late.register_comm_hook(SendAfterBackward(ranks), hook)
    soon.register_comm_hook(SendAtOnce(ranks), hook)
    batch = [inputs_of(size, setting)]
    return Pair(
        baseline=partial(gradients_of, late, batch),
        optimized=partial(gradients_of, soon, batch),
        reason=f"{size.about}, a bucket for each layer",
    )


def buckets(setting: Setting) -> Pair:
    """One bucket leaves when backward has ended; smaller ones leave earlier, and each costs."""
    size = large(setting)
    batch = [inputs_of(size, setting)]
    one = replica(size, setting, bucket_mb=_ONE_BUCKET)
    candidates = _GPU_BUCKETS if setting.on_gpu else _CPU_BUCKETS
    tried = {each: replica(size, setting, bucket_mb=each) for each in candidates}
    steps = {each: partial(gradients_of, model, batch) for each, model in tried.items()}
    best = _fastest(setting, steps)
    others = ", ".join(f"{each:g}" for each in candidates)
    return Pair(
        baseline=partial(gradients_of, one, batch),
        optimized=steps[best],
        reason=f"{size.about}; {best:g} MiB was the fastest of {others}",
    )


def shm(setting: Setting) -> Pair:
    """The same DDP step; only the process group under it differs."""
    from tutti.bench.contenders import process_group

    setting.need(not setting.on_gpu, "gloo and shm are compared on CPU tensors: use --device cpu")
    size = small(setting)
    batch = [inputs_of(size, setting)]
    groups = [process_group(name)[0] for name in ("gloo", "shm")]
    over_gloo, over_shm = (replica(size, setting, bucket_mb=25, group=each) for each in groups)

    def close() -> None:
        for group in groups:
            dist.destroy_process_group(group)

    # Sums of two are the same in any order, those of three are not.
    exact = setting.world.size <= 2
    return Pair(
        baseline=partial(gradients_of, over_gloo, batch),
        optimized=partial(gradients_of, over_shm, batch),
        tolerance=0.0 if exact else 1e-5,
        reason=size.about + ("" if exact else "; ranks are added up in another order"),
        close=close,
    )


def accumulation(setting: Setting) -> Pair:
    """The same samples; gradients cross the wire after each small batch, or once for all."""
    size = small(setting)
    batches = [part.clone() for part in _microbatches(size, setting)]
    each, once = (replica(size, setting, bucket_mb=25) for _ in range(2))
    return Pair(
        baseline=partial(gradients_of, each, batches),
        optimized=partial(gradients_sent_once, once, batches),
        tolerance=1e-5,
        reason=f"{size.about}, {_MICROBATCHES} of them; sums are added up in another order",
    )


def bf16_gradients(setting: Setting) -> Pair:
    """Half the bytes, and a rounding to eight bits of each gradient."""
    size = large(setting)
    batch = [inputs_of(size, setting)]
    wide, narrow = (replica(size, setting, bucket_mb=25) for _ in range(2))
    narrow.register_comm_hook(setting.world.size, narrow_hook(torch.bfloat16))
    return Pair(
        baseline=partial(gradients_of, wide, batch),
        optimized=partial(gradients_of, narrow, batch),
        # Each rank's part is rounded once, their sum again: 2 × 2⁻⁹ of a value, at most.
        tolerance=1e-2,
        reason=f"{size.about}; bfloat16 keeps 8 bits",
    )


def _microbatches(size: Size, setting: Setting) -> Sequence[Tensor]:
    whole = Size(size.layers, size.width, size.batch * _MICROBATCHES)
    return inputs_of(whole, setting).chunk(_MICROBATCHES)


def _fastest(setting: Setting, calls: Mapping[float, Callable[[], Any]]) -> float:
    """Which of several calls takes least, tried in turns; the slowest rank counts. Collective."""
    times: dict[float, list[float]] = {key: [] for key in calls}
    for _ in range(setting.pick(5, 1) + 2):
        for key, call in calls.items():
            began = time.perf_counter()
            call()
            if setting.on_gpu:
                torch.cuda.synchronize(setting.device)
            times[key].append(time.perf_counter() - began)
    # The first two build DDP's buckets and warm up; of the rest the middle one counts.
    middles = {key: sorted(each[2:])[len(each[2:]) // 2] for key, each in times.items()}
    slowest = [max(each) for each in zip(*gather_json(list(middles.values())), strict=True)]
    return min(zip(slowest, middles, strict=True))[1]
