"""An explanation as text: tables of 80 columns, or of 60; sentences as wide as they may be."""

from collections.abc import Iterator
from statistics import median
from textwrap import wrap
from typing import Any

from tutti.measure.units import format_bytes
from tutti.profile.explain import RATIO_LIMIT
from tutti.profile.parts import PART_TITLES, PARTS

_FULL_WIDTH = 80
_MOST_RANKS = 16
_MOST_ROWS = 8
_MOST_ADVICE = 5
_MUCH = 1.1  # of recording's cost: below, the few steps before do not tell


def lines(rows: dict[str, Any], width: int = _FULL_WIDTH) -> Iterator[str]:
    """The lines to print."""
    for line in _lines(rows, width < _FULL_WIDTH):
        # What is longer is a sentence: tables keep to their width.
        indent = "    " if line.startswith(" ") else "  "
        yield from _wrapped(line, width, indent) if len(line) > width else [line]


def _lines(rows: dict[str, Any], narrow: bool) -> Iterator[str]:
    ranks = rows["ranks"]
    shown = ranks if len(ranks) <= _MOST_RANKS else _interesting(rows)
    backends = "+".join(sorted({each["backend"] for each in ranks}))
    clock = "host" if ranks[0]["clock_of"] == "host" else "device"
    yield (
        f"{_count(max(each['steps'] for each in ranks), 'step')} of "
        f"{_count(len(ranks), 'rank')}, {backends}; the {clock}'s time, in % of the step"
    )
    yield ""
    titles = {name: PART_TITLES.get(name, name) for name in PARTS}
    room = {name: len(title) + 1 if narrow else 8 for name, title in titles.items()}
    head = "rank   ms" if narrow else "rank  step ms"
    yield head + "".join(f"{titles[name]:>{room[name]}}" for name in PARTS)
    for each in shown:
        step, digits = 1e3 * each["step_s"]["mean"], 0 if narrow else 1
        shares = (f"{100 * each['parts_share'][n]:>{room[n]}.{digits}f}" for n in PARTS)
        time = f"{_short(step):>5}" if narrow else f"{step:>9.2f}"
        yield f"{each['rank']:>4}{time}{''.join(shares)}"
    if len(shown) < len(ranks):
        yield f"      … {len(ranks) - len(shown)} more ranks: --json has them"
    yield from _balance(ranks)
    yield ""
    yield from _communication(rows, narrow)
    yield from _late(rows)
    yield from _to_try(rows)
    for note in rows["notes"]:
        yield f"note: {note}"


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _interesting(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Of many ranks: the first few, and those that are late."""
    late = {each["rank"] for each in rows["stragglers"][:4]}
    return [each for n, each in enumerate(rows["ranks"]) if n < _MOST_RANKS or each["rank"] in late]


def _balance(ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Busy and memory with their spread over ranks."""
    said = "busy " + _range([100 * each["busy"] for each in ranks], "%")
    for name, key in (("memory", "memory_bytes"), ("process memory", "host_memory_bytes")):
        known = [each[key] / 1e6 for each in ranks if each[key]]
        if known:
            said += f"; {name} {_range(known, 'MB')}"
            break
    yield said
    longer = median(each["recording_overhead"] or 1 for each in ranks)
    if longer > _MUCH:
        yield f"recorded, steps took {longer:.2f} × as long as the few before"


def _range(values: list[float], unit: str) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _communication(rows: dict[str, Any], narrow: bool) -> Iterator[str]:
    ranks = rows["ranks"]
    if not rows["comm"]:
        yield "nothing is communicated"
        return
    ratio = sum(each["comm_ratio"] for each in ranks) / len(ranks)
    overlaps = [each["overlap"] for each in ranks if each["overlap"] is not None]
    verdict = "within" if ratio <= RATIO_LIMIT else "above"
    overlap = f"; overlap {100 * sum(overlaps) / len(overlaps):.0f} %" if overlaps else ""
    yield (
        f"communication, no waiting: {100 * ratio:.0f} % of the step, {verdict} the "
        f"{100 * RATIO_LIMIT:.0f} % rule{overlap}"
    )
    whole = sum(each["step_s"]["mean"] for each in ranks) / len(ranks)
    for each in rows["axes"]:
        shares = (100 * each[f"{name}_s"] / whole for name in ("hidden", "exposed", "wait"))
        yield "  {:<6} hidden {:4.1f} %, exposed {:4.1f} %, waiting {:4.1f} %".format(
            each["axis"] or "other", *shares
        )
    yield from _buckets(rows)
    yield ""
    if narrow:
        yield "operation      axis      size    p50 ms waits ms busbw GB/s"
    else:
        yield "operation      axis  ranks    size count    p50 ms total ms waits ms busbw GB/s"
    for each in rows["comm"][:_MOST_ROWS]:
        size = "?" if each["bytes"] is None else format_bytes(each["bytes"])
        bus = "" if each["busbw_gbs"] is None else f"{each['busbw_gbs']:.3f}"
        moved = each["transfer_s"]
        group = "" if narrow else f"{each['ranks']:>5}"
        count = "" if narrow else f"{each['count']:>6}"
        total = "" if narrow else f"{1e3 * moved['total']:>9.2f}"
        yield (
            f"{each['op']:<15}{each['axis'] or '?':<6}{group}{size:>8}{count}"
            f"{1e3 * moved['p50']:>10.3f}{total}{1e3 * each['wait_s']['mean']:>9.3f}{bus:>11}"
        )
    if len(rows["comm"]) > _MOST_ROWS:
        yield f"… {len(rows['comm']) - _MOST_ROWS} more rows: --json has them"
    yield ""


def _buckets(rows: dict[str, Any]) -> Iterator[str]:
    found = rows["buckets"]
    if not found:
        return
    steps = {(each["rank"], each["step"]): each["gradients_s"] for each in rows["steps"]}
    done: dict[tuple[int, int], float] = {}
    for each in found:
        key = each["rank"], each["step"]
        done[key] = max(done.get(key, 0.0), each["done_s"])
    tails = [done[key] - steps[key][1] for key in done if steps.get(key)]
    sizes = [each["bytes"] for each in found]
    count = round(len(found) / len(done))
    said = f"  {count} bucket{'s' * (count != 1)} of "
    said += " to ".join(dict.fromkeys(map(format_bytes, (min(sizes), max(sizes)))))
    if tails:
        tail = 1e3 * sum(tails) / len(tails)
        when = "after" if tail >= 0 else "before the end of"
        said += f"; the last is done {abs(tail):.1f} ms {when} backward"
    yield said


def _to_try(rows: dict[str, Any]) -> Iterator[str]:
    found = rows["advice"]
    if not found:
        return
    if len(rows["ranks"]) > 1:
        yield ""
    yield "to try, in this order; gains of one cause do not add up"
    for each in found[:_MOST_ADVICE]:
        gain = ""
        if each["gain_s"] is not None:
            gain = (
                f" (-{1e3 * each['gain_s']:.1f} ms, {100 * each['gain_share']:.0f} % of the step)"
            )
        yield f"- {each['finding']}; {each['try']}{gain}"


def _late(rows: dict[str, Any]) -> Iterator[str]:
    named = [each for each in rows["stragglers"] if each["straggler"]]
    if len(rows["ranks"]) < 2:
        return
    if not named:
        yield "no rank makes the others wait"
    for each in named[:_MOST_ROWS]:
        cost = each["cost_s"]
        often = "is late" if each["steady"] else "is late at times"
        yield (
            f"rank {each['rank']} {often}: others wait {1e3 * cost['mean']:.1f} ms of a step "
            f"({100 * each['cost_share']:.0f} %) for it,"
        )
        yield (
            f"  {1e3 * cost['min']:.1f} to {1e3 * cost['max']:.1f} ms; in {each['steps']} of "
            f"{each['of_steps']} steps; last at {each['last']} of {each['of_collectives']} "
            "collectives"
        )
        instead = each["instead"]
        if instead["seconds"] >= 5e-5:
            part = PART_TITLES.get(instead["part"], instead["part"])
            yield f"  it has {1e3 * instead['seconds']:.1f} ms more of {part} than they have"
    if named and len(rows["ranks"]) <= 8:
        yield ""
        yield from _matrix(rows)


def _matrix(rows: dict[str, Any]) -> Iterator[str]:
    ranks = [each["rank"] for each in rows["ranks"]]
    steps = {each["rank"]: each["steps"] for each in rows["ranks"]}
    caused = {each["rank"]: each["made_wait"] for each in rows["stragglers"]}
    yield "ms of a step waited …" + "".join(f"{f'for {rank}':>7}" for rank in ranks)
    for waiter in ranks:
        cells = ""
        for late in ranks:
            seconds = caused.get(late, {}).get(str(waiter), 0.0) / steps[waiter]
            cells += f"{'·':>7}" if waiter == late else f"{1e3 * seconds:>7.1f}"
        yield f"{f'by {waiter}':>21}{cells}"
