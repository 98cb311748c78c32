"""The first lines of a page: what is worth knowing, in sentences and in a few large numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tutti.report.collect import Material, Result, Run
from tutti.report.figures.loss import values
from tutti.report.key_numbers import (
    LOST,
    Rows,
    best_of_scale,
    flags_of,
    largest_loss,
    learning_rate,
    of_learning_rates,
    of_run,
    unit_of,
)

# A sentence about each of more runs than these would be no summary.
_MOST_RUNS = 3


@dataclass(frozen=True)
class Tile:
    """A number, what it is, and of what."""

    value: str
    name: str
    about: str


def sentences(material: Material) -> Iterator[str]:
    """Scalings first, then runs, then checks."""
    for result in material.of("tutti.scale"):
        yield from _scale_sentences(result)
    for run in _told(material):
        yield from _run_sentences(run)
    if len(material.runs) > _MOST_RUNS and not material.of("tutti.scale"):
        yield f"{len(material.runs)} runs are on this page."
    for result in material.of("tutti.parity"):
        rows = [row for row in result.content["rows"] if not row.get("not_applicable")]
        failed = [row["layout"] for row in rows if not row["ok"]]
        if failed:
            yield f"Of {len(rows)} layouts these differ from one device: {', '.join(failed)}."
        else:
            yield f"{len(rows)} layouts compute what one device computes."
    for result in material.of("tutti.doctor"):
        checks = result.content["checks"]
        bad = [each["id"] for each in checks if each["status"] == "fail"]
        warned = sum(each["status"] == "warn" for each in checks)
        said = f"{', '.join(bad[:4])} fail" if bad else "no check fails"
        yield f"Of {len(checks)} checks, {said}, {warned} warn."
    benches = [each for each in material.results if each.schema.startswith("tutti.bench.")]
    if benches:
        kinds = sorted({each.schema.removeprefix("tutti.bench.") for each in benches})
        hosts = sorted({str(each.environment["host"]) for each in benches if each.environment})
        where = f", measured on {', '.join(hosts)}" if hosts else ""
        yield f"Benchmarks: {', '.join(kinds)}{where}."


def tiles(material: Material) -> Iterator[Tile]:
    """Throughput, efficiency, the largest loss, who is late: of the scaling or the first run."""
    scalings = material.of("tutti.scale")
    run = next(iter(material.profiled[-1:] if scalings else material.runs[:1]), None)
    for last in best_of_scale(scalings[0])[-1:] if scalings else []:
        yield Tile(
            f"{last['samples_per_s']:,.0f}", unit_of(scalings[0]), f"on {last['ranks']} ranks"
        )
        yield Tile(f"{100 * last['efficiency']:.0f} %", "efficiency", f"on {last['ranks']} ranks")
        name, share = largest_loss(last)
        if share > 0:
            yield Tile(f"{100 * share:.0f} %", name, "of the step: the largest loss")
    if run is None:
        return
    numbers = of_run(run)
    whose = f", in {run.name}" if len(material.runs) > 1 else ""
    if not scalings:
        if numbers.samples_per_s is not None:
            yield Tile(f"{numbers.samples_per_s:,.0f}", "samples/s", run.name)
        if numbers.computing is not None:
            yield Tile(f"{100 * numbers.computing:.0f} %", "computing", f"of the step{whose}")
        name, share = next(iter(numbers.lost.items()), ("", 0.0))
        if share > 0:
            yield Tile(f"{100 * share:.0f} %", LOST[name], f"of the step{whose}: the largest loss")
    if numbers.late is not None:
        cost = f"others wait {1e3 * numbers.late['cost_s']['mean']:.1f} ms of a step{whose}"
        yield Tile(f"rank {numbers.late['rank']}", "is late", cost)
    elif run.profile is not None and (numbers.ranks or 1) > 1:
        yield Tile("nobody", "is late", f"no rank makes the others wait{whose}")


def _told(material: Material) -> list[Run]:
    """Of a scaling the curve tells more than its runs; of these the last, which is the largest."""
    if material.of("tutti.scale"):
        return material.profiled[-1:]
    return material.runs if len(material.runs) <= _MOST_RUNS else []


def _scale_sentences(result: Result) -> Iterator[str]:
    yield from _learning_rate_sentences(result)
    rows = best_of_scale(result)
    if len(rows) < 2:
        return
    last = rows[-1]
    lost = 1 - last["efficiency"]
    with_ = f" with {flags_of(last)}" if "flags" in last else ""
    said = (
        f"{last['ranks']} ranks{with_} are {last['speedup']:.2f} times as fast as {_ranks(rows[0])}"
    )
    said += f": {100 * last['efficiency']:.0f} % of the ideal."
    name, share = largest_loss(last)
    if lost > 0 and share > 0:
        said += (
            f" Of the {100 * lost:.0f} % that are lost, the most is {name}: "
            f"{100 * share:.0f} % of the step."
        )
    yield said


def _learning_rate_sentences(result: Result) -> Iterator[str]:
    by_ranks: dict[int, Rows] = {}
    for row in of_learning_rates(result):
        by_ranks.setdefault(row["ranks"], []).append(row)
    for ranks, rows in by_ranks.items():
        ended = [row for row in rows if row["final_loss"] is not None]
        if ended:
            best = min(ended, key=lambda row: float(row["final_loss"]))
            yield (
                f"Of {len(rows)} learning rates on {ranks} rank{'s' * (ranks != 1)}, "
                f"{learning_rate(best):g} ends with the lowest loss: {best['final_loss']:.4g}."
            )


def _ranks(row: dict[str, Any]) -> str:
    return "1" if row["ranks"] == 1 else f"{row['ranks']} ranks"


def _run_sentences(run: Run) -> Iterator[str]:
    numbers = of_run(run)
    facts = []
    if numbers.ranks:
        facts.append(f"{numbers.ranks} rank{'s' * (numbers.ranks != 1)}")
    if run.summary.get("layout"):
        facts.append(f"layout {run.summary['layout']}")
    if numbers.samples_per_s is not None:
        facts.append(f"{numbers.samples_per_s:,.0f} samples/s")
    losses = values(run, "loss")
    if losses:
        facts.append(f"loss {losses[0][1]:.3g} to {losses[-1][1]:.3g} in {len(losses)} steps")
    if run.summary.get("reason"):
        facts.append(str(run.summary["reason"]))
    if facts:
        yield f"{run.name}: {', '.join(facts)}."
    if numbers.step_s is not None and numbers.computing is not None:
        said = (
            f"A step takes {1e3 * numbers.step_s:.1f} ms, and for {100 * numbers.computing:.0f} % "
            "of it ranks compute"
        )
        name, share = next(iter(numbers.lost.items()), ("", 0.0))
        said += f"; the most is lost to {LOST[name]}, {100 * share:.0f} %." if share else "."
        yield said
    if numbers.late is not None:
        cost, share = numbers.late["cost_s"]["mean"], numbers.late["cost_share"]
        yield (
            f"Rank {numbers.late['rank']} is late: the others wait {1e3 * cost:.1f} ms of a step "
            f"for it ({100 * share:.0f} %)."
        )
