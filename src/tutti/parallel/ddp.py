"""torch DDP: gradient buckets are all-reduced while backward computes further gradients.

DDP averages gradients over ranks, but an engine must sum them. Therefore `backward` multiplies the
loss by the number of ranks R: (1/R) Σ R·g = Σ g. DDP divides gradients by R before it sends them,
so the values that it sends are not larger than the local gradients g.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from tutti.comm.collectives import all_reduce, all_reduce_coalesced
from tutti.parallel.engine import Engine, count_replicas
from tutti.parallel.layout import EngineOptions
from tutti.world.errors import UsageError
from tutti.world.world import World

# The number of uncompressed steps before PowerSGD starts. PowerSGD keeps a state for each bucket,
# and DDP rebuilds its buckets after the first step. Also, gradients change most in early steps.
POWERSGD_START = 10


class Ddp(Engine):
    """Engine that uses torch DDP, with optional overlap and gradient compression."""

    def __init__(self, model: nn.Module, world: World, options: EngineOptions) -> None:
        text = f"ddp: {count_replicas(world)}, buckets of {options.bucket_mb:g} MiB all-reduced "
        text += "during backward" if options.overlap else "after backward"
        if options.compress == "powersgd":
            text += f", PowerSGD of rank {options.powersgd_rank} from step {POWERSGD_START}"
        elif options.compress != "none":
            text += f", sent as {options.compress}"
        super().__init__(model, world, text)
        self.options = options
        self.replica = wrap_in_ddp(
            model,
            options.bucket_mb,
            options.gradient_as_bucket_view,
            options.static_graph,
            options.find_unused,
        )
        # DDP's constructor has broadcast the buffers. Later, only share_buffers() broadcasts them.
        self.replica.broadcast_buffers = False
        self.bucket_bytes = sum(parameter.nbytes for parameter in self.trained.values())
        self.gradients_in_buckets = options.gradient_as_bucket_view and options.overlap
        self._powersgd: powersgd.PowerSGDState | None = None
        if options.compress in _NARROW:
            self.replica.register_comm_hook(world.size, narrow_hook(_NARROW[options.compress]))
        elif options.compress == "powersgd":
            self._powersgd = _powersgd_state(options.powersgd_rank)
            self.replica.register_comm_hook(self._powersgd, powersgd_hook)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.replica(*inputs, **named)

    def communication_buffers(self) -> list[torch.Tensor]:
        state = self._powersgd
        if state is None:
            return []
        tables = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        return [tensor for table in tables for tensor in table.values()]

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        # DDP decides in forward whether backward communicates, so both forward and backward must
        # run in this context.
        if last and self.options.overlap:
            return nullcontext()
        if self.options.static_graph:
            # torch fails with an internal error if DDP's first backward does not communicate.
            raise UsageError(
                "--static-graph needs communication in every microbatch, but with several "
                "microbatches only the last one communicates: remove --static-graph, or use "
                "--accumulation 1"
            )
        return self.replica.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        if self.options.overlap:
            loss = loss * self.world.size
        super().backward(loss)

    def reduce(self) -> None:
        if not self.options.overlap:
            # Gradients are reduced in reversed order, as in DDP, because backward starts at the
            # last layer.
            tensors = self.gradients_to_sum(self.options.find_unused)[::-1]
            all_reduce_coalesced(tensors, bucket_bytes=self.options.bucket_mb * 2**20)
        elif not (self.options.find_unused or self.options.static_graph):
            self.check_gradients()


def wrap_in_ddp(
    model: nn.Module,
    bucket_mb: float,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused: bool,
) -> DistributedDataParallel:
    """Wrap the model in torch DDP. Its constructor broadcasts rank 0's parameters and buffers."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            "no parameter of the model requires a gradient: use --engine single, or "
            "call requires_grad_(True) on a parameter"
        )
    return DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused,
    )


_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Future = torch.futures.Future[torch.Tensor]


def narrow_hook(dtype: torch.dtype) -> Callable[[int, dist.GradBucket], _Future]:
    """Return a DDP communication hook that all-reduces buckets in a 16-bit dtype on any backend.

    torch's bf16 hook requires NCCL, although gloo can also sum bf16. Gradients are divided by the
    number of ranks R before the conversion, because R·g could overflow fp16 even if g does not.
    """

    def hook(ranks: int, bucket: dist.GradBucket) -> _Future:
        wide = bucket.buffer()
        narrow = (wide / ranks).to(dtype)
        future: _Future = all_reduce(narrow, wait=False).future()
        widened: _Future = future.then(lambda reduced: wide.copy_(reduced.value()))
        return widened

    return hook


def powersgd_hook(state: powersgd.PowerSGDState, bucket: dist.GradBucket) -> _Future:
    """Run torch's PowerSGD hook without its side effect on random generators.

    torch's hook draws the first factor Q of a bucket (see `_powersgd_state`) with the same seed on
    all ranks. On CUDA, it does not restore the generator afterwards, so later dropout masks would
    be the same on all ranks.
    """
    device = bucket.buffer().device
    first = state.iter >= POWERSGD_START and bucket.index() not in state.q_memory_dict
    with torch.random.fork_rng([device]) if first and device.type == "cuda" else nullcontext():
        return powersgd.powerSGD_hook(state, bucket)


def _powersgd_state(rank: int) -> powersgd.PowerSGDState:
    """Return the state that PowerSGD keeps between steps.

    A gradient matrix M (n × m) is sent as P (n × rank) and Q (m × rank), with M ≈ P Qᵀ. Q is the
    start value of the next step (warm start). The residual M − P Qᵀ is added to the next gradient
    (error feedback). The residual differs between ranks and needs as much memory as the gradients.
    Vectors are not compressed, and neither are matrices whose factors would be larger than half of
    the matrix.
    """
    return powersgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=POWERSGD_START,
        use_error_feedback=True,
        warm_start=True,
        # Avoids 0/0 for columns of zeros, for example in a layer without a gradient.
        orthogonalization_epsilon=1e-8,
    )
