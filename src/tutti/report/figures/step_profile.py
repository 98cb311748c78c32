"""Profiled steps by rank: parts, which rank waited for which, stragglers, utilization, memory."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tutti.measure.spread import relative_range
from tutti.profile.step_breakdown import PARTS
from tutti.report import plot
from tutti.report.plot import Figure, HalfFigure, Row, Table, column, table
from tutti.report.sources import Run

_MOST_RANKS = 48  # in one plot
_MOST_STRAGGLERS = 24
_GIB = 1 << 30


def shown_ranks(profile: dict[str, Any]) -> list[Row]:
    """The rows to draw: the first ranks and the stragglers. Tables have the rows of all ranks."""
    rows: list[Row] = profile["ranks"]
    if len(rows) <= _MOST_RANKS:
        return rows
    late = {each["rank"] for each in (profile.get("stragglers") or [])[: _MOST_RANKS // 4]}
    first = [row for row in rows if row["rank"] not in late][: _MOST_RANKS - len(late)]
    chosen = first + [row for row in rows if row["rank"] in late]
    return sorted(chosen, key=lambda row: int(row["rank"]))


def ranks_left_out(profile: dict[str, Any]) -> str:
    """A sentence about the ranks that are not drawn, or an empty string."""
    drawn, total = len(shown_ranks(profile)), len(profile["ranks"])
    return "" if drawn == total else f" {drawn} of {total} ranks are drawn, with all stragglers."


def rank_bars(
    profile: dict[str, Any], name: str, source: str, colour: str, unit: str, **more: Any
) -> dict[str, Any]:
    """A bar for each rank that is drawn; `source` as for `plot.column`."""
    rows = shown_ranks(profile)
    labels = [f"rank {row['rank']}" for row in rows]
    return plot.bar(name, labels, column(rows, source), colour, unit, **more)


def bars_height(rows: Sequence[Any], each: int = 34) -> int:
    """The height in pixels of a plot with a bar for each row."""
    return 150 + min(max(2, len(rows)) * each, max(420, 16 * len(rows)))


def parts(run: Run) -> Iterator[Figure]:
    """The parts of a step on each rank, in per cent and in milliseconds."""
    profile = run.profile or {}
    rows = shown_ranks(profile)
    for title, unit, key in (
        ("Parts of the step, in per cent", "%", "100*parts_share"),
        ("Parts of the step, in milliseconds", "ms", "1e3*parts_s"),
    ):
        about = f"Mean of {max(row['steps'] for row in rows)} steps."
        layout = plot.bar_layout("ms", bars_height(rows, 26), barmode="stack")
        whole = "1e3*step_s.mean"
        if unit == "%":
            about = f"Every moment of a step is in exactly one part.{ranks_left_out(profile)}"
            layout["xaxis"] = plot.axis("%", range=[0, 100])
            whole = "whole"
        columns = [f"{plot.PART_NAMES[name]} {unit}={key}.{name}" for name in PARTS]
        yield HalfFigure(
            title,
            about,
            table(
                [row | {"whole": 100.0} for row in profile["ranks"]],
                ", ".join(["rank", f"step {unit}={whole}", *columns]),
            ),
            [
                rank_bars(
                    profile,
                    plot.PART_NAMES[name],
                    f"{key}.{name}",
                    plot.PART_COLOURS[name],
                    unit,
                )
                for name in PARTS
                if any(column(profile["ranks"], f"{key}.{name}"))
            ],
            layout,
        )


def waits(run: Run) -> Iterator[Figure]:
    """Which rank waited for which other rank, and the stragglers."""
    profile = run.profile or {}
    ranks = [row["rank"] for row in profile["ranks"]]
    if len(ranks) < 2:
        return
    total: dict[tuple[int, int], float] = defaultdict(float)
    steps: dict[int, int] = defaultdict(int)
    for step in profile["steps"]:
        steps[step["rank"]] += 1
        for late, seconds in step["waited_for_s"].items():
            total[step["rank"], int(late)] += seconds
    cost = {late: sum(total[rank, late] for rank in ranks) for late in ranks}
    columns = sorted(sorted(ranks, key=lambda rank: -cost[rank])[:_MOST_RANKS])
    drawn = "" if columns == ranks else f" The {len(columns)} most expensive ranks have a column."
    cells = [
        [None if a == b else 1e3 * total[a, b] / max(1, steps[a]) for b in columns] for a in ranks
    ]
    labels = [f"rank {rank}" for rank in ranks]
    yield HalfFigure(
        "Which rank waited for which",
        "Milliseconds per step in which the rank of the row neither computed nor moved data, "
        f"because the rank of the column had not arrived.{drawn}",
        Table(
            ["rank", *(f"for rank {rank} ms" for rank in columns)],
            [(rank, *row) for rank, row in zip(ranks, cells, strict=True)],
        ),
        [
            plot.heatmap(
                [f"for {rank}" for rank in columns],
                labels,
                cells,
                "ms",
                hovertemplate="%{y} waited %{z:.2f} ms per step %{x}<extra></extra>",
            )
        ],
        plot.heatmap_layout(labels),
    )
    if rows := profile.get("stragglers"):
        yield _stragglers(rows, len(ranks))


def _stragglers(rows: list[Row], ranks: int) -> Figure:
    shown = rows[:_MOST_STRAGGLERS]
    costs = [row["cost_s"] for row in shown]
    named = [
        row | {"part": plot.PART_NAMES.get(row["instead"]["part"], row["instead"]["part"])}
        for row in rows
    ]
    bars = {
        "type": "bar",
        "x": [f"rank {row['rank']}" for row in shown],
        "y": column(costs, "1e3*mean"),
        "error_y": {
            "type": "data",
            "array": [1e3 * (cost["max"] - cost["mean"]) for cost in costs],
            "arrayminus": [1e3 * (cost["mean"] - cost["min"]) for cost in costs],
            "thickness": 1.2,
        },
        "marker": {"color": plot.VERMILION},
        "width": 0.5,
        "hovertemplate": "others wait %{y:.2f} ms per step for %{x}<extra></extra>",
    }
    return HalfFigure(
        "Late ranks",
        "Time per step that the others lost to each rank: bars are the mean, error bars the "
        "least and the most over steps. The last columns of the table show where to look.",
        table(
            named,
            "rank, others wait ms=1e3*cost_s.mean, least ms=1e3*cost_s.min, "
            "most ms=1e3*cost_s.max, of the step %=100*cost_share, in steps=steps, "
            "of steps=of_steps, last at=last, of collectives=of_collectives, longer in=part, "
            "ms longer=1e3*instead.seconds",
        ),
        [bars],
        {
            "height": min(620, 190 + 34 * ranks),
            "xaxis": {"type": "category"},
            "yaxis": plot.axis("ms per step", rangemode="tozero"),
        },
    )


def utilization(run: Run) -> Iterator[Figure]:
    """The share of the step in which each rank computes."""
    profile = run.profile or {}
    imbalance = _imbalance([row["busy"] for row in profile["ranks"]])
    height = bars_height(shown_ranks(profile))
    yield HalfFigure(
        "Utilization by rank",
        f"Share of the step in which the rank computes; {imbalance}.{ranks_left_out(profile)}",
        table(profile["ranks"], "rank, computing %=100*busy"),
        [rank_bars(profile, "computing", "100*busy", plot.BLUE, "% of the step", width=0.6)],
        plot.bar_layout("%", height, xaxis=plot.axis("%", range=[0, 100])),
    )


def memory(run: Run) -> Iterator[Figure]:
    """Peak memory of device and process, if the traces have it."""
    profile = run.profile or {}
    kinds = {
        name: (f"{1 / _GIB}*{key}?", colour, values)
        for name, key, colour in (
            ("device", "memory_bytes", plot.PURPLE),
            ("process", "host_memory_bytes", plot.SKY),
        )
        if (values := [row[key] for row in profile["ranks"] if row.get(key)])
    }
    if not kinds:
        return
    imbalances = "; ".join(f"{name}: {_imbalance(kinds[name][2])}" for name in kinds)
    columns = ["rank", *(f"{name} GiB={source}" for name, (source, _, _) in kinds.items())]
    yield HalfFigure(
        "Memory by rank",
        f"Peak use. {imbalances.capitalize()}.{ranks_left_out(profile)}",
        table(profile["ranks"], ", ".join(columns)),
        [
            rank_bars(profile, name, source, colour, "GiB")
            for name, (source, colour, _) in kinds.items()
        ],
        plot.bar_layout(
            "GiB",
            bars_height(shown_ranks(profile)),
            xaxis=plot.axis("GiB", rangemode="tozero"),
            barmode="group",
            showlegend=True,
        ),
    )


def _imbalance(values: list[float]) -> str:
    difference = relative_range(values)
    if len(values) < 2:
        return "only one rank"
    if difference is None:
        return "nothing to compare"
    return f"ranks differ by {100 * difference:.1f} %"
