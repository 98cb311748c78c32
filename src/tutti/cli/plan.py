"""tutti plan: predicts the memory and the step time of every layout before a run."""

import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tutti.cli.flags import InputFile, InputFolder, OutputFile, flag_value, parse, split_own_flags
from tutti.cli.results import write_json, write_result
from tutti.cli.train import PLANNED_FLAGS, Train, read_flags
from tutti.measure.terminal import console, text_width, wrap_line
from tutti.measure.units import format_bytes, format_seconds
from tutti.plan.cluster_spec import (
    Cluster,
    cluster_row,
    named_cluster,
    read_cluster,
    read_machine_cluster,
    sizes_between,
)
from tutti.plan.job_check import as_planned, check_planned
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.plan.planned_job import PlannedJob
    from tutti.plan.search import Plan, Planned
    from tutti.plan.step_simulation import Calibration


_MAX_GPUS = 1 << 20


@dataclass(frozen=True)
class PlanFlags:
    """Predict memory and time of every layout: tutti plan --recipe gpt --gpus 16xH100

        tutti plan --recipe gpt --layers 32 --dim 4096 --heads 32 --gpus 8..512xH100
        tutti plan --model my.module:model --batch-shape 3x224x224 --gpus 8xA100
        tutti plan --model hf:FOLDER --seq-len 2048 --gpus 2xH200 --global-batch 64
        tutti plan --from runs/mine

    The model is traced with meta tensors, so no GPU is needed. All flags of tutti train describe
    the job. If --layout, --batch, --accumulation, --checkpoint-activations, --pipeline-schedule or
    --bucket-mb is given, the search keeps its value.
    """

    USAGE_END = "[flags of tutti train]"
    gpus: str | None = None
    """Number and name of the GPUs, such as `16xH100`, or a range such as `8..512xH100`, which
    prints one line for each number of GPUs. `4xcpu` means 4 CPU ranks on this host. With --machine
    or --cluster, the value is only a number or a range."""
    per_node: int | None = None
    """Number of GPUs per node (default: 8, or all GPUs if there are fewer than 8)."""
    machine: InputFile | None = None
    """Plan for the machine in this file, which tutti topo --record wrote."""
    cluster: InputFile | None = None
    """Plan for the cluster in this TOML file. It can have the keys `gpus`, `per_node`, `memory_gb`,
    `intra_gbs`, `inter_gbs`, `price_per_gpu_hour` and `watts`. See the page "Plan before a run" of
    the documentation."""
    batch_shape: str | None = None
    """Shape and dtype of one input sample for --model package.module:function, such as `3x224x224`
    or `1024:int64`. Needed if --dataset is not given."""
    calibration: InputFile | None = None
    """Use the rates in this file, which tutti plan --calibrate measured on the same accelerator."""
    calibrate: OutputFile | None = None
    """Do not plan. Instead, measure the rates (FLOP/s and bytes/s) of matrix products, attention,
    memory and collectives on this machine, which takes less than a minute, and write them to this
    file. With --gpus 4xcpu, 4 CPU ranks measure at the same time."""
    from_run: Annotated[InputFolder | None, tyro.conf.arg(name="from")] = None
    """Run directory. Compare the prediction with the measured memory and time of this run."""
    top: int = 10
    """Number of layouts to print."""
    timeline: OutputFile | None = None
    """Write the predicted timeline of the best layout as a trace for Perfetto."""
    json: OutputFile | None = None
    """Also write the results to this JSON file."""


def main(arguments: list[str]) -> int:
    own, train_flags = split_own_flags(PlanFlags, arguments)
    options = parse(PlanFlags, "tutti plan", own)
    if options.top < 1:
        raise UsageError(f"--top must be at least 1, got {options.top}")
    if options.calibrate is not None:
        _refuse_others(options, "--calibrate", ("calibrate", "gpus"))
        return _calibrate(options, train_flags)
    if options.from_run is not None:
        if train_flags:
            raise UsageError(f"--from RUN reads the job from the run. Omit {train_flags[0]}.")
        cluster_flags = ("gpus", "per_node", "machine", "cluster")
        _refuse_others(options, "--from", ("from_run", "calibration", "json", *cluster_flags))
        return _compare(options)
    if not any(flag.partition("=")[0] in ("--recipe", "--model") for flag in train_flags):
        raise UsageError("there is no model to plan. Add --recipe NAME or --model NAME.")
    clusters = _clusters(options)
    auto = flag_value("--layout", train_flags) == "auto"
    settings = read_flags(_without_auto(train_flags) if auto else train_flags, "tutti plan")[0]
    _check_flags(settings, train_flags)
    given = tuple(flag for flag in PLANNED_FLAGS if flag_value(flag, train_flags) is not None)
    dataset = flag_value("--dataset", train_flags)
    if dataset is not None and options.batch_shape is not None:
        raise UsageError("--batch-shape has no effect with --dataset. Omit one of them.")
    recipe = as_planned(settings.settings, dataset is not None)
    check_planned(recipe, clusters, options.batch_shape, given)
    calibration = _read_calibration(options, clusters[0])
    from tutti.plan.planned_job import PlannedJob, knee

    kind = "cpu" if clusters[0].is_cpu else "cuda"
    job = PlannedJob.of(recipe, kind, options.batch_shape, given, calibration)
    plans: list[Plan] = []
    for cluster in clusters:
        if len(clusters) > 1 and sys.stderr.isatty():
            print(f"planning {cluster.gpus} GPUs", file=sys.stderr, flush=True)
        plans.append(job.plan(cluster))
    if len(plans) == 1:
        _print_plan(plans[0], job, options.top)
    else:
        _print_curve(plans, job)
    chosen = _best_plan(plans)
    results = _results(chosen, job)
    if len(plans) > 1:
        results["curve"] = [_curve_row(plan) for plan in plans]
        results["knee"] = knee(_speeds(plans))
    if options.json is not None:
        write_json(options.json, "tutti.plan/1", results)
    if options.timeline is not None:
        _write_timeline(options.timeline, chosen)
    return 0 if any(plan.best for plan in plans) else 1


def _refuse_others(options: PlanFlags, mode: str, used: tuple[str, ...]) -> None:
    """Refuse flags that have no effect with --calibrate or --from."""
    for field in fields(options):
        if field.name not in used and getattr(options, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}".replace("--from-run", "--from")
            raise UsageError(f"{flag} has no effect with {mode}. Omit one of them.")


def _check_flags(settings: Train, flags: list[str]) -> None:
    """Refuse flags of tutti train that say how to run a job, because a plan runs nothing."""
    for field in fields(settings):
        flag = f"--{field.name.replace('_', '-')}"
        names = (flag, "-n") if flag == "--ranks" else (flag,)
        given = any(each.partition("=")[0].replace("_", "-") in names for each in flags)
        if given and flag not in ("--recipe", "--settings"):
            cure = "use --gpus" if flag in ("--ranks", "--device") else f"omit {flag}"
            raise UsageError(f"{flag} has no effect in a plan: {cure}")


def _without_auto(flags: list[str]) -> list[str]:
    position = flags.index("--layout") if "--layout" in flags else None
    if position is not None:
        return flags[:position] + flags[position + 2 :]
    return [flag for flag in flags if flag != "--layout=auto"]


def _read_calibration(options: PlanFlags, cluster: Cluster) -> "Calibration | None":
    if options.calibration is None:
        return None
    from tutti.plan.calibration_file import read_calibration  # imports numpy

    calibration, warnings = read_calibration(options.calibration, cluster)
    for text in warnings:
        print(f"tutti plan: {text}", file=sys.stderr)
    return calibration


def _calibrate(options: PlanFlags, others: list[str]) -> int:
    if others:
        raise UsageError(f"--calibrate measures the machine and plans no job. Omit {others[0]}.")
    first, _, name = (None, None, None) if options.gpus is None else _numbers(options)
    device = "cpu" if name is not None and name.lower() == "cpu" else "auto"
    from tutti.plan.calibrate import calibrate
    from tutti.world.spawn import RankFailed

    assert options.calibrate is not None
    try:
        calibration = calibrate(options.calibrate, ranks=first, device=device)
    except RankFailed as error:
        summary = str(error).partition("\n")[0]  # a traceback follows
        print(f"tutti plan: --calibrate: {summary}", file=sys.stderr)
        return 1
    print(f"the rates of {calibration.device} are in {options.calibrate}. To use them:")
    print(f"  tutti plan --calibration {options.calibrate} …")
    return 0


# -- clusters --------------------------------------------------------------------------------------


def _clusters(options: PlanFlags) -> list[Cluster]:
    """Return the clusters to plan for: one cluster, or one for each number of GPUs in a range."""
    if options.machine is not None and options.cluster is not None:
        raise UsageError("--machine and --cluster both describe the cluster. Omit one of them.")
    if options.machine is None and options.cluster is None and options.gpus is None:
        raise UsageError(
            "the GPUs are not known. Add --gpus (such as 16xH100), --machine FILE or --cluster "
            "FILE."
        )
    first, last, name = _numbers(options)
    sizes = [] if first is None else sizes_between(first, last or first)
    largest = sizes[-1] if sizes else None  # determines the number of GPUs per node
    if options.machine is not None:
        cluster = read_machine_cluster(options.machine, largest)
        if options.per_node is not None:
            cluster = replace(cluster, per_node=options.per_node)
    elif options.cluster is not None:
        cluster = read_cluster(options.cluster, options.per_node)
    else:
        assert largest is not None and name is not None
        cluster = named_cluster(name, largest, options.per_node)
    return [cluster.with_gpus(gpus) for gpus in sizes or [cluster.gpus]]


def _numbers(options: PlanFlags) -> tuple[int | None, int | None, str | None]:
    """Return (first, last, name) of --gpus. `last` is None unless --gpus is a range."""
    if options.gpus is None:
        return None, None, None
    text = options.gpus.strip()
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?(?:\s*[xX×*]\s*(\S+))?", text)
    named = options.machine is None and options.cluster is None
    if match is None or (named and match[3] is None):
        raise UsageError(
            f"--gpus {text!r} must be a number and a name, such as 16xH100 or 8..512xH100"
        )
    if not named and match[3] is not None:
        flag = "--machine" if options.machine is not None else "--cluster"
        raise UsageError(f"--gpus {text}: {flag} already names the GPUs. Use --gpus {match[1]}.")
    first, last = int(match[1]), None if match[2] is None else int(match[2])
    if first < 1 or (last is not None and last < first):
        raise UsageError(f"--gpus {text}: the range must start at 1 or more and must ascend")
    if max(first, last or 1) > _MAX_GPUS:
        raise UsageError(f"--gpus {text}: use at most {_MAX_GPUS} GPUs")
    return first, last, match[3]


# -- output ----------------------------------------------------------------------------------------


def _print_plan(plan: "Plan", job: "PlannedJob", top: int) -> None:
    from rich.table import Table

    from tutti.plan.planned_job import describe_model
    from tutti.plan.search import NULL_UTILISATION

    print(describe_model(plan, job.recipe))
    print(_describe_cluster(plan.cluster))
    fitting = [each for each in plan.layouts if each.fits]
    table = Table()
    for title in ("layout", "batch × acc.", "recompute", "memory", "step", "80 % band", "MFU"):
        table.add_column(title, justify="left" if title == "layout" else "right")
    table.add_column("exposed comm")
    table.add_column("bubble")
    for each in fitting[:top]:
        table.add_row(*_cells(each))
    if fitting:
        console().print(table)
    print(
        f"{plan.searched} combinations of layout, microbatch, recomputation and schedule; "
        f"{len(fitting)} layouts fit, {len(plan.layouts) - len(fitting)} do not fit, "
        f"{len(plan.refused)} cannot run this job"
    )
    # If no layout fits, the advice names the reason.
    for each in [each for each in plan.layouts if not each.fits][: 3 if fitting else 0]:
        _print_wrapped(f"{each.candidate.layout} does not fit: {each.reason}")
    if plan.advice:
        _print_wrapped(plan.advice)
    best = plan.best
    if best is None or best.step is None:
        return
    print()
    _print_wrapped(f"best: tutti train {' '.join(best.candidate.flags())}")
    _print_memory(best)
    ratio = plan.null_step_s / best.step.step_s
    _print_wrapped(
        f"for comparison, a null model, which assumes {100 * NULL_UTILISATION:.0f} % of the peak "
        f"FLOP/s in every layout, predicts {format_seconds(plan.null_step_s)} per step: "
        f"{ratio:.2f} × this prediction"
    )
    _print_placement(plan, best, job)
    _print_costs(plan, best)
    from tutti.plan.planned_job import assumptions

    for text in assumptions(plan)[:6]:
        _print_wrapped(f"assumption: {text}")


def _cells(planned: "Planned") -> list[str]:
    candidate, step = planned.candidate, planned.step
    assert step is not None
    name = str(candidate.layout)
    if candidate.layout.pp > 1:
        name += f" {candidate.options.schedule}"
    band = "" if not step.band[1] else " – ".join(format_seconds(each) for each in step.band)
    share = {key: f"{100 * value / step.step_s:.0f} %" for key, value in step.parts.items()}
    return [
        name,
        f"{candidate.microbatch} × {candidate.options.accumulation}",
        candidate.options.recompute,
        format_bytes(planned.memory.total),
        format_seconds(step.step_s),
        band,
        f"{100 * step.mfu:.1f} %",
        share["exposed_comm"],
        share["bubble"],
    ]


def _print_memory(planned: "Planned") -> None:
    row = planned.memory.row()
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "overhead")
    text = ", ".join(f"{name} {format_bytes(row[name])}" for name in parts)
    rank = planned.memory.pipeline_rank
    where = f" on pipeline rank {rank}" if planned.candidate.layout.pp > 1 else ""
    _print_wrapped(
        f"peak memory{where}, in the {planned.memory.moment}: {format_bytes(row['total'])} = {text}"
    )


def _print_placement(plan: "Plan", best: "Planned", job: "PlannedJob") -> None:
    from tutti.plan.search import placements

    if plan.cluster.nodes == 1:
        return
    rows = placements(job.tracer.workload, plan.cluster, best, job.calibration)
    first, others = rows[0], rows[1:]
    text = " > ".join(first["order"])
    _print_wrapped(
        f"order of the mesh axes, outermost first: {text}. In a step, each rank sends "
        f"{format_bytes(first['intra_bytes'])} inside its node and "
        f"{format_bytes(first['inter_bytes'])} to other nodes."
    )
    if others:
        worst = max(others, key=lambda row: float(row["inter_bytes"]))
        _print_wrapped(
            f"with the order {' > '.join(worst['order'])}, each rank would send "
            f"{format_bytes(worst['inter_bytes'])} to other nodes"
        )


def _print_costs(plan: "Plan", best: "Planned") -> None:
    from tutti.plan.planned_job import costs

    found = costs(plan, best)
    noun = "tokens" if plan.job.tokens_per_sample else "samples"
    text = f"cost of 10⁹ {noun}: {found['gpu_hours_per_1e9']:.4g} GPU hours"
    if found["price_per_1e9"] is not None:
        text += f", price {found['price_per_1e9']:.4g}"
    if found["kwh_per_1e9"] is not None:
        text += f", {found['kwh_per_1e9']:.4g} kWh, {found['per_joule']:.3g} {noun} per joule"
    _print_wrapped(text)


def _print_wrapped(text: str) -> None:
    for line in wrap_line(text, text_width(), indent="  "):
        print(line)


def _describe_cluster(cluster: Cluster) -> str:
    if cluster.is_cpu:
        return f"{cluster.gpus} ranks on a CPU, {format_bytes(cluster.memory_bytes)} each"
    text = f"{cluster.gpus} × {cluster.accelerator}, {format_bytes(cluster.memory_bytes)} each"
    if cluster.nodes > 1:
        text += f", {cluster.nodes} nodes of {cluster.per_node}"
    return text


def _print_curve(plans: list["Plan"], job: "PlannedJob") -> None:
    from rich.table import Table

    from tutti.plan.planned_job import costs, describe_model, knee

    print(describe_model(plans[-1], job.recipe))
    table = Table()
    for title in ("GPUs", "best layout", "step", "samples/s", "efficiency", "GPU hours / 10⁹"):
        table.add_column(title, justify="left" if title == "best layout" else "right")
    base = next(iter(_speeds(plans)), None)
    for plan in plans:
        best = plan.best
        if best is None or best.step is None or base is None:
            table.add_row(str(plan.cluster.gpus), "does not fit", "", "", "", "")
            continue
        speed = plan.job.global_batch / best.step.step_s
        efficiency = speed / plan.cluster.gpus / (base[1] / base[0])
        table.add_row(
            str(plan.cluster.gpus),
            f"{best.candidate.layout}, {best.candidate.microbatch} × "
            f"{best.candidate.options.accumulation}, recompute {best.candidate.options.recompute}",
            format_seconds(best.step.step_s),
            f"{speed:.4g}",
            f"{100 * efficiency:.0f} %",
            f"{costs(plan, best)['gpu_hours_per_1e9']:.4g}",
        )
    console().print(table)
    found = knee(_speeds(plans))
    if found is None:
        _print_wrapped(plans[-1].advice)
        return
    print(f"knee: {found} GPUs. Twice this number would give less than 1.6 × the speed.")


def _speeds(plans: list["Plan"]) -> list[tuple[int, float]]:
    return [
        (plan.cluster.gpus, plan.job.global_batch / plan.best.step.step_s)
        for plan in plans
        if plan.best is not None and plan.best.step is not None
    ]


def _best_plan(plans: list["Plan"]) -> "Plan":
    return next((plan for plan in reversed(plans) if plan.best is not None), plans[-1])


def _curve_row(plan: "Plan") -> dict[str, Any]:
    from tutti.plan.planned_job import costs, row_of

    best = plan.best
    found = {} if best is None else {**row_of(plan, best), **costs(plan, best)}
    return {"gpus": plan.cluster.gpus, "fits": best is not None, **found}


def _results(plan: "Plan", job: "PlannedJob") -> dict[str, Any]:
    from tutti.plan.planned_job import assumptions, costs, row_of
    from tutti.plan.search import NULL_UTILISATION, placements

    best = plan.best
    return {
        "cluster": cluster_row(plan.cluster),
        "model": {
            "name": job.recipe.model,
            "parameters": plan.workload.parameters,
            "flops_per_sample": plan.workload.model_flops,
            "precision": job.recipe.compute.precision,
        },
        "global_batch": plan.job.global_batch,
        "tokens_per_sample": plan.job.tokens_per_sample,
        "layouts": [row_of(plan, each) for each in plan.layouts],
        "searched": plan.searched,
        "refused": [{"layout": name, "reason": reason} for name, reason in plan.refused],
        "advice": plan.advice or None,
        "null_model": {"utilisation": NULL_UTILISATION, "step_s": plan.null_step_s},
        "assumptions": assumptions(plan),
        "placement": []
        if best is None
        else placements(job.tracer.workload, plan.cluster, best, job.calibration),
        "costs": None if best is None else costs(plan, best),
    }


def _write_timeline(path: Path, plan: "Plan") -> None:
    from tutti.plan.step_simulation import trace_events

    if plan.best is None or plan.best.step is None:
        raise UsageError("--timeline cannot be written, because no layout fits")
    write_result("--timeline", path, trace_events(plan.best.step))


# -- --from ----------------------------------------------------------------------------------------


def _compare(options: PlanFlags) -> int:
    from tutti.plan.compare_run import compare_run, read_run

    assert options.from_run is not None
    named = options.gpus or options.machine or options.cluster
    cluster = _clusters(options)[0] if named else read_run(options.from_run).cluster()
    calibration = _read_calibration(options, cluster)
    result = compare_run(options.from_run, cluster, calibration)
    from rich.table import Table

    table = Table(title=result["title"])
    for title in ("term", "predicted", "measured", "error"):
        table.add_column(title, justify="left" if title == "term" else "right")
    for row in result["rows"]:
        show = format_seconds if row["unit"] == "s" else format_bytes
        measured = row["measured"]
        error = row["error"]
        table.add_row(
            row["term"],
            show(row["predicted"]),
            "not recorded" if measured is None else show(measured),
            "" if error is None else f"{100 * error:+.1f} %",
        )
    console().print(table)
    for text in result["verdicts"]:
        _print_wrapped(text)
    if options.json is not None:
        write_json(options.json, "tutti.plan_comparison/1", result)
    return 0
