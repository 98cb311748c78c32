"""The engine of layouts with pp: the microbatches of a step are those of the pipeline.

The schedule is the same in every step: M microbatches of one fixed size. At the end of an epoch
microbatches are padded with copies of a real input and targets of -100: these add nothing to the
loss, to any gradient, or to the statistics of norms (`Padding`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tutti.comm.collectives import all_reduce, recv, send
from tutti.parallel.engine import (
    Engine,
    LossFunction,
    Microbatch,
    StepClock,
    gathered,
    unscaled,
    without_side_effects,
)
from tutti.parallel.grad_norm import local_shard
from tutti.parallel.layout import ParallelOptions, ScheduleName
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.schedules import (
    SPLIT_BACKWARD,
    Schedule,
    Stage,
    build_schedule,
    rank_of,
    refuse_compiled,
)
from tutti.parallel.pipeline.stages import Stages, Tie
from tutti.parallel.tensor import place_gradients
from tutti.world.errors import UsageError

_IGNORED = -100  # a target that adds no loss: the default ignore_index of cross_entropy
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_MAX_DIMS = 8

Observer = Callable[[int, Tensor, Tensor], None]


class Pipeline(Engine):
    """Runs this rank's stages by a schedule of torch."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        mesh: Mesh,
        options: ParallelOptions,
        microbatches: int,
    ) -> None:
        """`model` has the layers of all of this rank's stages, with their weights."""
        super().__init__(model, mesh.world, mesh)
        self.options = options
        self.stages = stages.modules
        self.stage_layers = stages.layers
        self.microbatches = microbatches
        self.padding = stages.padding
        self.microbatch_size = stages.padding.size
        count, pp = len(stages.layers), mesh.layout.pp
        self.holders = [rank_of(options.pipeline_schedule, stage, pp) for stage in range(count)]
        self.chain = StageChain(self.stages, self.holders, mesh.group("pp"), self.world.device)
        # NCCL sets a group up in its first collective, in which all its ranks must take part; later
        # calls are between two ranks, while others may wait for the result.
        all_reduce(torch.zeros(1, device=self.world.device), group=mesh.group("pp"))
        self.tied = TiedWeights(stages.ties, self.holders, self.stages, mesh)
        self.tied.share_values(model)
        for stage, module in self.stages.items():
            if stage != count - 1:
                module.register_forward_hook(_contiguous)
            if options.pipeline_schedule in SPLIT_BACKWARD:
                _prepare_split_backward(module, options.pipeline_schedule)
        self.schedule: Schedule | None = None
        self.torch_stages: list[Stage] = []
        """This rank's stages as torch's objects, created by the first step."""
        self._loss_fn: LossFunction | None = None  # of the step that runs
        self._scale: Callable[[Tensor], Tensor] = unscaled
        self._losses: list[Tensor] = []

    @property
    def description(self) -> str:
        names = [
            each[0] if len(each) == 1 else f"{each[0]}–{each[-1]}" for each in self.stage_layers
        ]
        return (
            f"pipeline: {self.mesh.layout}, schedule {self.options.pipeline_schedule}, "
            f"{self.microbatches} microbatches of {self.microbatch_size}, "
            f"{len(names)} stages: {' | '.join(names)}"
        )

    @property
    def aliases(self) -> dict[str, str]:
        return self.tied.aliases

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage, with the outputs and losses."""
        return len(self.stage_layers) - 1 in self.stages

    @property
    def reports_loss(self) -> bool:
        return self.holds_last and super().reports_loss

    def run(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFunction,
        *,
        example: Tensor | None = None,
        scale: Callable[[Tensor], Tensor] = unscaled,
        clock: StepClock | None = None,
    ) -> Tensor:
        inputs, targets = self._padded(microbatches, example)
        self.padding.begin_step([len(each) for each, _ in microbatches], self.microbatches)
        self._copy_training_mode()
        if self.schedule is None:
            self.schedule = self._build_schedule(inputs[: self.microbatch_size])
        # torch takes the loss function when the schedule is built; ours divides by the number of
        # samples of the step, and is new in every step.
        self._loss_fn, self._scale, self._losses = loss_fn, scale, []
        arguments = (inputs,) if 0 in self.stages else ()
        self.schedule.step(
            *arguments, target=targets if self.holds_last else None, return_outputs=False
        )
        self._loss_fn = None
        self.reduce()
        return torch.stack(self._losses).sum() if self.reports_loss else self.zero_loss()

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._loss_fn is not None
        loss = self._loss_fn(outputs, targets)
        self._losses.append(loss.detach())
        return self._scale(loss)

    @torch.no_grad()
    def infer(self, inputs: Tensor, example: Tensor | None = None) -> Any:
        given = inputs if len(inputs) else example
        assert given is not None, "a rank without inputs needs an example"
        self._copy_training_mode()
        outputs = self.chain(given)
        self._reshard()
        return gathered(outputs) if len(inputs) else None

    def __call__(self, *inputs: Any) -> Any:
        raise UsageError("a pipeline has no forward on a single rank: use run() or infer()")

    def reduce(self) -> None:
        """FSDP has summed over the data ranks; the copies of tied parameters are left to sum."""
        place_gradients(self.model)
        self.tied.sum_gradients(self.model)

    def empty_microbatch(self, *inputs: Any, last: bool) -> None:
        raise UsageError("a pipeline pads microbatches itself: give run() empty ones")

    def _build_schedule(self, inputs: Tensor) -> Schedule:
        """torch's stages and schedule, with the shapes of one microbatch between the stages.

        torch could infer the shapes itself, but it would run the model on uninitialised memory,
        which would stay in the running statistics of norms.
        """
        shapes: dict[int, tuple[Tensor, Tensor]] = {}

        def observe(stage: int, given: Tensor, output: Tensor) -> None:
            shapes[stage] = _like_on_meta(given), _like_on_meta(output)

        with without_side_effects(self.model, self.world):
            self.chain(inputs, observe)
        self._reshard()
        self.torch_stages = [
            Stage(
                module,
                stage,
                len(self.stage_layers),
                self.world.device,
                *shapes[stage],
                group=self.mesh.group("pp"),
                context=self.padding.microbatch,
            )
            for stage, module in self.stages.items()
        ]
        return build_schedule(
            self.options.pipeline_schedule, self.torch_stages, self.microbatches, self._loss
        )

    def _padded(self, microbatches: Sequence[Microbatch], example: Tensor | None) -> Microbatch:
        """All microbatches in one tensor, as a schedule takes them, padded to the fixed size."""
        missing = self.microbatches - len(microbatches)
        if missing < 0:
            raise UsageError(
                f"a step of {len(microbatches)} microbatches does not fit a pipeline that was "
                f"built for {self.microbatches}: use --accumulation {len(microbatches)}"
            )
        padded = [self._pad(pair, example) for pair in microbatches]
        if missing:
            empty = (microbatches[0][0][:0], microbatches[0][1][:0])
            padded += [self._pad(empty, example)] * missing
        return torch.cat([pair[0] for pair in padded]), torch.cat([pair[1] for pair in padded])

    def _pad(self, microbatch: Microbatch, example: Tensor | None) -> Microbatch:
        inputs, targets = microbatch
        missing = self.microbatch_size - len(inputs)
        if missing == 0:
            return microbatch
        if missing < 0:
            raise UsageError(
                f"a microbatch of {len(inputs)} samples does not fit a pipeline that was built "
                f"for {self.microbatch_size}"
            )
        real = inputs if len(inputs) else example
        assert real is not None, "a rank without samples needs an example"
        copies = real[:1].expand(missing, *real.shape[1:])
        ignored = targets.new_full((missing, *targets.shape[1:]), _IGNORED)
        return torch.cat([inputs, copies]), torch.cat([targets, ignored])

    def _copy_training_mode(self) -> None:
        """Views are separate modules: `model.eval()` reaches their layers, but not them."""
        for module in self.stages.values():
            module.training = self.model.training

    def _reshard(self) -> None:
        """After a forward without backward, FSDP would keep some parameters gathered, and stale."""
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


class StageChain:
    """One batch through all stages, forward only: for inference, and to find out shapes.

        stage 0 → send → stage 1 → send → … → stage S-1

    Each transfer is a header (dtype and shape) and the tensor, so batches of any size can follow
    each other. A rank runs its stages in order: no two ranks ever wait for each other.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        holders: list[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.holders = holders
        """The rank, in the group, of every stage of the pipeline."""
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, observe: Observer | None = None) -> Tensor | None:
        """The outputs on the rank of the last stage, None elsewhere.

        `observe(stage, input, output)` is called for each of this rank's stages.
        """
        x: Tensor | None = None
        for stage, module in self.stages.items():
            given = inputs if stage == 0 else self._receive(stage - 1, x)
            x = module(given)
            assert isinstance(x, Tensor), "a stage returns one tensor"
            if observe is not None:
                observe(stage, given, x)
            if stage + 1 == len(self.holders):
                return x
            if self.holders[stage + 1] != self.rank:
                self._send(x.contiguous(), self.holders[stage + 1])
        return None

    def _receive(self, stage: int, local: Tensor | None) -> Tensor:
        source = self.holders[stage]
        if source == self.rank:  # the last stage down the V and the first one up are on one rank
            assert local is not None
            return local
        header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=self.device)
        recv(header, source, group=self.group)
        dtype, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self.device)
        recv(x, source, group=self.group)
        return x

    def _send(self, x: Tensor, target: int) -> None:
        header = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
        header += [0] * (2 + _MAX_DIMS - len(header))
        send(torch.tensor(header, dtype=torch.int64, device=self.device), target, group=self.group)
        send(x, target, group=self.group)


class TiedWeights:
    """Copies of parameters that several stages use, such as an embedding that is also the head.

        stage 0   embed.weight ──┐
                                 ├──  the same values; each has its stage's part of the gradient
        stage 3   head.weight  ──┘

    After backward the parts of the gradient are summed, so that every copy has the whole gradient
    and the optimizer makes the same update to all copies. Stages on one rank (a V) have separate
    copies, too, since each stage may be sharded by itself. Checkpoints hold the first copy only,
    and a norm over all gradients counts the first copy only: the others are aliases.
    """

    def __init__(
        self, ties: Sequence[Tie], holders: list[int], held: Collection[int], mesh: Mesh
    ) -> None:
        self.aliases: dict[str, str] = {}
        """This rank's copies: name of the parameter here → name of the first copy."""
        self._copies: list[tuple[list[str], list[int]]] = []
        self._mesh = mesh
        for tie in ties:
            own = [names for stage, names in tie.names.items() if stage in held]
            self.aliases |= {name: tie.name for names in own for name in names if name != tie.name}
            ranks = list(dict.fromkeys(holders[stage] for stage in tie.names))
            if own:
                self._copies.append(([names[0] for names in own], ranks))

    @torch.no_grad()
    def share_values(self, model: nn.Module) -> None:
        """Make all copies equal to the first stage's."""
        for names, ranks in self._copies:
            copies = [local_shard(model.get_parameter(name)) for name in names]
            first = self._exchange(copies[0], ranks)[0]
            for each in copies:
                each.copy_(first)

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """Give every copy the sum of all copies' gradients."""
        for names, ranks in self._copies:
            copies = [model.get_parameter(name) for name in names]
            if not copies[0].requires_grad:
                continue  # frozen, on all ranks
            for copy in copies:
                if copy.grad is None:  # unused here, but other ranks wait
                    copy.grad = torch.zeros_like(copy)
            parts = [local_shard(copy.grad) for copy in copies if copy.grad is not None]
            # Summed in the order of the stages on all ranks: copies must stay equal bit for bit.
            total = torch.stack(self._exchange(torch.stack(parts).sum(0), ranks)).sum(0)
            for part in parts:
                part.copy_(total)

    def _exchange(self, own: Tensor, ranks: list[int]) -> list[Tensor]:
        """The tensors of these ranks of the pipeline, in their order."""
        group, here = self._mesh.group("pp"), self._mesh.rank("pp")
        own = own.contiguous()
        tensors = [own if rank == here else torch.empty_like(own) for rank in ranks]
        from tutti.comm.grouping import group as collective_group

        with collective_group():
            for rank, tensor in zip(ranks, tensors, strict=True):
                if rank != here:
                    send(own, rank, group=group)
                    recv(tensor, rank, group=group)
        return tensors


def _prepare_split_backward(module: nn.Module, schedule: ScheduleName) -> None:
    """Prepare a stage for gradients of inputs and of weights in two halves.

    torch finds the weights in the autograd graph of forward; they would be missing if FSDP had
    replaced them by their shards meanwhile.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_reshard_after_forward(False, recurse=False)
        if each._compiled_call_impl is not None:  # compiled by the caller, with Module.compile()
            refuse_compiled(schedule)


def _like_on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=tensor.is_floating_point(),
    )


def _contiguous(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.contiguous()  # only contiguous tensors can be sent
