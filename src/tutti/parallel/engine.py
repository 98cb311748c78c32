"""Engine: runs the microbatches of a step, and sums gradients over all ranks.

The loss of a microbatch is a sum over its samples, divided by the number of samples (or tokens) in
all microbatches of all ranks in this step. The gradients of these losses are summed:

    g = Σ_ranks Σ_microbatches ∂/∂θ (loss of the microbatch / samples of the step)

After `engine.run(microbatches, loss_fn)`, every rank holds g (or its shard of g) in `.grad`. This
is correct even if ranks have different numbers of samples, where a mean over ranks would be wrong.
Ranks that differ only in tp or pp work on the same samples. `reports_loss` is true on exactly one
of these ranks, and only the loss and outputs of this rank are used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from tutti.comm.collectives import all_reduce, broadcast_coalesced
from tutti.data.nested import Nested, call_with, count_rows, map_tensors, tensors_of
from tutti.measure.activation_memory import gathered_by_fsdp
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.rng import seed_training_rng
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.parallel.tensor import place_gradients
from tutti.world.errors import UsageError
from tutti.world.world import World

Microbatch = tuple[Nested, Nested]
"""Inputs and targets."""
LossFunction = Callable[[Any, Nested], Tensor]
"""A function (outputs of the model, targets) → the microbatch's part of the step's mean loss."""


class StepClock(Protocol):
    """Measures a step from inside `Engine.run`."""

    def forward(self) -> AbstractContextManager[None]:
        """Return a context that encloses the forward pass and the loss of a microbatch."""

    def before_last_backward(self, loss: Tensor) -> None:
        """Called with the loss of the last microbatch, before its backward pass."""


class Engine:
    """Runs a model on this rank's part of the batch, and sums gradients over all ranks.

    This base class does not communicate. On one rank, its results are the reference for all other
    engines.
    """

    def __init__(
        self, model: nn.Module, world: World, description: str, mesh: Mesh | None = None
    ) -> None:
        self.model = model
        """The plain module. The optimizer updates its parameters, and checkpoints contain them."""
        self.forward: Callable[..., Any] = model
        """The model or the compiled model. `engine(inputs)` calls it in a step."""
        self.world = world
        self.description = description
        """One line that is printed at the start of a run."""
        self.mesh = mesh if mesh is not None else Layout(dp=world.size).mesh(world)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """The parameters that require gradients, in the same order on every rank."""
        self.splits_sequence = False
        """Whether tp splits activations between split layers along the sequence."""
        self.aliases: dict[str, str] = {}
        """pp: maps the name of each copy of a tied parameter to the name of the first copy."""
        self.bucket_bytes = 0
        """DDP: total bytes of the gradient buckets."""
        self.gradients_in_buckets = False
        """DDP: whether summed gradients are views of the buckets."""

    @property
    def reports_loss(self) -> bool:
        """Whether the loss and outputs of this rank are used. True on one rank per data rank."""
        return self.mesh.rank("tp") == 0

    def run(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFunction,
        *,
        example: Nested = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        clock: StepClock | None = None,
    ) -> Tensor:
        """Run forward and backward of all microbatches of a step, and sum gradients over ranks.

        Returns this rank's part of the step's loss, on the device. The result is 0 on ranks that do
        not report the loss. The sum over all ranks is the loss of the step. All ranks must pass the
        same number of microbatches. A microbatch may be empty on some ranks, but not on all ranks.
        Ranks with an empty microbatch need `example`, one real input. If `scale` is given, backward
        starts from `scale(loss)`.
        """
        total = self.zero_loss()
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            if count_rows(inputs) == 0:  # other ranks have samples and wait for this rank
                assert example is not None
                self.empty_microbatch(example, last=last)
                continue
            with self.microbatch(last):
                with clock.forward() if clock else nullcontext():
                    loss = loss_fn(call_with(self, inputs), targets)
                if last and clock:
                    clock.before_last_backward(loss)
                self.backward(scale(loss) if scale else loss)
            total = total + loss.detach()
        self.reduce()
        return total if self.reports_loss else torch.zeros_like(total)

    def zero_loss(self) -> Tensor:
        """Return 0 in the dtype of losses: float64 for float64 parameters, otherwise float32."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=self.world.device)

    @torch.no_grad()
    def infer(self, inputs: Nested, example: Nested = None) -> Any:
        """Return the model's outputs for this rank's inputs. Call `model.eval()` first.

        Returns None on ranks that do not hold the last layer, and on ranks without inputs. Ranks
        without inputs need `example`, because they must take part in collectives. All ranks must
        call this method the same number of times.
        """
        return call_with(self.model, inputs) if count_rows(inputs) else None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's outputs for this rank's inputs in a training step."""
        return self.forward(*inputs, **named)

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a microbatch. Replicas communicate only in the last microbatch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward, which adds the gradients of this microbatch to `.grad`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        """Sum each `.grad` over ranks after the last microbatch, unless backward has done so."""

    def empty_microbatch(self, *inputs: Any, last: bool) -> None:
        """Run a microbatch that has samples only on other ranks.

        The other ranks wait for this rank in the gradient all-reduce and in synchronised batch
        norms. Therefore the model runs on `inputs`, which may be any real inputs. The resulting
        gradients are zero, and batch norm statistics and random generators do not change. Do not
        call this method for a microbatch that is empty on every rank.
        """
        with self.microbatch(last), without_side_effects(self.model, self.world):
            outputs = tensors_of(call_with(self, inputs[0] if len(inputs) == 1 else inputs))
            # The sum depends on all outputs. Multiplying by 0 gives zero gradients, even if an
            # output is inf.
            parts = [output.sum() * 0 for output in outputs if output.requires_grad]
            self.backward(torch.stack([part.float() for part in parts]).sum())

    def gradients_to_sum(self, find_unused: bool) -> list[Tensor]:
        """Return the gradients to sum over ranks, for the same parameters on every rank.

        If `find_unused` is true, a parameter that has a gradient only on some ranks gets a zero
        gradient on the other ranks. A parameter that has no gradient on any rank is left out, and
        the optimizer skips this parameter.
        """
        parameters = self.trained
        if find_unused:
            used = torch.tensor([p.grad is not None for p in parameters.values()])
            counts = used.to(next(iter(parameters.values())).device, torch.int32)
            all_reduce(counts)
            pairs = zip(parameters.items(), counts.tolist(), strict=True)
            parameters = {name: parameter for (name, parameter), count in pairs if count > 0}
            for parameter in parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        else:
            self.check_gradients()
        return [p.grad for p in parameters.values() if p.grad is not None]

    def check_gradients(self, cure: str = "use --find-unused") -> None:
        """Raise UsageError if a trained parameter has no gradient on this rank.

        Otherwise the ranks would sum the gradients of different parameters.
        """
        for name, parameter in self.trained.items():
            if parameter.grad is None:
                raise UsageError(
                    f"parameter {name} got no gradient in this step: {cure}, or call "
                    "requires_grad_(False) on the parameter if it should not be trained"
                )

    def communication_buffers(self) -> list[Tensor]:
        """Return the tensors that are currently allocated for communication.

        These are gathered parameters, their gradients, received activations, and the state of
        gradient compression. DDP's buckets are not visible as Python tensors: see `bucket_bytes`.
        """
        return gathered_by_fsdp(self.model)

    def seed_rng(self, seed: int, step: int = 0) -> None:
        """Seed the random generators for training (see rng.py). Call this method on every rank."""
        seed_training_rng(seed, self.mesh, splits_sequence=self.splits_sequence, step=step)

    def share_buffers(self) -> None:
        """Copy the buffers of the first data rank to all data ranks.

        Call this method before evaluation and before a checkpoint. The running statistics of plain
        batch norms differ between ranks, because ranks have different samples. During training the
        difference does not matter, because training does not read running statistics.
        """
        if self.mesh.layout.data_ranks > 1:
            broadcast_coalesced(list(self.model.buffers()), group=self.mesh.data_group)


class ShardedEngine(Engine):
    """Engine for a model with FSDP2 or tensor parallelism, without a pipeline."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh.world, f"{mesh.layout}: {mesh.describe()}", mesh)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):
            # Gradients are reduce-scattered over shards in every microbatch, because unsharded
            # gradients would need memory for the whole model. Gradients are all-reduced over
            # replicas only in the last microbatch.
            self.model.set_requires_gradient_sync(last or self.mesh.layout.shard > 1)
            self.model.set_requires_all_reduce(last)
            self.model.set_is_last_backward(last)
        yield

    def reduce(self) -> None:
        place_gradients(self.model)
        self.check_gradients(f"use --layout dp{self.world.size} with --find-unused")

    @torch.no_grad()
    def infer(self, inputs: Nested, example: Nested = None) -> Any:
        # A rank without inputs also runs the model, because other ranks gather parameters from its
        # shards.
        has_inputs = count_rows(inputs) > 0
        outputs = gathered(call_with(self.model, inputs if has_inputs else example))
        # The root module keeps its gathered parameters for backward, and with --no-reshard every
        # block does. But a checkpoint needs shards, and training must gather the parameters again
        # after they have changed.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # not recursive
        return outputs if has_inputs else None


def count_replicas(world: World) -> str:
    """Return `1 replica`, `2 replicas` and so on."""
    return f"{world.size} replica{'s' * (world.size > 1)}"


def gathered(outputs: Any) -> Any:
    """Gather logits that are split along the vocabulary. Return other outputs unchanged."""
    return map_tensors(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, outputs)


@contextmanager
def without_side_effects(model: nn.Module, world: World) -> Iterator[None]:
    """Context manager: running the model changes neither norm statistics nor random generators.

    Only norms are set to evaluation mode. The rest of the model stays in training mode, because all
    parameters must get a gradient, and a model may use fewer parameters in evaluation. Synchronised
    batch norms also stay in training mode, because other ranks exchange statistics with this rank,
    but the samples of this rank are not counted.
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
