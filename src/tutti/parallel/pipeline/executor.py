"""The engine for layouts with pp: runs the microbatches of a step through the pipeline.

Every step has the same schedule: M microbatches of one fixed size. At the end of an epoch,
microbatches are padded with copies of a real input. The loss function does not get the outputs of
these copies. Padding does not change the loss, the gradients or the statistics of norms (see
`Padding`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tutti.comm.collectives import all_reduce, recv, send
from tutti.data.nested import Nested, count_rows
from tutti.parallel.engine import (
    Engine,
    LossFunction,
    Microbatch,
    StepClock,
    gathered,
    without_side_effects,
)
from tutti.parallel.layout import SPLIT_BACKWARD, ParallelOptions, check_techniques
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.schedules import (
    Schedule,
    Stage,
    build_schedule,
    rank_of,
)
from tutti.parallel.pipeline.stages import Stages
from tutti.parallel.pipeline.tied_weights import TiedWeights
from tutti.parallel.tensor import place_gradients
from tutti.world.errors import UsageError

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
_DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]
_MAX_DIMS = 8


class Pipeline(Engine):
    """Runs this rank's stages with one of torch's schedules."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        mesh: Mesh,
        options: ParallelOptions,
        microbatches: int,
    ) -> None:
        """`model` contains the layers of all stages of this rank, with their weights."""
        schedule, count = options.pipeline_schedule, len(stages.layers)
        names = [
            f"{layers[0]}–{layers[-1]}" if layers[1:] else layers[0] for layers in stages.layers
        ]
        text = f"pipeline: {mesh.layout}, schedule {schedule}, {microbatches} microbatches of "
        text += f"{stages.padding.size}, {count} stages: {' | '.join(names)}"
        super().__init__(model, mesh.world, text, mesh)
        self.options = options
        self.stages, self.stage_layers = stages.modules, stages.layers
        self.microbatches = microbatches
        self.padding = stages.padding
        self.microbatch_size = stages.padding.size
        self.rank_of_stage = [rank_of(schedule, stage, mesh.layout.pp) for stage in range(count)]
        # NCCL creates the communicator of a group in the first collective of the group, and all
        # ranks of the group must take part. This all_reduce is the first collective. All later
        # operations of the group are sends and receives between two ranks.
        all_reduce(torch.zeros(1, device=self.world.device), group=mesh.group("pp"))
        self.tied = TiedWeights(stages.ties, self.rank_of_stage, self.stages, mesh)
        self.tied.share_values(model)
        self.aliases = self.tied.aliases
        for stage, module in self.stages.items():
            if stage != count - 1:
                module.register_forward_hook(_contiguous)
            for part in module.modules() if schedule in SPLIT_BACKWARD else []:
                # torch's split backward finds the weights in the autograd graph of forward.
                # Therefore FSDP must not replace the weights with their shards before backward.
                if isinstance(part, FSDPModule):
                    part.set_reshard_after_forward(False, recurse=False)
                if part._compiled_call_impl is not None:  # compiled by the caller
                    check_techniques(schedule, compile=True)
        self.schedule: Schedule | None = None
        self.torch_stages: list[Stage] = []
        """This rank's stages as torch PipelineStage objects, created in the first step."""
        # The arguments of the current run(), and the losses of its microbatches.
        self._loss_fn: LossFunction | None = None
        self._scale: Callable[[Tensor], Tensor] | None = None
        self._targets: list[Nested] = []
        self._losses: list[Tensor] = []

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage, which computes the outputs and losses."""
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
        scale: Callable[[Tensor], Tensor] | None = None,
        clock: StepClock | None = None,
    ) -> Tensor:
        inputs = self._padded(microbatches, example)
        self.padding.begin_step([len(x) for x, _ in microbatches], self.microbatches)
        self._copy_training_mode()
        if self.schedule is None:
            self.schedule = self._build_schedule(inputs[: self.microbatch_size])
        # The schedule calls _loss, which calls the loss function of the current step. Each step has
        # its own loss function, because a loss is divided by the number of samples in its step.
        self._loss_fn, self._scale, self._losses = loss_fn, scale, []
        arguments = [inputs] if 0 in self.stages else []
        # The schedule passes the number of a microbatch to _loss, which looks up the targets by
        # this number.
        self._targets = [targets for _, targets in microbatches]
        target = torch.arange(self.microbatches) if self.holds_last else None
        self.schedule.step(*arguments, target=target, return_outputs=False)
        self._loss_fn = None
        self.reduce()
        zero = self.zero_loss()
        return sum(self._losses, start=zero) if self.reports_loss else zero

    def _loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return the loss of a microbatch's real samples, or 0 if all samples are padding."""
        assert self._loss_fn is not None
        targets = self._targets[int(number)] if int(number) < len(self._targets) else None
        real = 0 if targets is None else count_rows(targets)
        if real:
            whole = real == self.microbatch_size
            loss = self._loss_fn(outputs if whole else outputs[:real], targets)
        else:
            local = outputs.to_local() if isinstance(outputs, DTensor) else outputs
            loss = (local.sum() * 0).to(self.zero_loss().dtype)
        self._losses.append(loss.detach())
        return self._scale(loss) if self._scale else loss

    @torch.no_grad()
    def infer(self, inputs: Tensor, example: Tensor | None = None) -> Any:
        batch = inputs if len(inputs) else example
        assert batch is not None, "a rank without inputs needs an example"
        self._copy_training_mode()
        outputs = self._run_stages(batch)
        return gathered(outputs) if len(inputs) else None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        raise UsageError("a single rank cannot run the forward of a pipeline: use run() or infer()")

    def communication_buffers(self) -> list[Tensor]:
        received = [
            getattr(information, "buffer", None)
            for stage in self.torch_stages
            for table in (stage.args_recv_info, stage.grad_recv_info)
            for of_microbatch in table.values()
            for information in of_microbatch
        ]
        tensors = [tensor for tensor in received if isinstance(tensor, Tensor)]
        return [*super().communication_buffers(), *tensors]

    def reduce(self) -> None:
        """Sum the gradients of tied parameters. FSDP has already summed over the data ranks."""
        place_gradients(self.model)
        self.tied.sum_gradients(self.model)

    def empty_microbatch(self, *inputs: Any, last: bool) -> None:
        raise UsageError("a pipeline pads microbatches itself: pass empty microbatches to run()")

    def _build_schedule(self, inputs: Tensor) -> Schedule:
        """Create torch's stages and schedule.

        One microbatch runs through the pipeline to find the shapes between stages. torch would find
        the shapes by running the model on uninitialised memory, which would change norm statistics.
        """
        shapes: dict[int, tuple[Tensor, Tensor]] = {}
        with without_side_effects(self.model, self.world):
            self._run_stages(inputs, shapes)
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

    def _padded(self, microbatches: Sequence[Microbatch], example: Tensor | None) -> Tensor:
        """Return the inputs of all microbatches, padded to a fixed size and concatenated."""
        missing = self.microbatches - len(microbatches)
        if missing < 0:
            raise UsageError(
                f"a step of {len(microbatches)} microbatches does not fit a pipeline that was "
                f"built for {self.microbatches}: use --accumulation {len(microbatches)}"
            )
        empty = microbatches[0][0][:0]
        padded = []
        for inputs in [*[inputs for inputs, _ in microbatches], *[empty] * missing]:
            padding = self.microbatch_size - len(inputs)
            if padding < 0:
                raise UsageError(
                    f"a microbatch of {len(inputs)} samples does not fit a pipeline that was built "
                    f"for {self.microbatch_size}: pass microbatch_size={len(inputs)} to "
                    "build_engine"
                )
            padded.append(inputs)
            if padding:
                real = inputs if len(inputs) else example
                assert real is not None, "a rank without samples needs an example"
                padded.append(real[:1].expand(padding, *real.shape[1:]))
        return torch.cat(padded)

    def _copy_training_mode(self) -> None:
        """Copy the model's training mode to stages that are views, because `model.eval()` skips
        them."""
        for module in self.stages.values():
            module.training = self.model.training

    @torch.no_grad()
    def _run_stages(
        self, inputs: Tensor, shapes: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> Tensor | None:
        """Run forward of one batch of any size: stage 0 → send → stage 1 → … → last stage.

        Returns the outputs on the rank of the last stage, and None on other ranks. If `shapes` is
        given, the input and output of each stage of this rank are added to it, as meta tensors.
        Every rank runs its stages in ascending order, so there is no deadlock.
        """
        own_rank, last = self.mesh.rank("pp"), len(self.rank_of_stage) - 1
        x = inputs
        for stage, module in self.stages.items():
            # In a V-schedule, the last rank holds two consecutive stages, and receives nothing
            # between them.
            if stage and self.rank_of_stage[stage - 1] != own_rank:
                x = self._receive(self.rank_of_stage[stage - 1])
            output = module(x)
            assert isinstance(output, Tensor), "a stage must return one tensor"
            if shapes is not None:
                shapes[stage] = _like_on_meta(x), _like_on_meta(output)
            x = output
            if stage != last and self.rank_of_stage[stage + 1] != own_rank:
                self._send(x.contiguous(), self.rank_of_stage[stage + 1])
        # Free the gathered parameters, because they would be outdated after the next optimizer
        # step.
        for part in [part for module in self.stages.values() for part in module.modules()]:
            if isinstance(part, FSDPModule):
                part.reshard()
        return x if self.holds_last else None

    def _send(self, x: Tensor, target: int) -> None:
        """Send a header (dtype and shape) and the tensor."""
        header = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
        header += [0] * (2 + _MAX_DIMS - len(header))
        group, device = self.mesh.group("pp"), self.world.device
        send(torch.tensor(header, dtype=torch.int64, device=device), target, group=group)
        send(x, target, group=group)

    def _receive(self, source: int) -> Tensor:
        group, device = self.mesh.group("pp"), self.world.device
        header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=device)
        recv(header, source, group=group)
        dtype, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
        recv(x, source, group=group)
        return x


def _like_on_meta(x: Tensor) -> Tensor:
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return like.requires_grad_(x.is_floating_point())


def _contiguous(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.contiguous()  # only contiguous tensors can be sent
