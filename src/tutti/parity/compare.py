"""Training under each layout, compared step by step with the single device, and the results table.

The check runs the code of `tutti train`. Every rank compares the full tensors of its parameters,
which detects ranks with different values of one parameter.
"""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti import comm
from tutti.comm.collectives import broadcast_coalesced
from tutti.data import evaluation_loader
from tutti.parallel.apply import build_engine
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import local_shard
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.parity import diagnosis, single_device
from tutti.parity.diagnosis import Difference, Scalar, StepDifference, worst
from tutti.parity.single_device import OptimizerName, Scales, StepRecord, Workload
from tutti.parity.tolerances import TOLERANCES
from tutti.train.init import agree, build_optimizer
from tutti.train.recipe import Compute, Optimization
from tutti.train.step import Step, as_model_dtype
from tutti.train.task import Task
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.exchange import check_same
from tutti.world.world import World

Row = dict[str, Any]

# full_tensor() warns that gathering over two mesh axes takes two steps. The parity check need not
# be fast, so the warning is disabled.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def make_engine(workload: Workload, layout: Layout, world: World) -> Engine:
    """Build the workload's model under a layout, as `tutti train` does."""
    options = workload.options
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    microbatches = workload.microbatches(layout)
    model = workload.make_model().to(world.device, dtype).train()
    return build_engine(
        model,
        world,
        replace(options.engine, sync_batchnorm=workload.batch_norms),
        replace(options.parallel, layout=str(layout)),
        example=as_model_dtype(workload.example(world.device), model),
        microbatches=microbatches,
        microbatch_size=workload.batch // layout.data_ranks // microbatches,
        recompute=workload.recompute,
    )


def train_under_layout(
    engine: Engine,
    workload: Workload,
    name: OptimizerName,
    scales: Scales,
    reference: Sequence[StepRecord],
) -> Iterator[StepDifference]:
    """Train with an engine. Yield the differences between each step and the reference.

    All ranks yield the same differences.
    """
    options, mesh, device = workload.options, engine.mesh, engine.world.device
    parameters = {  # a tied parameter is listed under the first of its names
        workload.aliases[name]: parameter
        for name, parameter in engine.model.named_parameters()
        if parameter.requires_grad
    }
    start = {n: _full(p) for n, p in parameters.items()}
    momentum, betas = single_device.MOMENTUM, single_device.BETAS
    optimization = Optimization(
        name, momentum=momentum, betas=betas, weight_decay=single_device.WEIGHT_DECAY
    )
    lr = scales.sgd_lr if name == "sgd" else scales.adamw_lr
    optimizer = build_optimizer(engine.model, optimization, lr)
    if name == "adamw":
        for group in optimizer.param_groups:
            group["eps"] = scales.eps
    recorder = _GradientRecorder(engine, optimizer, parameters)
    step = Step(
        engine,
        optimizer,
        Task(padded=workload.padded, model=str(options.model)),
        Compute(precision=options.precision),
        workload.example(device),
        workload.microbatches(mesh.layout),
        scales.clip,
    )
    ranks = mesh.layout.data_ranks
    loader = evaluation_loader(
        workload.samples, workload.batch // ranks, rank=mesh.data_rank, ranks=ranks, device=device
    )
    tolerance = TOLERANCES[options.precision]
    # AdamW divides a gradient by its size, so most updates are about equally large. Only gradients
    # near zero give much smaller updates, and their relative rounding error is large. Therefore the
    # error of every update is relative to the largest update of all parameters.
    update_floor = tolerance.floor if name == "sgd" else 1.0
    for record, batch in zip(reference, loader.stream(), strict=False):
        loss = comm.all_reduce(step(batch).detach().double())
        updates = {n: _full(p) - start[n] for n, p in parameters.items()}
        named = engine.model.named_buffers(remove_duplicate=False)
        buffers = {n: b for n, b in named if n in record.buffers}
        full_buffers = {n: _full(b) for n, b in buffers.items()}
        floating = [n for n, b in buffers.items() if b.is_floating_point()]
        factor = min(1.0, scales.clip / (record.norm + 1e-6))  # as clip_grad_norm_ defines it
        compared = {
            "gradients": _compare_all(recorder.gradients, record.gradients, tolerance.floor),
            "updates": _compare_all(updates, record.updates, update_floor),
            "buffers": _compare_all(
                full_buffers, record.buffers, tolerance.floor, floating, finite_only=False
            ),
            "clip_factor": recorder.clip_factor,
            "data_rank": mesh.data_rank,
        }
        all_ranks = comm.gather_json(compared)
        own_buffers = _own_buffers(engine, all_ranks, tolerance.buffer)
        # If clipping scaled the gradients down x times too much, its norm was x times too large.
        clip_factors = [f for rank in all_ranks if (f := rank["clip_factor"]) is not None]
        norms = [Scalar.between(factor / f if f else math.inf, 1.0) for f in clip_factors]
        merged = {
            kind: _merge(all_ranks, kind, getattr(record, kind))
            for kind in ("gradients", "updates", "buffers")
        }
        yield StepDifference(
            loss=Scalar.between(float(loss), record.loss),
            gradients=merged["gradients"],
            norm=max(norms, key=lambda norm: norm.error, default=Scalar(0.0, 1.0)),
            updates=merged["updates"],
            buffers=[diff for diff in merged["buffers"] if diff.name not in own_buffers],
            own_buffers=own_buffers,
        )
    loader.close()


class _GradientRecorder:
    """Records a step's gradients before clipping, and the factor by which they were clipped."""

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
    ) -> None:
        self.parameters = parameters
        self.gradients: dict[str, Tensor] = {}
        # Computed from the gradients of this rank's shards; None if all these gradients are zero.
        self.clip_factor: float | None = None
        self._before: dict[str, Tensor] = {}
        self._run = engine.run
        engine.run = self._run_and_record  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._record_clipping)

    def _run_and_record(self, *arguments: Any, **options: Any) -> Tensor:
        loss = self._run(*arguments, **options)
        self._before = {n: local_shard(_gradient(p)).clone() for n, p in self.parameters.items()}
        self.gradients = {n: _full(_gradient(p)) for n, p in self.parameters.items()}
        return loss

    def _record_clipping(self, *_: Any) -> None:
        """Compute the least-squares factor between the gradients before and after clipping."""
        products = squares = 0.0
        for name, parameter in self.parameters.items():
            before = self._before[name].double()
            products += float((before * local_shard(_gradient(parameter)).double()).sum())
            squares += float(before.square().sum())
        self.clip_factor = products / squares if squares else None


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _full(tensor: Tensor) -> Tensor:
    """Gather the full tensor. All ranks that hold a shard must call this function."""
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.double().clone()


def _compare_all(
    tensors: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    floor: float,
    floored: Collection[str] | None = None,
    *,
    finite_only: bool = True,
) -> list[Difference]:
    """Compare tensors by name.

    The error of a tensor is relative to the largest value of this tensor in the reference. For the
    tensors in `floored` (default: all), the divisor is at least `floor` × the largest value of all
    tensors in `floored`.
    """
    floored = reference.keys() if floored is None else floored
    values = (reference[name].nan_to_num(0.0, 0.0, 0.0) for name in floored)
    min_scale = floor * max((float(value.abs().max()) for value in values), default=0.0)
    return [
        diagnosis.compare_tensors(
            name,
            tensor,
            reference[name],
            min_scale if name in floored else 0.0,
            finite_only=finite_only,
        )
        for name, tensor in tensors.items()
    ]


def _own_buffers(engine: Engine, ranks: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """Return the buffers that depend on each data rank's own samples."""
    if engine.mesh.layout.data_ranks == 1:
        return []
    modules = engine.model.named_modules()
    synchronised = [name for name, module in modules if isinstance(module, JointBatchNorm)]
    # The parity check synchronises batch norms, so their buffers depend on all ranks' samples.
    batch_norms = {name for names in comm.gather_json(synchronised) for name in names}
    by_rank = [(rank["data_rank"], [Difference(*b) for b in rank["buffers"]]) for rank in ranks]
    own_buffers = diagnosis.buffers_of_own_samples(by_rank, tolerance)
    return [name for name in own_buffers if name.rpartition(".")[0] not in batch_norms]


def _merge(
    ranks: Sequence[Mapping[str, Any]], kind: str, reference: Mapping[str, Tensor]
) -> list[Difference]:
    """Return one difference per tensor. A tensor that no rank holds has an infinite error."""
    differences = diagnosis.merge_ranks(
        [Difference(*values) for values in rank[kind]] for rank in ranks
    )
    missing = reference.keys() - {diff.name for diff in differences}
    return differences + [Difference(name, math.inf) for name in sorted(missing)]


# -- all layouts -----------------------------------------------------------------------------------

_COMPARED = (  # keys of a row that are null if the layout could not be compared
    "loss_rel_err",
    "grad_rel_err",
    "norm_rel_err",
    "update_rel_err",
    "buffer_rel_err",
    "worst_parameter",
    "worst_role",
    "worst_buffer",
    "own_buffers",
    "diagnosis",
)


class Reference:
    """The records of the single device, which rank 0 computes and broadcasts for all layouts."""

    def __init__(self, workload: Workload, world: World) -> None:
        self.workload = workload
        self.world = world
        torch.backends.cudnn.allow_tf32 = False  # convolutions in float32 must not use TF32
        device = world.device

        def derive() -> dict[str, float] | None:
            if not world.is_first:
                return None
            try:
                return asdict(single_device.derive_scales(workload, device))
            except UsageError:
                raise
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise UsageError(
                    f"{workload.options.model or 'the model'} fails on one device in float64, the "
                    f"precision of the reference: {problem}. Make the model work in float64."
                ) from error

        self.scales = Scales(**comm.gather_json(agree(derive))[0])
        self._records: dict[tuple[OptimizerName, int, int], list[StepRecord]] = {}
        self.weights_differ: str | None = None  # a message if initial weights differ between ranks
        try:
            check_same(world, model=workload.make_model())
        except RanksDiffer as error:
            self.weights_differ = str(error)
        self._cause: str | None = None
        self._cause_is_known = False

    def cause(self) -> str | None:
        """Return why no layout can agree with one device, or None if the checks find no reason.

        Every rank runs the one-device checks. These checks compute several steps, so they run only
        after a layout has failed. All ranks must call this method.
        """
        if self.weights_differ is not None:
            return self.weights_differ
        if not self._cause_is_known:
            checks = single_device.OneDeviceChecks(self.workload, self.world.device)
            found = comm.gather_json([checks.cause(), checks.loss, checks.gradient_norm])
            self._cause = next((text for text, *_ in found if text is not None), None)
            self._cause = self._cause or diagnosis.differing_ranks([each[1:] for each in found])
            self._cause_is_known = True
        return self._cause

    def records(self, name: OptimizerName, layout: Layout) -> list[StepRecord]:
        """Return the records of all steps with this optimizer. All ranks must call this method."""
        key = name, 1, 1
        if self.workload.by_microbatch:
            key = name, layout.data_ranks, self.workload.microbatches(layout)
        if key not in self._records:
            self._records[key] = self._train(name, layout)
        return self._records[key]

    def _train(self, name: OptimizerName, layout: Layout) -> list[StepRecord]:
        workload, device = self.workload, self.world.device
        records: list[StepRecord] = []
        if self.world.is_first:
            records = list(
                single_device.train_single_device(workload, name, self.scales, layout, device)
            )
        scalars = comm.gather_json([(record.loss, record.norm) for record in records])[0]
        if not self.world.is_first:
            model = workload.make_model().to(device, torch.float64)
            trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
            for loss, norm in scalars:
                gradients, updates = (
                    {n: torch.empty_like(p) for n, p in trained.items()} for _ in range(2)
                )
                records.append(
                    StepRecord(loss, gradients, norm, updates, single_device.buffers_of(model))
                )
        for record in records:
            named = (record.gradients, record.updates, record.buffers)
            broadcast_coalesced([tensor for tensors in named for tensor in tensors.values()])
        return records


def check_layout(workload: Workload, layout: Layout, world: World, reference: Reference) -> Row:
    """Train under a layout and return its row. All ranks must call this function."""
    microbatches = workload.microbatches(layout)
    row: Row = {"layout": str(layout), "ranks": layout.size, "microbatches": microbatches}
    results: dict[OptimizerName, list[StepDifference]] = {}
    for name in single_device.OPTIMIZERS:
        try:
            engine = agree(lambda: make_engine(workload, layout, world))
        except UsageError as error:
            nothing = {**dict.fromkeys(_COMPARED), "error": None, "ok": None}
            return row | nothing | {"not_applicable": str(error)}
        records = reference.records(name, layout)
        trained = train_under_layout(engine, workload, name, reference.scales, records)
        results[name] = list(trained)
        row["engine"] = engine.description
    tolerance = TOLERANCES[workload.options.precision]
    setting = diagnosis.Setting(layout, microbatches, workload.counts, workload.roles)
    steps = [*results["sgd"], *results["adamw"]]
    gradient = worst([diff for step in steps for diff in step.gradients])
    buffers = [diff for step in steps for diff in step.buffers]
    buffer = worst(buffers) if buffers else None
    # SGD is diagnosed first, because its updates are proportional to the gradients.
    text = diagnosis.diagnose(results["sgd"], setting, tolerance)
    if text is None and (text := diagnosis.diagnose(results["adamw"], setting, tolerance)):
        text = f"with AdamW only: {text}"
    failed = text is not None or reference.weights_differ is not None
    if failed and (cause := reference.cause()) is not None:
        differences = text and text.replace(diagnosis.WITHOUT_KNOWN_CAUSE, "")
        text = "; ".join(filter(None, (cause.removesuffix("."), differences)))
    return row | {
        "loss_rel_err": max(step.loss.error for step in steps),
        "grad_rel_err": gradient.error,
        "norm_rel_err": max(step.norm.error for step in steps),
        "update_rel_err": {name: worst(diffs[-1].updates).error for name, diffs in results.items()},
        "buffer_rel_err": buffer.error if buffer else None,
        "worst_parameter": gradient.name,
        "worst_role": workload.roles.get(gradient.name),
        "worst_buffer": buffer.name if buffer else None,
        "own_buffers": sorted({name for step in steps for name in step.own_buffers}),
        "diagnosis": text,
        "error": None,
        "ok": text is None,
        "not_applicable": None,
    }


def crashed_row(workload: Workload, layout: Layout, error: str) -> Row:
    """Return the row of a layout whose ranks ended with an error."""
    size = {"ranks": layout.size, "microbatches": workload.microbatches(layout)}
    verdict = {"error": error, "ok": False, "not_applicable": None}
    return {"layout": str(layout), **size, **dict.fromkeys(_COMPARED), **verdict}


class ParityTable:
    """Prints a row for each layout as soon as the layout is compared, and why a layout failed."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._console = Console(highlight=False)
        self._width = max(6, *(len(str(layout)) for layout in layouts))

    def print_head(self, title: str) -> None:
        self._console.print(Text(title))
        columns = " ".join(
            f"{name:>5}" for name in ("loss", "grad", "norm", "sgd", "adamw", "stats")
        )
        self._print(f"{'layout':<{self._width}} {columns}         worst parameter")

    def add(self, row: Row) -> None:
        layout = f"{row['layout']:<{self._width}}"
        if row["not_applicable"]:
            self._print(f"{layout} not applicable: {row['not_applicable']}")
            return
        if row["error"]:
            self._print(f"{layout} ", ("FAILED", "red"), f": {row['error']}")
            return
        errors = [row[f"{name}_rel_err"] for name in ("loss", "grad", "norm")]
        errors += [*row["update_rel_err"].values(), row["buffer_rel_err"]]
        cells = " ".join("    -" if error is None else f"{error:5.0e}" for error in errors)
        verdict, color = ("ok", "green") if row["ok"] else ("FAILED", "red")
        name = row["worst_parameter"].removesuffix(".weight")
        self._print(f"{layout} {cells}  ", (f"{verdict:<6}", color), f" {name}")
        if row["diagnosis"]:
            text = row["diagnosis"]
            if row["worst_buffer"] is None or row["worst_buffer"] not in text:
                text += f" (worst: {row['worst_parameter']}, {row['worst_role']})"
            self._print((f"{row['layout']} FAILED: {text}", "red"))
        if row["own_buffers"]:
            first, *others = row["own_buffers"]
            more = f" and {len(others)} more" if others else ""
            self._print(
                f"{row['layout']} note: {first}{more} {'were' if others else 'was'} not compared, "
                "because the values depend on the samples of each data rank. Evaluation and "
                "checkpoints use the values of rank 0"
            )

    def _print(self, *parts: str | tuple[str, str]) -> None:
        # One line per row, for grep; a narrow terminal wraps the line itself.
        self._console.print(Text.assemble(*parts), soft_wrap=True)
