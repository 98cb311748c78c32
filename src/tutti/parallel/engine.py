"""Engine: runs the microbatches of a step, and sums the gradients over all ranks.

The contract of all engines: the loss of a microbatch is a sum over its samples, divided by the
number of samples (or tokens) in all microbatches of all ranks in this step. Each rank then computes
its part of the gradient of the mean loss, and the parts are summed:

    g = Σ_ranks Σ_microbatches ∂/∂θ (loss of the microbatch / samples of the step)

After `run`, every rank holds g in `.grad` (or its shard of g), however unevenly the samples are
distributed. A mean over ranks would be correct only if all ranks had equally many samples.

A step is `engine.run(microbatches, loss_fn)` followed by `optimizer.step()`. Ranks that differ only
in tp or pp work on the same samples. `reports_loss` is true on exactly one of these ranks, and only
the loss and outputs of that rank are used.
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

from tutti.comm.collectives import all_reduce, broadcast_coalesced
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
    """Measures a step from inside `Engine.run`."""

    def forward(self) -> AbstractContextManager[None]:
        """A context that encloses the forward pass and the loss of a microbatch."""

    def before_last_backward(self, loss: Tensor) -> None:
        """Called with the loss of the last microbatch, before its backward pass."""


def unscaled(loss: Tensor) -> Tensor:
    """The default `scale` of `Engine.run`, which returns the loss unchanged."""
    return loss


class Engine(ABC):
    """Runs a model on this rank's part of the batch, and sums gradients over all ranks."""

    def __init__(self, model: nn.Module, world: World, mesh: Mesh | None = None) -> None:
        self.model = model
        """The plain module, whose parameters the optimizer updates and checkpoints contain."""
        self.forward: Callable[..., Any] = model
        """Called by `engine(inputs)` in a step: the model, or the compiled model."""
        self.world = world
        self.mesh = mesh if mesh is not None else Layout(dp=world.size).mesh(world)
        self.splits_sequence = False
        """Whether tp ranks hold a part of the sequence each, between the split layers."""

    @property
    def aliases(self) -> dict[str, str]:
        """The names of this rank's copies of tied parameters, each mapped to the first copy's name.

        Empty without a pipeline.
        """
        return {}

    @property
    @abstractmethod
    def description(self) -> str:
        """One line that describes the engine, printed at the start of a run."""

    @property
    def replicas(self) -> str:
        """The number of replicas, in words."""
        return f"{self.world.size} replica{'s' * (self.world.size > 1)}"

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss and outputs are used, among all ranks with the same samples."""
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
        """Run forward and backward of all microbatches of a step. Then every `.grad` contains g.

        Returns this rank's part of the step's loss, on the device; 0 on ranks that do not report
        the loss. The sum over all ranks is the loss of the step. All ranks must pass the same
        number of microbatches. A microbatch may be empty on some ranks, but not on all ranks; ranks
        with an empty microbatch need `example`, one real input. Backward starts from `scale(loss)`.
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
        """A zero tensor in the dtype of losses: float64 if parameters are float64, else float32."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=self.world.device)

    @torch.no_grad()
    def infer(self, inputs: Tensor, example: Tensor | None = None) -> Any:
        """The model's outputs for this rank's inputs. Put the model into evaluation mode before.

        Returns None on ranks that do not hold the last layer and on ranks without inputs. Ranks
        without inputs need `example` to take part in collectives. Call this method the same number
        of times on all ranks.
        """
        return self.model(inputs) if len(inputs) else None

    def __call__(self, *inputs: Any) -> Any:
        """The model's outputs for this rank's inputs, in a step."""
        return self.forward(*inputs)

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of a microbatch.

        Replicas all-reduce gradients only in the last microbatch.
        """
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward, which adds the gradients of this microbatch to each `.grad`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        """Sum each `.grad` over ranks after the last microbatch, unless backward has done so."""
        return

    def empty_microbatch(self, *inputs: Any, last: bool) -> None:
        """Replace a microbatch that has samples only on other ranks.

        The other ranks wait for this rank in the all-reduce of gradients and in synchronised batch
        norms. Therefore the model runs on `inputs`, which may be any real inputs. The resulting
        gradients are zero, and batch norm statistics and random generators do not change. A
        microbatch that is empty on every rank must be left out.
        """
        with self.microbatch(last), without_side_effects(self.model, self.world):
            self.backward(_zero_loss_of(self(*inputs)))

    def seed_rng(self, seed: int, step: int = 0) -> None:
        """Seed the random generators for training, as described in rng.py. Call on every rank."""
        seed_training_rng(seed, self.mesh, splits_sequence=self.splits_sequence, step=step)

    def share_buffers(self) -> None:
        """Copy the buffers of the first data rank to all data ranks.

        Call this method before evaluation or a checkpoint. The running statistics of plain batch
        norms differ between ranks, because ranks have different samples. Training does not read
        running statistics, so they need to be equal only before evaluation or a checkpoint.
        """
        if self.mesh.layout.data_ranks > 1:
            broadcast_coalesced(list(self.model.buffers()), group=self.mesh.data_group)


class Single(Engine):
    """One rank on one device, without communication: the reference for all other engines."""

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
    """A model that is sharded by FSDP2 or split by tensor parallelism, without a pipeline."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh.world, mesh)
        self.trained = trained_parameters(model)

    @property
    def description(self) -> str:
        return f"{self.mesh.layout}: {self.mesh.describe()}"

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):
            # With shards, every microbatch reduce-scatters its gradients, because unsharded
            # gradients would need memory for the whole model. Replicas all-reduce only once, after
            # the last microbatch.
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
        if len(inputs) == 0:  # other ranks need this rank's shards to gather parameters
            assert example is not None
            self.model(example)
            return None
        return gathered(self.model(inputs))


def gathered(outputs: Any) -> Any:
    """Gather logits that are split along the vocabulary; other outputs are unchanged."""
    return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, keyed by name, in the same order on every rank."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def gradients_to_sum(parameters: Mapping[str, nn.Parameter], find_unused: bool) -> list[Tensor]:
    """The gradients to sum over ranks. They belong to the same parameters on every rank.

    With find_unused, a parameter that has a gradient on some ranks gets a gradient of zeros on the
    other ranks. A parameter that has no gradient on any rank is left out, and the optimizer skips
    it.
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
    """Raise UsageError if a parameter has no gradient, since ranks might sum different lists."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            raise UsageError(
                f"parameter {name} got no gradient in this step: {cure}, or "
                "requires_grad_(False) if it is not meant to be trained"
            )


def _zero_loss_of(outputs: Any) -> Tensor:
    """A loss that depends on all outputs, with zero gradients even if outputs are inf or NaN."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    parts = [tensor.sum() * 0 for tensor in tensors if tensor.requires_grad]
    return torch.stack([part.float() for part in parts]).sum()


@contextmanager
def without_side_effects(model: nn.Module, world: World) -> Iterator[None]:
    """Context in which running the model changes neither norm statistics nor random generators.

    Only norms are set to evaluation mode, because the whole model might use fewer parameters in
    evaluation (no auxiliary head, for example), and all parameters must take part. Synchronised
    batch norms stay in training mode, because other ranks exchange statistics with them, but they
    contribute no samples.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, _NormBase) and layer.training]

    def set_active(active: bool) -> None:
        for norm in norms:
            if isinstance(norm, JointBatchNorm):
                norm.without_samples = not active
            else:
                norm.train(active)

    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        try:
            set_active(False)
            yield
        finally:
            set_active(True)
