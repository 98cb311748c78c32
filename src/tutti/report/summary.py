"""The top of a report page: a summary in sentences, and tiles with large numbers."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

from tutti.measure.units import plural
from tutti.profile.step_breakdown import late_rank
from tutti.report.plot import NAMES, grouped
from tutti.report.sources import ReportSources, Result, Run, recorded

Rows = list[dict[str, Any]]

# {part of a step in which a rank does not compute: name in the summary}
LOST_PARTS = {
    "exposed": "exposed communication",
    "wait": "waiting for ranks",
    "bubble": "pipeline bubbles",
    "input": "waiting for input",
    "host_gap": "gaps",
}
_MAX_RUNS = 3  # with more runs, the summary states only the number of runs


class KeyNumbers(NamedTuple):
    """The main numbers of a run. Unknown numbers are None. Shares are means over ranks."""

    ranks: int | None
    backend: str | None
    step_s: float | None
    computing: float | None  # share of the step in which ranks compute
    largest_loss: tuple[str, float]  # the part in LOST_PARTS with the largest share of the step
    late: dict[str, Any] | None  # the row of the straggler that the advice names


def key_numbers(run: Run) -> KeyNumbers:
    profile = run.profile or {}
    rows = profile.get("ranks") or []
    world = run.summary.get("world") or run.started.get("world") or {}
    lost = {name: fmean(row["parts_share"][name] for row in rows) for name in LOST_PARTS if rows}
    return KeyNumbers(
        ranks=world.get("size") or profile.get("world_size"),
        backend="+".join(sorted({row["backend"] for row in rows})) or None,
        step_s=fmean(row["step_s"]["typical"] for row in rows) if rows else None,
        computing=fmean(row["busy"] for row in rows) if rows else None,
        largest_loss=max(lost.items(), key=lambda item: item[1], default=("", 0.0)),
        late=late_rank(profile.get("stragglers") or []),
    )


def metric(run: Run, name: str, rank: int | None = None) -> list[tuple[float, float]]:
    """Return (step, value) pairs of a metric of one rank. The default is the lowest rank."""
    if not run.metrics:
        return []
    rows = run.metrics.get(min(run.metrics) if rank is None else rank, [])
    return [
        (row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)
    ]


def scale_rows(result: Result) -> dict[str, Rows]:
    """Return {swept flags: rows sorted by number of ranks} of a scaling result.

    Rows without swept flags have the key "".
    """
    found: dict[str, Rows] = {"": result.content["rows"]} if result.content["rows"] else {}
    for row in result.content.get("sweep") or []:
        if "efficiency" in row:
            found.setdefault(flags_text(row), []).append(row)
    return {flags: sorted(rows, key=lambda row: int(row["ranks"])) for flags, rows in found.items()}


def best_scale_rows(result: Result) -> Rows:
    """Return the rows of the flags with the highest throughput at the largest number of ranks."""
    found = scale_rows(result).values()
    return max(found, key=lambda rows: (rows[-1]["ranks"], rows[-1]["samples_per_s"]), default=[])


def learning_rate_rows(result: Result) -> Rows:
    """Return the sorted rows of a learning rate sweep. They have losses, but no efficiency."""
    rows = [row for row in result.content.get("sweep") or [] if "final_loss" in row]
    with_rate = [row | {"lr": float(row["flags"]["lr"])} for row in rows]
    return sorted(with_rate, key=lambda row: (row["ranks"], row["lr"]))


def flags_text(row: dict[str, Any]) -> str:
    return " ".join(f"--{name.lstrip('-')} {value}" for name, value in row["flags"].items())


def largest_loss(row: dict[str, Any]) -> tuple[str, float]:
    """Return (name, share) of the largest cause of lost efficiency, or ("", 0)."""
    causes = {name: float(share) for name, share in row["loss"].items() if name != "other"}
    causes |= row.get("other") or {"rest": row["loss"]["other"]}
    named = [name for name in row.get("named", causes) if name in causes]
    name = max(named, key=lambda cause: causes[cause], default="")
    names = NAMES | {"compute": "slower compute", "gaps": "more gaps", "slow_steps": "slow steps"}
    return names.get(name, name), causes.get(name, 0.0)


def sentences(sources: ReportSources) -> Iterator[str]:
    """Yield the paragraphs of the summary: scaling first, then runs, checks and benchmarks."""
    scalings = sources.of_schema("tutti.scale")
    for result in scalings:
        yield " ".join(_scale_sentences(result))
    # If the page has a scaling result, describe only the profiled run with the most ranks.
    runs = sources.profiled[-1:] if scalings else sources.runs
    if len(runs) <= _MAX_RUNS:
        for run in runs:
            yield " ".join(_run_sentences(run))
    elif not scalings:
        yield f"This page shows {len(runs)} runs."
    for result in sources.of_schema("tutti.parity"):
        rows = [row for row in result.content["rows"] if not row.get("not_applicable")]
        failed = [row["layout"] for row in rows if not row["ok"]]
        verdict = "all agree with one device"
        if failed:
            verdict = f"{len(failed)} differ from one device ({', '.join(failed)})"
        yield f"{len(rows)} layouts: {verdict}."
    for result in sources.of_schema("tutti.doctor"):
        checks = result.content["checks"]
        failed = [check["id"] for check in checks if check["status"] == "fail"]
        warnings = plural(sum(check["status"] == "warn" for check in checks), "warning")
        names = f" ({', '.join(failed[:4])})" if failed else ""
        yield f"{len(checks)} checks: {len(failed)} failed{names}, {warnings}."
    benches = [result for result in sources.results if result.schema.startswith("tutti.bench.")]
    if benches:
        kinds = sorted({result.schema.removeprefix("tutti.bench.") for result in benches})
        environments = [recorded(result, "environment") for result in benches]
        hosts = sorted({str(found["host"]) for found in environments if found})
        where = f", measured on {', '.join(hosts)}" if hosts else ""
        yield f"Benchmarks: {', '.join(kinds)}{where}."


def _scale_sentences(result: Result) -> Iterator[str]:
    by_ranks = grouped(learning_rate_rows(result), lambda row: row["ranks"])
    for ranks, rates in by_ranks.items():
        finished = [row for row in rates if row["final_loss"] is not None]
        if finished:
            best = min(finished, key=lambda row: float(row["final_loss"]))
            yield (
                f"Of {len(rates)} learning rates with {plural(ranks, 'rank')}, "
                f"{best['lr']:g} has the lowest final loss: {best['final_loss']:.4g}."
            )
    rows = best_scale_rows(result)
    if len(rows) < 2:
        return
    first, last = rows[0], rows[-1]
    lost = 1 - last["efficiency"]
    flags = f" with {flags_text(last)}" if "flags" in last else ""
    yield (
        f"{last['ranks']} ranks{flags} are {last['speedup']:.2f} times as fast as "
        f"{plural(first['ranks'], 'rank')}: an efficiency of {100 * last['efficiency']:.0f} %."
    )
    name, share = largest_loss(last)
    if last.get("verdict"):
        yield f"{last['verdict']}."
    elif lost > 0 and share > 0:
        percent = f"{100 * share:.0f} % of the step"
        yield f"The largest cause of the lost {100 * lost:.0f} % is {name}, {percent}."


def _run_sentences(run: Run) -> Iterator[str]:
    numbers = key_numbers(run)
    facts = [plural(numbers.ranks, "rank")] if numbers.ranks else []
    if run.summary.get("layout"):
        facts.append(f"layout {run.summary['layout']}")
    # For a scaling result, the summary already shows the median throughput of all repeats. Do not
    # show the throughput of this repeat, because it differs from the median.
    if run.summary.get("samples_per_s") is not None and not run.of_scaling:
        facts.append(f"{run.summary['samples_per_s']:,.0f} samples/s")
    if losses := metric(run, "loss"):
        facts.append(f"loss {losses[0][1]:.3g} to {losses[-1][1]:.3g} in {len(losses)} steps")
    if run.summary.get("reason"):
        facts.append(str(run.summary["reason"]))
    if facts:
        yield f"{run.name}: {', '.join(facts)}."
    if numbers.step_s is not None and numbers.computing is not None:
        name, share = numbers.largest_loss
        lost = f". The largest loss is {LOST_PARTS[name]}, {100 * share:.0f} %" if share else ""
        computing = f"ranks compute for {100 * numbers.computing:.0f} % of the step"
        yield f"A recorded step takes {1e3 * numbers.step_s:.1f} ms, and {computing}{lost}."
    if numbers.late is not None:
        cost, share = numbers.late["cost_s"]["mean"], numbers.late["cost_share"]
        yield (
            f"Rank {numbers.late['rank']} is late: the other ranks wait {1e3 * cost:.1f} ms per "
            f"step ({100 * share:.0f} %)."
        )


class Tile(NamedTuple):
    """A large number, the name of the number, and the run or ranks to which it refers."""

    value: str
    name: str
    about: str


def tiles(sources: ReportSources) -> Iterator[Tile]:
    """Yield the tiles of the first scaling result and its profiled run, else of the first run."""
    scalings = sources.of_schema("tutti.scale")
    run = next(iter(sources.profiled[-1:] if scalings else sources.runs[:1]), None)
    for last in best_scale_rows(scalings[0])[-1:] if scalings else []:
        ranks = f"with {last['ranks']} ranks"
        unit = scalings[0].content.get("unit") or "samples/s"
        yield Tile(f"{last['samples_per_s']:,.0f}", unit, ranks)
        yield Tile(f"{100 * last['efficiency']:.0f} %", "efficiency", ranks)
        name, share = largest_loss(last)
        if share > 0:
            yield Tile(f"{100 * share:.0f} %", name, "of the step, the largest loss")
    if run is None:
        return
    numbers = key_numbers(run)
    where = f", in {run.name}" if len(sources.runs) > 1 else ""
    if not scalings:
        if run.summary.get("samples_per_s") is not None:
            yield Tile(f"{run.summary['samples_per_s']:,.0f}", "samples/s", run.name)
        if numbers.computing is not None:
            yield Tile(f"{100 * numbers.computing:.0f} %", "computing", f"of the step{where}")
        name, share = numbers.largest_loss
        if share > 0:
            about = f"of the step{where}, the largest loss"
            yield Tile(f"{100 * share:.0f} %", LOST_PARTS[name], about)
    if numbers.late is not None:
        cost = f"other ranks wait {1e3 * numbers.late['cost_s']['mean']:.1f} ms per step{where}"
        yield Tile(f"rank {numbers.late['rank']}", "is late", cost)
    elif run.profile is not None and (numbers.ranks or 1) > 1:
        in_turn = any(row["straggler"] for row in run.profile.get("stragglers") or [])
        about = "ranks wait for each other in turn" if in_turn else "no rank makes other ranks wait"
        yield Tile("no rank", "is late", f"{about}{where}")
