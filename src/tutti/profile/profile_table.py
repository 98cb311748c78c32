"""Formats the rows of explain.py as tables of 80 columns, or of 60 columns on a narrow terminal."""

from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from tutti.measure.terminal import wrap_line
from tutti.measure.units import format_bytes, plural, three_digits
from tutti.profile.explain import COMM_RATIO_LIMIT
from tutti.profile.step_breakdown import PARTS, excess_text, is_late_by_chance, lateness_text

MEMORY_PARTS = (
    *("parameters", "gradients", "optimizer", "activations", "buffers", "fragmentation"),
    *("other", "total"),
)
_FULL_WIDTH = 80
_MAX_RANKS = 16
_MAX_ROWS = 8
_MAX_ADVICE = 5
# (Recorded step time) / (unrecorded step time). A ratio below this value is not printed, because it
# may be random.
_NOTABLE_OVERHEAD = 1.1


def profile_lines(rows: dict[str, Any], width: int = _FULL_WIDTH) -> Iterator[str]:
    """Yield the lines to print. Sentences are wrapped to `width`."""
    for line in _lines(rows, width < _FULL_WIDTH):
        yield from wrap_line(line, width, "    " if line.startswith(" ") else "  ")


def _lines(rows: dict[str, Any], narrow: bool) -> Iterator[str]:
    ranks = rows["ranks"]
    backends = "+".join(sorted({row["backend"] for row in ranks}))
    yield (
        f"{plural(max(row['steps'] for row in ranks), 'step')} of {plural(len(ranks), 'rank')}, "
        f"{backends}; {ranks[0]['clock_of']} time, in % of a typical step"
    )
    yield ""
    titles = {name: "gaps" if name == "host_gap" else name for name in PARTS}
    widths = {name: len(title) + 1 if narrow else 8 for name, title in titles.items()}
    head = "rank   ms" if narrow else "rank  step ms"
    yield head + "".join(f"{titles[name]:>{widths[name]}}" for name in PARTS)
    late = {row["rank"] for row in rows["stragglers"][:4]}
    shown = [row for n, row in enumerate(ranks) if n < _MAX_RANKS or row["rank"] in late]
    for row in shown:
        step, digits = 1e3 * row["step_s"]["typical"], 0 if narrow else 1
        shares = (f"{100 * row['parts_share'][n]:>{widths[n]}.{digits}f}" for n in PARTS)
        short = f"{step:.3g}" if step < 1000 else f"{step:.0f}"
        time = f"{short:>5}" if narrow else f"{step:>9.2f}"
        yield f"{row['rank']:>4}{time}{''.join(shares)}"
        if not narrow and row["steps"] > 1:
            cells = (_cell(row["parts_quartiles_s"][n], row["step_s"]["typical"]) for n in PARTS)
            yield f"{'p25–p75':>13}{''.join(f'{cell:>8}' for cell in cells)}"
    if len(shown) < len(ranks):
        yield f"      … {len(ranks) - len(shown)} more ranks: see --json"
    balance = "busy " + _range([100 * row["busy"] for row in ranks], "%")
    for name, key in (("memory", "memory_bytes"), ("process memory", "host_memory_bytes")):
        if values := [row[key] / 1e6 for row in ranks if row[key]]:
            balance += f"; {name} {_range(values, 'MB')}"
            break
    yield balance
    yield from _memory([row for row in shown if row["memory"]], narrow)
    overhead = median(row["recording_overhead"] or 1 for row in ranks)
    if overhead > _NOTABLE_OVERHEAD:
        corrected = any(row["calibration"] is not None for row in ranks)
        yield (
            f"recorded steps took {overhead:.2f} × as long as unrecorded steps"
            + ("; the table is corrected for the cost of recording" if corrected else "")
        )
    yield ""
    yield from _communication(rows, narrow)
    yield from _stragglers(rows)
    yield from _advice(rows)
    yield from (f"note: {note}" for note in rows["notes"])


def _memory(ranks: list[dict[str, Any]], narrow: bool) -> Iterator[str]:
    """Yield the parts of each rank's peak memory."""
    if not ranks:
        return
    yield ""
    yield "memory by cause, in MB at the peak"
    short = {"parameters": "params", "gradients": "grads", "optimizer": "optim"}
    short |= {"activations": "activ", "buffers": "comm", "fragmentation": "fragm"}
    width = 7 if narrow else 9
    yield "rank" + "".join(f"{short.get(n, n):>{width}}" for n in MEMORY_PARTS)
    for row in ranks:
        values = (row["memory"][name] for name in MEMORY_PARTS)
        cells = ("-" if value is None else f"{value / 1e6:,.1f}" for value in values)
        yield f"{row['rank']:>4}" + "".join(f"{cell:>{width}}" for cell in cells)
    modules = ranks[0]["memory"]["activations_by_module"][:_MAX_ADVICE]
    if modules:
        sizes = (f"{item['module']} {item['bytes'] / 1e6:,.1f} MB" for item in modules)
        yield f"largest activations of rank {ranks[0]['rank']}: {', '.join(sizes)}"
    for note in dict.fromkeys(row["memory"]["note"] for row in ranks if row["memory"]["note"]):
        yield f"note: {note}"
    yield ""


def _cell(low_and_high: list[float], step: float) -> str:
    """Return quartiles in percent of the step, such as 81–84."""
    low, high = (f"{100 * seconds / step:.0f}" for seconds in low_and_high)
    return low if low == high else f"{low}–{high}"


def _range(values: list[float], unit: str) -> str:
    """Return the range from the lowest to the highest value as text."""
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _communication(rows: dict[str, Any], narrow: bool) -> Iterator[str]:
    ranks, comm = rows["ranks"], rows["comm"]
    if not comm:
        yield "no communication was recorded"
        return
    ratio = fmean(row["comm_ratio"] for row in ranks)
    overlaps = [row["overlap"] for row in ranks if row["overlap"] is not None]
    verdict = "within" if ratio <= COMM_RATIO_LIMIT else "above"
    overlap = f"; overlap {100 * fmean(overlaps):.0f} %" if overlaps else ""
    yield (
        f"moving data: {100 * ratio:.0f} % of the step, {verdict} the "
        f"{100 * COMM_RATIO_LIMIT:.0f} % limit{overlap}"
    )
    length = fmean(row["step_s"]["typical"] for row in ranks)
    for row in rows["axes"]:
        shares = (100 * row[f"{name}_s"] / length for name in ("hidden", "exposed", "wait"))
        yield "  {:<6} hidden {:4.1f} %, exposed {:4.1f} %, waiting {:4.1f} %".format(
            row["axis"] or "other", *shares
        )
    if rows["buckets"]:
        yield _buckets(rows)
    yield ""
    if narrow:
        yield "operation      axis       size    p50 ms  wait ms busbw GB/s"
    else:
        yield "operation      axis  ranks     size count    p50 ms total ms  wait ms busbw GB/s"
    for row in comm[:_MAX_ROWS]:
        size = "?" if row["bytes"] is None else format_bytes(row["bytes"])
        bus = "" if row["busbw_gbs"] is None else f"{row['busbw_gbs']:.3f}"
        transfer = row["transfer_s"]
        group = "" if narrow else f"{row['ranks']:>5}"
        count = "" if narrow else f"{row['count']:>6}"
        total = "" if narrow else f"{1e3 * transfer['total']:>9.2f}"
        yield (
            f"{row['op']:<15}{row['axis'] or '?':<6}{group}{size:>9}{count}"
            f"{1e3 * transfer['p50']:>10.3f}{total}{1e3 * row['wait_s']['mean']:>9.3f}{bus:>11}"
        )
    if len(comm) > _MAX_ROWS:
        yield f"… {len(comm) - _MAX_ROWS} more rows: see --json"
    yield ""


def _buckets(rows: dict[str, Any]) -> str:
    gradients = {(row["rank"], row["step"]): row["gradients_s"] for row in rows["steps"]}
    done: dict[tuple[int, int], float] = {}
    for row in rows["buckets"]:
        key = row["rank"], row["step"]
        done[key] = max(done.get(key, 0.0), row["done_s"])
    sizes = [row["bytes"] for row in rows["buckets"]]
    count = plural(round(len(rows["buckets"]) / len(done)), "DDP bucket")
    text = f"  {count} of {' to '.join(dict.fromkeys(map(format_bytes, (min(sizes), max(sizes)))))}"
    if tails := [done[key] - gradients[key][1] for key in done if gradients.get(key)]:
        tail = 1e3 * fmean(tails)
        when = "after" if tail >= 0 else "before the end of"
        text += f"; the last bucket is done {abs(tail):.1f} ms {when} backward"
    return text


def _stragglers(rows: dict[str, Any]) -> Iterator[str]:
    if len(rows["ranks"]) < 2:
        return
    stragglers = [row for row in rows["stragglers"] if row["straggler"]]
    if not stragglers:
        yield "no rank makes the other ranks wait"
        return
    for row in stragglers[:_MAX_ROWS]:
        cost = row["cost_s"]
        if is_late_by_chance(row, rows["stragglers"]):
            yield (
                f"rank {row['rank']} {lateness_text(row)}, in turn with other ranks: "
                f"{1e3 * cost['typical']:.1f} ms per step ({100 * row['cost_share']:.0f} %)"
            )
            continue
        yield (
            f"rank {row['rank']} {lateness_text(row)}: the others wait "
            f"{1e3 * cost['typical']:.1f} ms per step ({100 * row['cost_share']:.0f} %) for it,"
        )
        yield (
            f"  {1e3 * cost['min']:.1f} to {1e3 * cost['max']:.1f} ms; in {row['steps']} of "
            f"{row['of_steps']} steps; arrives last at {row['last']} of "
            f"{row['of_collectives']} collectives"
        )
        if not row["steady"] and row["period"] is None:
            yield f"  to find a period, record more steps: --active {max(20, 2 * row['of_steps'])}"
        if row["excess"]["seconds"] >= 5e-5:
            yield f"  it {excess_text(row['excess'])}"
    ranks = {row["rank"]: row["steps"] for row in rows["ranks"]}
    if len(ranks) > 8:
        return
    made_wait = {row["rank"]: row["made_wait"] for row in rows["stragglers"]}
    yield ""
    yield "ms waited per step …" + "".join(f"{f'for {rank}':>7}" for rank in ranks)
    for waiter, steps in ranks.items():
        cells = ""
        for late in ranks:
            seconds = made_wait.get(late, {}).get(str(waiter), 0.0) / steps
            cells += f"{'·':>7}" if waiter == late else f"{1e3 * seconds:>7.1f}"
        yield f"{f'by {waiter}':>20}{cells}"


def _advice(rows: dict[str, Any]) -> Iterator[str]:
    if not rows["advice"]:
        return
    if len(rows["ranks"]) > 1:
        yield ""
    yield "advice, in the order to try (gains on the same cause do not add up)"
    for advice in rows["advice"][:_MAX_ADVICE]:
        yield f"- {advice['finding']}. {advice['try']} (gain {gain_text(advice)})"


def gain_text(advice: Mapping[str, Any]) -> str:
    """Return the band of a predicted gain as text: `12.1 to 18.0 ms, 30 to 45 % of the step`."""
    low, high = (1e3 * seconds for seconds in advice["gain_s_band"])
    shares = " to ".join(f"{100 * share:.0f}" for share in advice["gain_share_band"])
    return f"{three_digits(low)} to {three_digits(high)} ms, {shares} % of the step"
