"""torch DDP: gradients travel in buckets while backward still computes the others.

DDP hands out the mean over ranks. The contract is the sum, so `backward` multiplies the loss by
the number of ranks: (1/R) Σ R·g = Σ g. DDP divides every gradient before it is sent, so nothing
that travels is larger than it would be otherwise.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from tutti.parallel.engine import Engine
from tutti.parallel.flat import sum_over_ranks
from tutti.parallel.gradients import check_all_used, gradients, trained_parameters
from tutti.parallel.options import EngineOptions
from tutti.world.errors import UsageError
from tutti.world.world import World

# Steps before PowerSGD compresses. DDP rebuilds its buckets after the first step, and what
# PowerSGD remembers belongs to a bucket; the first gradients also change fastest.
POWERSGD_START = 10


class Ddp(Engine):
    """torch DDP, with and without overlap, with and without compression."""

    def __init__(self, model: nn.Module, world: World, options: EngineOptions) -> None:
        super().__init__(model, world)
        self.options = options
        self.trained = trained_parameters(model)
        self.replica = wrap_in_ddp(
            model,
            bucket_mb=options.bucket_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused=options.find_unused,
        )
        # They are shared at the start, and by share_buffers() when it matters; not at each step.
        self.replica.broadcast_buffers = False
        self.powersgd_state: powersgd.PowerSGDState | None = None
        if options.compress in _NARROW:
            self.replica.register_comm_hook(world.size, narrow_hook(_NARROW[options.compress]))
        elif options.compress == "powersgd":
            self.powersgd_state = _powersgd_state(options.powersgd_rank)
            self.replica.register_comm_hook(self.powersgd_state, powersgd_hook)

    @property
    def description(self) -> str:
        options = self.options
        when = "during" if options.overlap else "after"
        how = {
            "none": "",
            "powersgd": f", PowerSGD of rank {options.powersgd_rank} from step {POWERSGD_START}",
        }.get(options.compress, f", sent as {options.compress}")
        return (
            f"ddp: {self.replicas}, buckets of {options.bucket_mb:g} MiB all-reduced "
            f"{when} backward{how}"
        )

    def __call__(self, *inputs: Any) -> Any:
        return self.replica(*inputs)

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        # DDP decides in forward whether this backward will communicate: both belong inside.
        if last and self.options.overlap:
            return nullcontext()
        if self.options.static_graph:
            # torch stops with an internal error: its first backward must communicate.
            raise UsageError(
                "--static-graph contradicts several microbatches per step, which communicate in "
                "the last one only: leave --static-graph out or accumulate no gradients"
            )
        return self.replica.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        if self.options.overlap:
            loss = loss * self.world.size
        super().backward(loss)

    def reduce(self) -> None:
        if not self.options.overlap:
            # Backward makes the last layer's gradients first: buckets in that order, as DDP's.
            tensors = gradients(self.trained, self.options.find_unused)[::-1]
            sum_over_ranks(tensors, self.options.bucket_mb * 2**20)
        elif not (self.options.find_unused or self.options.static_graph):
            check_all_used(self.trained)


def wrap_in_ddp(
    model: nn.Module,
    *,
    bucket_mb: float,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused: bool,
) -> DistributedDataParallel:
    """torch's module, which copies rank 0's parameters and buffers to all when it is made."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no parameter to train: use --engine single or train one")
    return DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused,
    )


_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Hook = Callable[[int, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def narrow_hook(dtype: torch.dtype) -> _Hook:
    """A hook that sends a bucket as 16-bit numbers, on every backend.

    torch's bf16 hook asks for NCCL; gloo sums bf16 as well. Dividing comes before narrowing: it
    is then done in the wide type, and R·g cannot overflow fp16 where g does not.
    """

    def hook(ranks: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        wide = bucket.buffer()
        narrow = (wide / ranks).to(dtype)
        work = dist.all_reduce(narrow, async_op=True)
        assert work is not None  # it is None for ranks outside the group only

        def widen(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return wide.copy_(future.value()[0])

        widened: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
        return widened

    return hook


def powersgd_hook(
    state: powersgd.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, without its side effect on random numbers.

    It draws a bucket's first Q from a seed that all ranks share, and sets that seed on CUDA too,
    where it does not put the old one back: from then on all ranks would drop the same units.
    """
    device = bucket.buffer().device
    first = state.iter >= POWERSGD_START and bucket.index() not in state.q_memory_dict
    with torch.random.fork_rng([device]) if first and device.type == "cuda" else nullcontext():
        return powersgd.powerSGD_hook(state, bucket)


def _powersgd_state(rank: int) -> powersgd.PowerSGDState:
    """What PowerSGD remembers between steps.

    A gradient matrix M (n × m) travels as P (n × rank) and Q (m × rank), with M ≈ P Qᵀ. Kept for
    each bucket: Q, where the next step starts from (warm start), the same on all ranks; and the
    part M − P Qᵀ that was not sent and is added to the next gradient (error feedback), which is
    this rank's own and as large as the gradients. Vectors, and matrices for which the factors
    would not be half as large, travel as they are.
    """
    return powersgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=POWERSGD_START,
        use_error_feedback=True,
        warm_start=True,
        # Columns of zeros, as from a layer that got no gradient, must not become 0/0.
        orthogonalization_epsilon=1e-8,
    )
