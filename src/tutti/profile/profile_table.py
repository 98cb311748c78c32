"""An explanation as text: tables of 80 columns, or of 60 on a narrow terminal."""

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from tutti.measure.terminal import wrap_line
from tutti.measure.units import format_bytes
from tutti.profile.communication_summary import excess_text
from tutti.profile.explain import COMM_RATIO_LIMIT
from tutti.profile.step_breakdown import PART_TITLES, PARTS

_FULL_WIDTH = 80
_MOST_RANKS = 16
_MOST_ROWS = 8
_MOST_ADVICE = 5
_NOTABLE_OVERHEAD = 1.1  # recorded / unrecorded step; a few steps do not show less


def profile_lines(rows: dict[str, Any], width: int = _FULL_WIDTH) -> Iterator[str]:
    """The lines to print; sentences are wrapped to `width`."""
    for line in _lines(rows, width < _FULL_WIDTH):
        yield from wrap_line(line, width, "    " if line.startswith(" ") else "  ")


def _lines(rows: dict[str, Any], narrow: bool) -> Iterator[str]:
    ranks = rows["ranks"]
    late = {each["rank"] for each in rows["stragglers"][:4]}
    shown = [each for n, each in enumerate(ranks) if n < _MOST_RANKS or each["rank"] in late]
    backends = "+".join(sorted({each["backend"] for each in ranks}))
    yield (
        f"{_count(max(each['steps'] for each in ranks), 'step')} of {_count(len(ranks), 'rank')}, "
        f"{backends}; {ranks[0]['clock_of']} time, in % of the step"
    )
    yield ""
    titles = {name: PART_TITLES.get(name, name) for name in PARTS}
    widths = {name: len(title) + 1 if narrow else 8 for name, title in titles.items()}
    head = "rank   ms" if narrow else "rank  step ms"
    yield head + "".join(f"{titles[name]:>{widths[name]}}" for name in PARTS)
    for each in shown:
        step, digits = 1e3 * each["step_s"]["mean"], 0 if narrow else 1
        shares = (f"{100 * each['parts_share'][n]:>{widths[n]}.{digits}f}" for n in PARTS)
        short = f"{step:.3g}" if step < 1000 else f"{step:.0f}"
        time = f"{short:>5}" if narrow else f"{step:>9.2f}"
        yield f"{each['rank']:>4}{time}{''.join(shares)}"
    if len(shown) < len(ranks):
        yield f"      … {len(ranks) - len(shown)} more ranks: see --json"
    yield _balance(ranks)
    overhead = median(each["recording_overhead"] or 1 for each in ranks)
    if overhead > _NOTABLE_OVERHEAD:
        yield f"recorded steps took {overhead:.2f} × as long as the steps before"
    yield ""
    yield from _communication(rows, narrow)
    yield from _stragglers(rows)
    yield from _advice(rows)
    for note in rows["notes"]:
        yield f"note: {note}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _balance(ranks: list[dict[str, Any]]) -> str:
    """Busy share and memory: the range from the lowest to the highest value over ranks."""
    text = "busy " + _range([100 * each["busy"] for each in ranks], "%")
    for name, key in (("memory", "memory_bytes"), ("process memory", "host_memory_bytes")):
        known = [each[key] / 1e6 for each in ranks if each[key]]
        if known:
            return f"{text}; {name} {_range(known, 'MB')}"
    return text


def _range(values: list[float], unit: str) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _communication(rows: dict[str, Any], narrow: bool) -> Iterator[str]:
    ranks = rows["ranks"]
    if not rows["comm"]:
        yield "no communication was recorded"
        return
    ratio = fmean(each["comm_ratio"] for each in ranks)
    overlaps = [each["overlap"] for each in ranks if each["overlap"] is not None]
    verdict = "within" if ratio <= COMM_RATIO_LIMIT else "above"
    overlap = f"; overlap {100 * fmean(overlaps):.0f} %" if overlaps else ""
    yield (
        f"moving data: {100 * ratio:.0f} % of the step, {verdict} the "
        f"{100 * COMM_RATIO_LIMIT:.0f} % limit{overlap}"
    )
    length = fmean(each["step_s"]["mean"] for each in ranks)
    for each in rows["axes"]:
        shares = (100 * each[f"{name}_s"] / length for name in ("hidden", "exposed", "wait"))
        yield "  {:<6} hidden {:4.1f} %, exposed {:4.1f} %, waiting {:4.1f} %".format(
            each["axis"] or "other", *shares
        )
    if rows["buckets"]:
        yield _buckets(rows)
    yield ""
    if narrow:
        yield "operation      axis       size    p50 ms  wait ms busbw GB/s"
    else:
        yield "operation      axis  ranks     size count    p50 ms total ms  wait ms busbw GB/s"
    for each in rows["comm"][:_MOST_ROWS]:
        size = "?" if each["bytes"] is None else format_bytes(each["bytes"])
        bus = "" if each["busbw_gbs"] is None else f"{each['busbw_gbs']:.3f}"
        transfer = each["transfer_s"]
        group = "" if narrow else f"{each['ranks']:>5}"
        count = "" if narrow else f"{each['count']:>6}"
        total = "" if narrow else f"{1e3 * transfer['total']:>9.2f}"
        yield (
            f"{each['op']:<15}{each['axis'] or '?':<6}{group}{size:>9}{count}"
            f"{1e3 * transfer['p50']:>10.3f}{total}{1e3 * each['wait_s']['mean']:>9.3f}{bus:>11}"
        )
    if len(rows["comm"]) > _MOST_ROWS:
        yield f"… {len(rows['comm']) - _MOST_ROWS} more rows: see --json"
    yield ""


def _buckets(rows: dict[str, Any]) -> str:
    gradients = {(each["rank"], each["step"]): each["gradients_s"] for each in rows["steps"]}
    done: dict[tuple[int, int], float] = {}
    for each in rows["buckets"]:
        key = each["rank"], each["step"]
        done[key] = max(done.get(key, 0.0), each["done_s"])
    tails = [done[key] - gradients[key][1] for key in done if gradients.get(key)]
    sizes = [each["bytes"] for each in rows["buckets"]]
    count = _count(round(len(rows["buckets"]) / len(done)), "DDP bucket")
    text = f"  {count} of {' to '.join(dict.fromkeys(map(format_bytes, (min(sizes), max(sizes)))))}"
    if tails:
        tail = 1e3 * fmean(tails)
        when = "after" if tail >= 0 else "before the end of"
        text += f"; the last one is done {abs(tail):.1f} ms {when} backward"
    return text


def _stragglers(rows: dict[str, Any]) -> Iterator[str]:
    named = [each for each in rows["stragglers"] if each["straggler"]]
    if len(rows["ranks"]) < 2:
        return
    if not named:
        yield "no rank makes the others wait"
    for each in named[:_MOST_ROWS]:
        cost = each["cost_s"]
        often = "is late" if each["steady"] else "is sometimes late"
        yield (
            f"rank {each['rank']} {often}: the others wait {1e3 * cost['mean']:.1f} ms per step "
            f"({100 * each['cost_share']:.0f} %) for it,"
        )
        yield (
            f"  {1e3 * cost['min']:.1f} to {1e3 * cost['max']:.1f} ms; in {each['steps']} of "
            f"{each['of_steps']} steps; last at {each['last']} of {each['of_collectives']} "
            "collectives"
        )
        if each["instead"]["seconds"] >= 5e-5:
            yield f"  it {excess_text(each['instead'])}"
    if named and len(rows["ranks"]) <= 8:
        yield ""
        yield from _wait_matrix(rows)


def _wait_matrix(rows: dict[str, Any]) -> Iterator[str]:
    ranks = [each["rank"] for each in rows["ranks"]]
    steps = {each["rank"]: each["steps"] for each in rows["ranks"]}
    caused = {each["rank"]: each["made_wait"] for each in rows["stragglers"]}
    yield "ms waited per step …" + "".join(f"{f'for {rank}':>7}" for rank in ranks)
    for waiter in ranks:
        cells = ""
        for late in ranks:
            seconds = caused.get(late, {}).get(str(waiter), 0.0) / steps[waiter]
            cells += f"{'·':>7}" if waiter == late else f"{1e3 * seconds:>7.1f}"
        yield f"{f'by {waiter}':>20}{cells}"


def _advice(rows: dict[str, Any]) -> Iterator[str]:
    if not rows["advice"]:
        return
    if len(rows["ranks"]) > 1:
        yield ""
    yield "to try, in this order; gains on the same cause do not add up"
    for each in rows["advice"][:_MOST_ADVICE]:
        gain = ""
        if each["gain_s"] is not None:
            share = f"{100 * each['gain_share']:.0f} % of the step"
            gain = f" (-{1e3 * each['gain_s']:.1f} ms, {share})"
        yield f"- {each['finding']}; {each['try']}{gain}"
