"""The engine of layouts with pp: a step's microbatches are the pipeline's.

The schedule runs the same way in every step: M microbatches of one fixed size. At the ragged end
of an epoch they are filled up, with copies of a real input and targets of -100: these add nothing
to the loss, nor to any gradient, nor to the statistics of norms (filling.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tutti.parallel.engine import Engine, Objective, Pair, _unnoticed
from tutti.parallel.grid import Grid
from tutti.parallel.options import ParallelOptions, ScheduleName
from tutti.parallel.pieces import whole
from tutti.parallel.pipeline.chain import Chain
from tutti.parallel.pipeline.filling import Filling
from tutti.parallel.pipeline.schedule import (
    SPLIT_BACKWARD,
    Schedule,
    Stage,
    build_schedule,
    check_microbatches,
    rank_of,
    refuse_compiled,
)
from tutti.parallel.pipeline.tied import Tie, Ties
from tutti.parallel.tensor import place_gradients
from tutti.world.errors import UsageError

_IGNORED = -100  # the target that no loss is due for; cross_entropy's own default


class Pipeline(Engine):
    """Runs this rank's stages by torch's schedule."""

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, nn.Module],
        plan: Sequence[Sequence[str]],
        grid: Grid,
        options: ParallelOptions,
        microbatches: int,
        filling: Filling,
        ties: Sequence[Tie] = (),
    ) -> None:
        """`model` has the layers of all of this rank's `stages`; `plan` is every stage's layers."""
        super().__init__(model, grid.world, grid)
        self.options = options
        self.stages = dict(stages)
        self.plan = [list(names) for names in plan]
        self.microbatches = microbatches
        self.microbatch_size = filling.size
        self.filling = filling
        pp = grid.layout.pp
        check_microbatches(options.pipeline_schedule, pp, microbatches)
        self.holders = [rank_of(options.pipeline_schedule, stage, pp) for stage in range(len(plan))]
        self.chain = Chain(self.stages, self.holders, grid.group("pp"), self.world.device)
        # NCCL sets a group up at its first call, which all its ranks must make; later calls are
        # between two of them, while others may be waiting for what comes of it.
        dist.all_reduce(torch.zeros(1, device=self.world.device), group=grid.group("pp"))
        self.ties = Ties(list(ties), self.holders, self.stages, grid)
        self.ties.share_values(model)
        for stage, module in self.stages.items():
            if not self._is_last(stage):
                module.register_forward_hook(_contiguous)
            if options.pipeline_schedule in SPLIT_BACKWARD:
                _prepare_split_backward(module, options.pipeline_schedule)
        self.schedule: Schedule | None = None
        self.pieces: list[Stage] = []
        """This rank's stages as torch has them, once the first step has built them."""
        self._objective: Objective | None = None
        self._parts: list[torch.Tensor] = []

    @property
    def description(self) -> str:
        names = [each[0] if len(each) == 1 else f"{each[0]}–{each[-1]}" for each in self.plan]
        return (
            f"pipeline: {self.grid.layout}, schedule {self.options.pipeline_schedule}, "
            f"{self.microbatches} microbatches of {self.microbatch_size}, "
            f"{len(names)} stages: {' | '.join(names)}"
        )

    @property
    def aliases(self) -> dict[str, str]:
        """Copies of tied parameters: name on this rank → the name under which it counts."""
        return self.ties.aliases

    @property
    def holds_last(self) -> bool:
        """Whether this rank has the model's end: its outputs and losses."""
        return len(self.plan) - 1 in self.stages

    @property
    def speaks(self) -> bool:
        return self.holds_last and super().speaks

    def run(self, microbatches: Sequence[Pair], objective: Objective) -> torch.Tensor:
        inputs, targets = self._fill_up(microbatches, objective)
        self.filling.step([len(each) for each, _ in microbatches], self.microbatches)
        self._follow_mode()
        if self.schedule is None:
            self.schedule = self._build(inputs[: self.microbatch_size])
        self._objective, self._parts = objective, []
        arguments = (inputs,) if 0 in self.stages else ()
        self.schedule.step(
            *arguments, target=targets if self.holds_last else None, return_outputs=False
        )
        self._objective = None
        self.reduce()
        return torch.stack(self._parts).sum() if self.speaks else self.no_loss()

    @torch.no_grad()
    def infer(self, inputs: torch.Tensor, example: torch.Tensor | None = None) -> Any:
        given = inputs if len(inputs) else example
        assert given is not None, "a rank without inputs needs an example"
        self._follow_mode()
        outputs = self.chain(given)
        self._reshard()
        return whole(outputs) if len(inputs) else None

    def __call__(self, *inputs: Any) -> Any:
        raise UsageError("a pipeline has no forward of its own on a rank: use run() or infer()")

    def reduce(self) -> None:
        """FSDP has summed over the data ranks; what is left are the copies of tied parameters."""
        place_gradients(self.model)
        self.ties.sum_gradients(self.model)

    def idle_microbatch(self, *inputs: Any, last: bool) -> None:
        raise UsageError("a pipeline fills microbatches up by itself: give run() empty ones")

    def _build(self, inputs: torch.Tensor) -> Schedule:
        """torch's stages and schedule, with the shapes that one microbatch has between them.

        torch could find the shapes out by itself; it would run the model on memory as it happens
        to be, and the running statistics of norms would not forget it.
        """
        shapes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def see(stage: int, given: torch.Tensor, output: torch.Tensor) -> None:
            shapes[stage] = _ghost(given), _ghost(output)

        with _unnoticed(self.model, self.world):
            self.chain(inputs, see)
        self._reshard()
        group = self.grid.group("pp")
        self.pieces = [
            Stage(
                module,
                stage,
                len(self.plan),
                self.world.device,
                *shapes[stage],
                group=group,
                around=self.filling.microbatch,
            )
            for stage, module in self.stages.items()
        ]
        return build_schedule(
            self.options.pipeline_schedule, self.pieces, self.microbatches, self._loss
        )

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # The schedule is built once, the objective is new in every step.
        assert self._objective is not None
        part = self._objective.of_outputs(outputs, targets)
        self._parts.append(part.detach())
        return self._objective.scale(part)

    def _fill_up(self, microbatches: Sequence[Pair], objective: Objective) -> Pair:
        """All microbatches in one, as a schedule takes them, each filled up to the fixed size."""
        missing = self.microbatches - len(microbatches)
        if missing < 0:
            raise UsageError(
                f"a step of {len(microbatches)} microbatches does not fit a pipeline that was "
                f"built for {self.microbatches}: use --accumulation {len(microbatches)}"
            )
        filled = [self._fill(pair, objective) for pair in microbatches]
        if missing:
            empty = (microbatches[0][0][:0], microbatches[0][1][:0])
            filled += [self._fill(empty, objective)] * missing
        return torch.cat([pair[0] for pair in filled]), torch.cat([pair[1] for pair in filled])

    def _fill(self, pair: Pair, objective: Objective) -> Pair:
        inputs, targets = pair
        missing = self.microbatch_size - len(inputs)
        if missing == 0:
            return pair
        if missing < 0:
            raise UsageError(
                f"a microbatch of {len(inputs)} samples does not fit a pipeline that was built "
                f"for {self.microbatch_size}"
            )
        real = inputs if len(inputs) else objective.example
        assert real is not None, "a rank without samples needs an example"
        copies = real[:1].expand(missing, *real.shape[1:])
        ignored = targets.new_full((missing, *targets.shape[1:]), _IGNORED)
        return torch.cat([inputs, copies]), torch.cat([targets, ignored])

    def _follow_mode(self) -> None:
        """Views are modules of their own: `model.eval()` reaches their layers, but not them."""
        for module in self.stages.values():
            module.training = self.model.training

    def _reshard(self) -> None:
        """After a forward without backward: FSDP would keep some parameters gathered, and stale."""
        for module in self.stages.values():
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.plan) - 1


def _prepare_split_backward(module: nn.Module, schedule: ScheduleName) -> None:
    """torch looks for the weights' gradients in the graph that forward has left behind.

    It would not find the weights there if FSDP had put its shards in their place meanwhile.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_reshard_after_forward(False, recurse=False)
        if each._compiled_call_impl is not None:  # set by Module.compile(): the caller's own
            refuse_compiled(schedule)


def _ghost(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one without memory."""
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=tensor.is_floating_point(),
    )


def _contiguous(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.contiguous()  # what is sent must be; itself where it is
