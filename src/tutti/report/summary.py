"""The beginning of a page: a summary in sentences, and a few large numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from tutti.report.plot import LOSS_NAMES, grouped
from tutti.report.sources import ReportSources, Result, Run

Rows = list[dict[str, Any]]

# The parts of a step in which a rank does not compute, and their names in sentences.
LOST_PARTS = {
    "exposed": "exposed communication",
    "wait": "waiting for ranks",
    "bubble": "pipeline bubbles",
    "input": "waiting for input",
    "host_gap": "gaps",
}
_MOST_RUNS = 3  # of more runs the summary gives only the number


@dataclass(frozen=True)
class KeyNumbers:
    """The most important numbers of a run; None if unknown."""

    ranks: int | None
    backend: str | None
    samples_per_s: float | None
    step_s: float | None
    computing: float | None
    """Share of the step with compute (with or without hidden communication), mean over ranks."""
    lost: dict[str, float]
    """Share of the step of each part in LOST_PARTS, mean over ranks, the largest first."""
    late: dict[str, Any] | None
    """The row of the straggler for which the other ranks wait longest."""


def key_numbers(run: Run) -> KeyNumbers:
    """The key numbers from the summary; numbers that the summary lacks are from the traces."""
    profile = run.profile or {}
    rows = profile.get("ranks") or []
    world = run.summary.get("world") or run.started.get("world") or {}
    lost = {name: fmean(row["parts_share"][name] for row in rows) for name in LOST_PARTS if rows}
    late = [each for each in profile.get("stragglers") or [] if each["straggler"]]
    return KeyNumbers(
        ranks=world.get("size") or profile.get("world_size"),
        backend="+".join(sorted({row["backend"] for row in rows})) or None,
        samples_per_s=run.summary.get("samples_per_s"),
        step_s=fmean(row["step_s"]["mean"] for row in rows) if rows else None,
        computing=fmean(row["busy"] for row in rows) if rows else None,
        lost=dict(sorted(lost.items(), key=lambda item: -item[1])),
        late=late[0] if late else None,
    )


def metric(run: Run, name: str, rank: int | None = None) -> list[tuple[float, float]]:
    """(step, value) pairs of a metric on one rank, by default the lowest rank with metrics."""
    if not run.metrics:
        return []
    rows = run.metrics.get(min(run.metrics) if rank is None else rank, [])
    return [
        (row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)
    ]


def scale_rows(result: Result) -> dict[str, Rows]:
    """The rows of a scaling series for each set of swept flags, sorted by number of ranks."""
    found: dict[str, Rows] = {"": result.content["rows"]} if result.content["rows"] else {}
    for row in result.content.get("sweep") or []:
        if "efficiency" in row:
            found.setdefault(flag_words(row), []).append(row)
    return {flags: sorted(rows, key=lambda row: int(row["ranks"])) for flags, rows in found.items()}


def best_scale_rows(result: Result) -> Rows:
    """The rows of the flags that were fastest with the most ranks, if flags were swept."""
    found = scale_rows(result).values()
    return max(found, key=lambda rows: (rows[-1]["ranks"], rows[-1]["samples_per_s"]), default=[])


def learning_rate_rows(result: Result) -> Rows:
    """The rows of a learning rate sweep, sorted; they have losses instead of efficiency."""
    rows = [row for row in result.content.get("sweep") or [] if "final_loss" in row]
    return sorted(rows, key=lambda row: (row["ranks"], learning_rate(row)))


def learning_rate(row: dict[str, Any]) -> float:
    return float(row["flags"]["lr"])


def throughput_unit(result: Result) -> str:
    return result.content.get("unit") or "samples/s"


def flag_words(row: dict[str, Any]) -> str:
    return " ".join(f"--{name.lstrip('-')} {value}" for name, value in row["flags"].items())


def largest_loss(row: dict[str, Any]) -> tuple[str, float]:
    """Name and share of the largest cause of lost efficiency; `other` is split into its causes."""
    causes = {LOSS_NAMES[name]: share for name, share in row["loss"].items() if name != "other"}
    names = {"compute": "slower compute", "gaps": "more gaps"}
    for name, share in (row.get("other") or {"rest": row["loss"]["other"]}).items():
        causes[names.get(name, name)] = share
    name = max(causes, key=lambda each: float(causes[each]))
    return name, causes[name]


def sentences(sources: ReportSources) -> Iterator[str]:
    """The sentences of the summary: scaling first, then runs, checks and benchmarks."""
    scalings = sources.of_schema("tutti.scale")
    for result in scalings:
        yield from _scale_sentences(result)
    # The curve of a scaling series shows more than its single runs. So only the last profiled run,
    # which has the most ranks, is described.
    runs = sources.profiled[-1:] if scalings else sources.runs
    if len(runs) <= _MOST_RUNS:
        for run in runs:
            yield from _run_sentences(run)
    elif not scalings:
        yield f"This page shows {len(runs)} runs."
    for result in sources.of_schema("tutti.parity"):
        rows = [row for row in result.content["rows"] if not row.get("not_applicable")]
        failed = [row["layout"] for row in rows if not row["ok"]]
        if failed:
            names = ", ".join(failed)
            yield f"{len(rows)} layouts: {len(failed)} differ from one device ({names})."
        else:
            yield f"{len(rows)} layouts: all agree with one device."
    for result in sources.of_schema("tutti.doctor"):
        checks = result.content["checks"]
        failed = [each["id"] for each in checks if each["status"] == "fail"]
        warnings = sum(each["status"] == "warn" for each in checks)
        names = f" ({', '.join(failed[:4])})" if failed else ""
        plural = "s" * (warnings != 1)
        yield f"{len(checks)} checks: {len(failed)} failed{names}, {warnings} warning{plural}."
    benches = [each for each in sources.results if each.schema.startswith("tutti.bench.")]
    if benches:
        kinds = sorted({each.schema.removeprefix("tutti.bench.") for each in benches})
        hosts = sorted({str(each.environment["host"]) for each in benches if each.environment})
        where = f", measured on {', '.join(hosts)}" if hosts else ""
        yield f"Benchmarks: {', '.join(kinds)}{where}."


def _scale_sentences(result: Result) -> Iterator[str]:
    by_ranks = grouped(learning_rate_rows(result), lambda row: row["ranks"])
    for ranks, rates in by_ranks.items():
        finished = [row for row in rates if row["final_loss"] is not None]
        if finished:
            best = min(finished, key=lambda row: float(row["final_loss"]))
            yield (
                f"Of {len(rates)} learning rates with {_count(ranks, 'rank')}, "
                f"{learning_rate(best):g} has the lowest final loss: {best['final_loss']:.4g}."
            )
    rows = best_scale_rows(result)
    if len(rows) < 2:
        return
    first, last = rows[0], rows[-1]
    lost = 1 - last["efficiency"]
    flags = f" with {flag_words(last)}" if "flags" in last else ""
    text = (
        f"{last['ranks']} ranks{flags} are {last['speedup']:.2f} times as fast as "
        f"{_count(first['ranks'], 'rank')}: an efficiency of {100 * last['efficiency']:.0f} %."
    )
    name, share = largest_loss(last)
    if lost > 0 and share > 0:
        text += (
            f" The largest cause of the lost {100 * lost:.0f} % is {name}, "
            f"{100 * share:.0f} % of the step."
        )
    yield text


def _run_sentences(run: Run) -> Iterator[str]:
    numbers = key_numbers(run)
    facts = [_count(numbers.ranks, "rank")] if numbers.ranks else []
    if run.summary.get("layout"):
        facts.append(f"layout {run.summary['layout']}")
    if numbers.samples_per_s is not None:
        facts.append(f"{numbers.samples_per_s:,.0f} samples/s")
    if losses := metric(run, "loss"):
        facts.append(f"loss {losses[0][1]:.3g} to {losses[-1][1]:.3g} in {len(losses)} steps")
    if run.summary.get("reason"):
        facts.append(str(run.summary["reason"]))
    if facts:
        yield f"{run.name}: {', '.join(facts)}."
    if numbers.step_s is not None and numbers.computing is not None:
        text = (
            f"A step takes {1e3 * numbers.step_s:.1f} ms; ranks compute for "
            f"{100 * numbers.computing:.0f} % of it"
        )
        name, share = next(iter(numbers.lost.items()), ("", 0.0))
        lost = f"; the largest loss is {LOST_PARTS[name]}, {100 * share:.0f} %" if share else ""
        yield f"{text}{lost}."
    if numbers.late is not None:
        cost, share = numbers.late["cost_s"]["mean"], numbers.late["cost_share"]
        yield (
            f"Rank {numbers.late['rank']} is late: the others wait {1e3 * cost:.1f} ms per step "
            f"for it ({100 * share:.0f} %)."
        )


class Tile(NamedTuple):
    """A large number, its name, and the run or ranks to which the number refers."""

    value: str
    name: str
    about: str


def tiles(sources: ReportSources) -> Iterator[Tile]:
    """Throughput, efficiency, largest loss and straggler of the scaling or of the first run."""
    scalings = sources.of_schema("tutti.scale")
    run = next(iter(sources.profiled[-1:] if scalings else sources.runs[:1]), None)
    for last in best_scale_rows(scalings[0])[-1:] if scalings else []:
        ranks = f"with {last['ranks']} ranks"
        yield Tile(f"{last['samples_per_s']:,.0f}", throughput_unit(scalings[0]), ranks)
        yield Tile(f"{100 * last['efficiency']:.0f} %", "efficiency", ranks)
        name, share = largest_loss(last)
        if share > 0:
            yield Tile(f"{100 * share:.0f} %", name, "of the step: the largest loss")
    if run is None:
        return
    numbers = key_numbers(run)
    where = f", in {run.name}" if len(sources.runs) > 1 else ""
    if not scalings:
        if numbers.samples_per_s is not None:
            yield Tile(f"{numbers.samples_per_s:,.0f}", "samples/s", run.name)
        if numbers.computing is not None:
            yield Tile(f"{100 * numbers.computing:.0f} %", "computing", f"of the step{where}")
        name, share = next(iter(numbers.lost.items()), ("", 0.0))
        if share > 0:
            about = f"of the step{where}: the largest loss"
            yield Tile(f"{100 * share:.0f} %", LOST_PARTS[name], about)
    if numbers.late is not None:
        cost = f"the others wait {1e3 * numbers.late['cost_s']['mean']:.1f} ms per step{where}"
        yield Tile(f"rank {numbers.late['rank']}", "is late", cost)
    elif run.profile is not None and (numbers.ranks or 1) > 1:
        yield Tile("no rank", "is late", f"no rank makes the others wait{where}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
