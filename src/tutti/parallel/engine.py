"""Engine: runs the microbatches of a step, and sums the gradients over all ranks.

The contract of all engines. The loss of a microbatch is a sum over its samples divided by the
number of samples (or tokens) of the whole step, over all microbatches of all ranks. The gradient of
a rank is then its share of the gradient of the mean, and the shares are added:

    g = Σ_ranks Σ_microbatches ∂/∂θ (loss of the microbatch / samples of the step)

After `run`, every rank holds g in `.grad` (or its shard of g), however unevenly the samples are
distributed. A mean over ranks would be correct for equal shares only.

A step is `engine.run(microbatches, loss_fn)` followed by `optimizer.step()`. Ranks that differ only
in tp or pp work on the same samples; one of them `reports_loss`, and only its loss and outputs
count.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from tutti.comm.collectives import all_reduce
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.rng import seed_training_rng
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.parallel.tensor import place_gradients
from tutti.world.errors import UsageError
from tutti.world.world import World

Microbatch = tuple[Tensor, Tensor]
"""Inputs and targets."""
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs of the model, targets) → the microbatch's part of the mean loss of the step."""


class StepClock(Protocol):
    """Measures a step from inside of `Engine.run`."""

    def forward(self) -> AbstractContextManager[None]:
        """Entered around the forward pass and the loss of a microbatch."""

    def before_last_backward(self, loss: Tensor) -> None:
        """Called with the loss of the last microbatch, before its backward pass."""


def unscaled(loss: Tensor) -> Tensor:
    """The default loss scaling: none."""
    return loss


class Engine(ABC):
    """Runs a model on this rank's part of the batch, and sums gradients over all ranks."""

    def __init__(self, model: nn.Module, world: World, mesh: Mesh | None = None) -> None:
        self.model = model
        """The plain module: the optimizer updates, and checkpoints hold, its parameters."""
        self.forward: Callable[..., Any] = model
        """What `engine(inputs)` calls in a step: the model, or the compiled model."""
        self.world = world
        self.mesh = mesh if mesh is not None else Layout(dp=world.size).mesh(world)
        self.splits_sequence = False
        """Whether tp ranks hold a part of the sequence each, between the split layers."""

    @property
    def aliases(self) -> dict[str, str]:
        """Parameters of this rank that are copies of a tied parameter → its first name."""
        return {}

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the start of a run: what this engine does."""

    @property
    def replicas(self) -> str:
        """The number of replicas, in words."""
        return f"{self.world.size} replica{'s' * (self.world.size > 1)}"

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's losses and outputs count, among the ranks with the same samples."""
        return self.mesh.rank("tp") == 0

    def run(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFunction,
        *,
        example: Tensor | None = None,
        scale: Callable[[Tensor], Tensor] = unscaled,
        clock: StepClock | None = None,
    ) -> Tensor:
        """Forward and backward of a step's microbatches; afterwards every `.grad` is the step's g.

        Returns this rank's part of the step's loss, on the device, and 0 on ranks that do not
        report the loss: the sum over all ranks is the loss. All ranks give the same number of
        microbatches; a microbatch may be empty on some ranks, but not on all, and then `example`,
        one real input, is needed. Backward starts from `scale(loss)`.
        """
        total = self.zero_loss()
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            if len(inputs) == 0:  # other ranks have samples, and wait for this rank
                assert example is not None
                self.empty_microbatch(example, last=last)
                continue
            with self.microbatch(last):
                with clock.forward() if clock else nullcontext():
                    loss = loss_fn(self(inputs), targets)
                if last and clock:
                    clock.before_last_backward(loss)
                self.backward(scale(loss))
            total = total + loss.detach()
        self.reduce()
        return total if self.reports_loss else torch.zeros_like(total)

    def zero_loss(self) -> Tensor:
        """Zero in the dtype that losses have on every rank: float64, or else float32."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=self.world.device)

    @torch.no_grad()
    def infer(self, inputs: Tensor, example: Tensor | None = None) -> Any:
        """The model's outputs for this rank's inputs; None on ranks without outputs.

        These are ranks without inputs, which may have to take part in collectives all the same
        (and then need `example`), and ranks that do not hold the last layer. Call it equally often
        on all ranks, with the model in evaluation mode.
        """
        return self.model(inputs) if len(inputs) else None

    def __call__(self, *inputs: Any) -> Any:
        """The model's outputs for this rank's inputs, in a step."""
        return self.forward(*inputs)

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Context of forward and backward of one microbatch; only the last one communicates."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add this microbatch's gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        """After the last microbatch: make every `.grad` the sum over ranks, if it is not yet."""
        return

    def empty_microbatch(self, *inputs: Any, last: bool) -> None:
        """Replaces a microbatch for which this rank has no samples while other ranks have some.

        The other ranks wait for this rank in the gradients' all-reduce and in synchronised batch
        norms. So the model runs on `inputs`, any real ones: every gradient is zero, and batch norm
        statistics and random generators are unchanged afterwards. A microbatch that is empty on
        every rank must be left out.
        """
        with self.microbatch(last), without_side_effects(self.model, self.world):
            self.backward(_zero_loss_of(self(*inputs)))

    def seed_rng(self, seed: int, step: int = 0) -> None:
        """Seed the random generators for training: see rng.py. Call it on every rank."""
        seed_training_rng(seed, self.mesh, splits_sequence=self.splits_sequence, step=step)

    def share_buffers(self) -> None:
        """Give every data rank the buffers of the first, before evaluation or a checkpoint.

        Plain batch norms see a different part of the batch on each rank. In training mode they do
        not read their running statistics, so sharing them at every step would be wasted.
        """
        if self.mesh.layout.data_ranks > 1:
            from tutti.comm.packing import broadcast_coalesced

            broadcast_coalesced(list(self.model.buffers()), group=self.mesh.data_group)


class Single(Engine):
    """One rank, one device, no communication: the plain loop that other engines must equal."""

    def __init__(self, model: nn.Module, world: World) -> None:
        if world.size > 1:
            raise UsageError(
                f"--engine single is for a world of 1 rank, this one has {world.size}: "
                "use --engine ddp or --ranks 1"
            )
        super().__init__(model, world)

    @property
    def description(self) -> str:
        return f"single: one rank on {self.world.device}, no communication"


class ShardedEngine(Engine):
    """A model sharded by FSDP2 or split by tensor parallelism, in an ordinary loop; no pipeline."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh.world, mesh)
        self.trained = trained_parameters(model)

    @property
    def description(self) -> str:
        return f"{self.mesh.layout}: {self.mesh.describe()}"

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):
            # With shards, every microbatch reduce-scatters its gradients: unsharded ones would take
            # the memory of the whole model. Replicas all-reduce after the last one only.
            self.model.set_requires_gradient_sync(last or self.mesh.layout.shard > 1)
            self.model.set_requires_all_reduce(last)
            self.model.set_is_last_backward(last)
        yield

    def reduce(self) -> None:
        place_gradients(self.model)
        cure = f"use --layout dp{self.world.size} with --find-unused"
        check_all_have_gradients(self.trained, cure)

    @torch.no_grad()
    def infer(self, inputs: Tensor, example: Tensor | None = None) -> Any:
        if len(inputs) == 0:  # other ranks gather parameters, and need this rank's shards
            assert example is not None
            self.model(example)
            return None
        return gathered(self.model(inputs))


def gathered(outputs: Any) -> Any:
    """Logits that are split along the vocabulary, gathered; other outputs as they are."""
    return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name; the same order on every rank."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def gradients_to_sum(parameters: Mapping[str, nn.Parameter], find_unused: bool) -> list[Tensor]:
    """The gradients that are to be summed over ranks, the same list on every rank.

    With find_unused, a parameter that has a gradient on some rank gets a gradient of zeros where it
    has none; a parameter without a gradient on every rank keeps none, and the optimizer skips it.
    """
    if find_unused:
        used = torch.tensor([each.grad is not None for each in parameters.values()])
        counts = used.to(next(iter(parameters.values())).device, torch.int32)
        all_reduce(counts)
        pairs = zip(parameters.items(), counts.tolist(), strict=True)
        parameters = {name: each for (name, each), count in pairs if count > 0}
        for each in parameters.values():
            if each.grad is None:
                each.grad = torch.zeros_like(each)
    check_all_have_gradients(parameters)
    return [each.grad for each in parameters.values() if each.grad is not None]


def check_all_have_gradients(
    parameters: Mapping[str, nn.Parameter], cure: str = "use --find-unused"
) -> None:
    """Raise UsageError if a parameter has no gradient: ranks would reduce different lists."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            raise UsageError(
                f"parameter {name} got no gradient in this step: {cure}, or "
                "requires_grad_(False) if it is not meant to be trained"
            )


def _zero_loss_of(outputs: Any) -> Tensor:
    """A loss that depends on all outputs and has a gradient of zero, also for inf and NaN."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    parts = [tensor.sum() * 0 for tensor in tensors if tensor.requires_grad]
    return torch.stack([part.float() for part in parts]).sum()


@contextmanager
def without_side_effects(model: nn.Module, world: World) -> Iterator[None]:
    """Run the model inside without changing norm statistics or random generators.

    Only norms change their mode: a model may use other parameters in evaluation (an auxiliary
    head), and all parameters must take part. Synchronised batch norms stay in training mode, since
    the other ranks exchange statistics with them; they contribute no samples.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, _NormBase) and layer.training]
    joint = [layer for layer in norms if isinstance(layer, JointBatchNorm)]
    plain = [layer for layer in norms if not isinstance(layer, JointBatchNorm)]
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        try:
            for norm in joint:
                norm.without_samples = True
            for layer in plain:
                layer.eval()
            yield
        finally:
            for norm in joint:
                norm.without_samples = False
            for layer in plain:
                layer.train()
