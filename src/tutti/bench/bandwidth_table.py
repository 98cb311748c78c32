"""What `tutti bench bandwidth` prints: matrices, classes, what all ranks do, and what is slow."""

from collections.abc import Iterator, Sequence

from tutti.bench.bandwidth import Bandwidth, Row
from tutti.bench.verdict import Finding
from tutti.measure.units import format_size

_CELL = 9  # two marks, a number such as 0.0246, and a space


def lines(measured: Bandwidth, width: int) -> Iterator[str]:
    """All of it, in lines of no more than `width` where that can be."""
    for size in dict.fromkeys(row["bytes"] for row in measured.pairs):
        rows = [row for row in measured.pairs if row["bytes"] == size]
        yield from _matrices(rows, measured.world.size, size, measured.together, width)
    yield from _classes(measured.classes)
    yield from _one_to_all(measured.one_to_all)
    yield from _all_to_all(measured.all_to_all)
    yield from _ring_vs_tree(measured.ring_vs_tree)
    yield from _copies(measured.copies)
    for each in measured.skipped:
        yield f"# {each['name']} is left out: {each['reason']}"
    yield from _verdicts(measured)


def _matrices(
    rows: Sequence[Row], ranks: int, size: int, together: bool, width: int
) -> Iterator[str]:
    how = "disjoint pairs at the same time" if together else "one pair at a time"
    if 6 + _CELL * ranks > width:
        yield f"# {ranks} × {ranks} pairs are too wide for a matrix here: --json FILE has them"
        return
    by_flow = {(row["src"], row["dst"]): row for row in rows}
    for metric, what in (("gbs_uni", "one way"), ("gbs_bi", "both ways, the sum")):
        yield f"# {what}, GB/s, messages of {format_size(size)}, {how}: rows send, columns receive"
        yield f"#{'':5}" + "".join(f"{rank:>{_CELL}}" for rank in range(ranks))
        for src in range(ranks):
            cells = (_cell(by_flow.get((src, dst)), metric) for dst in range(ranks))
            yield f"{src:>6}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _cell(row: Row | None, metric: str) -> str:
    if row is None or row[metric] is None:
        return "-"
    mark = {"degraded": "!", "bad": "!!"}.get(row["verdict"], "")
    return mark + number(row[metric])


def number(value: float) -> str:
    """Three digits, whatever the size: 396, 3.21, 0.0246."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _classes(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield f"# {'class':<18} {'size':>6} {'pairs':>6} {'one way':>8} {'both':>8} {'scatter':>8}"
    for row in rows:
        one_way, both = (
            "-" if row[metric] is None else number(row[metric]) for metric in ("gbs_uni", "gbs_bi")
        )
        scatter = "-" if row["scatter"] is None else f"{100 * row['scatter']:.1f} %"
        yield (
            f"  {row['class']:<18} {format_size(row['bytes']):>6} {row['pairs']:>6} {one_way:>8} "
            f"{both:>8} {scatter:>8}"
        )


def _one_to_all(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield f"# {'one to all, GB/s in all':<25} {'size':>6} {'':>8} {'scatter':>8}  slowest"
    for row in rows:
        yield (
            f"  from rank {row['root']:<15} {format_size(row['bytes']):>6} {number(row['gbs']):>8} "
            f"{100 * row['spread']:>6.1f} %  rank {row['slowest']}"
        )


def _all_to_all(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield f"# {'all to all':<25} {'size':>6} {'time us':>9} {'busbw':>8}"
    for row in rows:
        yield (
            f"  {row['backend']:<25} {format_size(row['bytes']):>6} {row['time_us']['p50']:>9.0f} "
            f"{number(row['busbw_gbs']):>8}"
        )


def _ring_vs_tree(rows: Sequence[Row]) -> Iterator[str]:
    names = list(dict.fromkeys(row["backend"] for row in rows))
    if names:
        heads = "".join(f" {name:>9}" for name in names)
        yield f"# {'all_reduce, us':<14} {'size':>5}{heads}  faster"
    for size in dict.fromkeys(row["bytes"] for row in rows):
        times = {row["backend"]: row["time_us"]["p50"] for row in rows if row["bytes"] == size}
        told = (f"{times[name]:.1f}" if name in times else "-" for name in names)
        cells = "".join(f" {each:>9}" for each in told)
        written = {name: times[name] for name in times if name.endswith((" ring", " tree"))}
        faster = min(written, key=written.__getitem__).split()[-1] if written else ""
        yield f"  {'':<14} {format_size(size):>5}{cells}  {faster}"


def _copies(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield f"# {'copies, GB/s':<34} {'size':>6} {'':>8} {'scatter':>8}  verdict"
    for row in rows:
        expected = f" ({number(row['expected_gbs'])} published)" if row["expected_gbs"] else ""
        what, size = f"rank {row['rank']}, {row['kind']}", format_size(row["bytes"])
        yield (
            f"  {what:<34} {size:>6} {number(row['gbs']):>8} {100 * row['spread']:>6.1f} %  "
            f"{row['verdict']}{expected}"
        )


def _verdicts(measured: Bandwidth) -> Iterator[str]:
    for finding in measured.findings:
        yield from _finding(finding)
    verdicts = [row["verdict"] for row in measured.pairs]
    if verdicts and not measured.findings:
        unknown = verdicts.count("unknown")
        if unknown == len(verdicts):
            yield (
                "# verdict: unknown: a class of one pair has nothing to be held against, and the "
                "catalogue has no figure"
            )
        else:
            good, also = len(verdicts) - unknown, f", {unknown} unknown" if unknown else ""
            yield f"# verdict: good: {good} pairs are as fast as their class{also}"


def _finding(finding: Finding) -> Iterator[str]:
    against = f"{number(finding.against_gbs)} ({finding.against})"
    yield f"# {finding.verdict}: {finding.what}: {number(finding.gbs)} GB/s against {against}"
    for cause in finding.causes:
        yield f"#   {cause if cause.startswith('seen') else 'perhaps ' + cause}"
