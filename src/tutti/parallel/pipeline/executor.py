"""The engine of layouts with pp: runs the microbatches of a step through the pipeline.

Every step has the same schedule: M microbatches of one fixed size. At the end of an epoch,
microbatches are padded with copies of a real input and with targets of -100. The padding adds
nothing to the loss, to any gradient, or to the statistics of norms (`Padding`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
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
from tutti.parallel.pipeline.stages import Stages
from tutti.parallel.pipeline.tied_weights import TiedWeights
from tutti.parallel.tensor import place_gradients
from tutti.world.errors import UsageError

_IGNORED = -100  # a target that adds no loss: the default ignore_index of cross_entropy
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
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
        super().__init__(model, mesh.world, mesh)
        self.options = options
        self.stages = stages.modules
        self.stage_layers = stages.layers
        self.microbatches = microbatches
        self.padding = stages.padding
        self.microbatch_size = stages.padding.size
        count, pp = len(stages.layers), mesh.layout.pp
        self.holders = [rank_of(options.pipeline_schedule, stage, pp) for stage in range(count)]
        # NCCL creates the communicator of a group in the group's first collective, in which all
        # ranks of the group must take part. This all_reduce is that collective, because all later
        # operations are sends and receives between two ranks.
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
        """This rank's stages as torch PipelineStage objects, created in the first step."""
        self._loss_fn: LossFunction | None = None  # of the current step
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
        scale: Callable[[Tensor], Tensor] = unscaled,
        clock: StepClock | None = None,
    ) -> Tensor:
        inputs, targets = self._padded(microbatches, example)
        self.padding.begin_step([len(each) for each, _ in microbatches], self.microbatches)
        self._copy_training_mode()
        if self.schedule is None:
            self.schedule = self._build_schedule(inputs[: self.microbatch_size])
        # torch gets its loss function when the schedule is built. But the loss function of a step
        # divides by the number of samples in the step, so it differs between steps. Therefore torch
        # gets the method _loss, which calls the loss function of the current step.
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
        batch = inputs if len(inputs) else example
        assert batch is not None, "a rank without inputs needs an example"
        self._copy_training_mode()
        outputs = self._run_stages(batch)
        self._reshard()
        return gathered(outputs) if len(inputs) else None

    def __call__(self, *inputs: Any) -> Any:
        raise UsageError("a pipeline has no forward on a single rank: use run() or infer()")

    def reduce(self) -> None:
        """Sum the gradients of tied parameters; FSDP has already summed over the data ranks."""
        place_gradients(self.model)
        self.tied.sum_gradients(self.model)

    def empty_microbatch(self, *inputs: Any, last: bool) -> None:
        raise UsageError("a pipeline pads microbatches itself: give run() empty ones")

    def _build_schedule(self, inputs: Tensor) -> Schedule:
        """Create torch's stages and schedule.

        One microbatch runs through the pipeline to find the shapes between stages. If torch
        inferred the shapes, it would run the model on uninitialised memory, which would change the
        running statistics of norms.
        """
        shapes: dict[int, tuple[Tensor, Tensor]] = {}
        with without_side_effects(self.model, self.world):
            self._run_stages(inputs, shapes)
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
        """All microbatches in one tensor, as torch's schedules require, padded to a fixed size."""
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
        """Copy the training mode of the model to the stages.

        A stage may be a view of the model, and `model.eval()` does not change the mode of the view.
        """
        for module in self.stages.values():
            module.training = self.model.training

    def _reshard(self) -> None:
        """Free the parameters that FSDP keeps gathered after a forward without a backward.

        The gathered values would be outdated after the next optimizer step.
        """
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @torch.no_grad()
    def _run_stages(
        self, inputs: Tensor, shapes: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> Tensor | None:
        """Run forward of one batch of any size: stage 0 → send → stage 1 → … → last stage.

        Returns the outputs on the rank of the last stage, and None on other ranks. If `shapes` is
        given, stores the input and output of each stage of this rank in it, as meta tensors. Every
        rank runs its stages in ascending order, so no two ranks wait for each other.
        """
        here = self.mesh.rank("pp")
        x = inputs
        for stage, module in self.stages.items():
            # In a V-schedule, the last rank holds two consecutive stages: nothing is received.
            if stage and self.holders[stage - 1] != here:
                x = self._receive(self.holders[stage - 1])
            output = module(x)
            assert isinstance(output, Tensor), "a stage returns one tensor"
            if shapes is not None:
                shapes[stage] = _like_on_meta(x), _like_on_meta(output)
            x = output
            if stage + 1 == len(self.holders):
                return x
            if self.holders[stage + 1] != here:
                self._send(x.contiguous(), self.holders[stage + 1])
        return None

    def _send(self, x: Tensor, target: int) -> None:
        """Send a header (dtype and shape) and the tensor."""
        header = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
        header += [0] * (2 + _MAX_DIMS - len(header))
        header_tensor = torch.tensor(header, dtype=torch.int64, device=self.world.device)
        send(header_tensor, target, group=self.mesh.group("pp"))
        send(x, target, group=self.mesh.group("pp"))

    def _receive(self, source: int) -> Tensor:
        header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=self.world.device)
        recv(header, source, group=self.mesh.group("pp"))
        dtype, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self.world.device)
        recv(x, source, group=self.mesh.group("pp"))
        return x


def _prepare_split_backward(module: nn.Module, schedule: ScheduleName) -> None:
    """Prepare a stage whose backward computes gradients of inputs and of weights separately.

    torch searches the weights in the autograd graph of forward. It would not find them if FSDP
    replaced the weights by their shards before backward.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_reshard_after_forward(False, recurse=False)
        if each._compiled_call_impl is not None:  # the caller used Module.compile()
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
