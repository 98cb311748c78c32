"""Profiled steps by rank: parts, which rank waited for which, stragglers, utilization, memory."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tutti.measure.spread import relative_range
from tutti.profile.step_breakdown import PARTS
from tutti.report import plot
from tutti.report.plot import Figure, Table, milliseconds, percent
from tutti.report.sources import Run

_MOST_RANKS = 48  # in one plot
_MOST_STRAGGLERS = 24
_GIB = 1 << 30


def shown_ranks(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to draw: the first ranks and the stragglers; tables have all."""
    rows: list[dict[str, Any]] = profile["ranks"]
    if len(rows) <= _MOST_RANKS:
        return rows
    late = {each["rank"] for each in (profile.get("stragglers") or [])[: _MOST_RANKS // 4]}
    first = [row for row in rows if row["rank"] not in late][: _MOST_RANKS - len(late)]
    chosen = first + [row for row in rows if row["rank"] in late]
    return sorted(chosen, key=lambda row: int(row["rank"]))


def ranks_left_out(profile: dict[str, Any]) -> str:
    """A sentence about the ranks that are not drawn, or nothing."""
    drawn, total = len(shown_ranks(profile)), len(profile["ranks"])
    return "" if drawn == total else f" {drawn} of {total} ranks are drawn, with all stragglers."


def rank_labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [f"rank {row['rank']}" for row in rows]


def bars_height(rows: Sequence[Any], each: int = 34) -> int:
    """Pixels of a plot with a bar for each row."""
    return 150 + min(max(2, len(rows)) * each, max(420, 16 * len(rows)))


def parts(run: Run) -> Iterator[Figure]:
    """The parts of a step on each rank, in per cent and in milliseconds."""
    profile = run.profile or {}
    rows = shown_ranks(profile)
    for title, unit, key, scale in (
        ("Parts of the step, in per cent", "%", "parts_share", percent),
        ("Parts of the step, in milliseconds", "ms", "parts_s", milliseconds),
    ):
        about = f"Mean of {max(row['steps'] for row in rows)} steps."
        layout = plot.bar_layout("ms", bars_height(rows, 26), barmode="stack")
        if unit == "%":
            about = f"Every moment of a step is in exactly one part.{ranks_left_out(profile)}"
            layout["xaxis"] = plot.axis("%", range=[0, 100])
        yield Figure(
            title,
            about,
            Table(
                ["rank", f"step {unit}", *(f"{plot.PART_NAMES[name]} {unit}" for name in PARTS)],
                [
                    (
                        row["rank"],
                        100.0 if unit == "%" else milliseconds(row["step_s"]["mean"]),
                        *(scale(row[key][name]) for name in PARTS),
                    )
                    for row in profile["ranks"]
                ],
            ),
            [
                plot.bar(
                    plot.PART_NAMES[name],
                    rank_labels(rows),
                    [scale(row[key][name]) for row in rows],
                    plot.PART_COLOURS[name],
                    unit,
                )
                for name in PARTS
                if any(row[key][name] for row in profile["ranks"])
            ],
            layout,
            half=True,
        )


def waits(run: Run) -> Iterator[Figure]:
    """Which rank waited for which, and the stragglers."""
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
    yield Figure(
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
        half=True,
    )
    yield from _stragglers(profile)


def _stragglers(profile: dict[str, Any]) -> Iterator[Figure]:
    rows = profile.get("stragglers") or []
    if not rows:
        return
    shown = rows[:_MOST_STRAGGLERS]
    costs = [row["cost_s"] for row in shown]
    yield Figure(
        "Late ranks",
        "Time per step that the others lost to each rank: bars are the mean, error bars the "
        "least and the most over steps. The last columns of the table show where to look.",
        Table(
            [
                *("rank", "others wait ms", "least ms", "most ms", "of the step %"),
                *("in steps", "of steps", "last at", "of collectives", "longer in", "ms longer"),
            ],
            [
                (
                    row["rank"],
                    *(milliseconds(row["cost_s"][key]) for key in ("mean", "min", "max")),
                    percent(row["cost_share"]),
                    *(row[key] for key in ("steps", "of_steps", "last", "of_collectives")),
                    plot.PART_NAMES.get(row["instead"]["part"], row["instead"]["part"]),
                    milliseconds(row["instead"]["seconds"]),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "bar",
                "x": rank_labels(shown),
                "y": [1e3 * cost["mean"] for cost in costs],
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
        ],
        {
            "height": min(620, 190 + 34 * len(profile["ranks"])),
            "xaxis": {"type": "category"},
            "yaxis": plot.axis("ms per step", rangemode="tozero"),
        },
        half=True,
    )


def utilization(run: Run) -> Iterator[Figure]:
    """The share of the step in which each rank computes."""
    profile = run.profile or {}
    rows, every = shown_ranks(profile), profile["ranks"]
    imbalance = _imbalance([row["busy"] for row in every])
    yield Figure(
        "Utilization by rank",
        f"Share of the step in which the rank computes; {imbalance}.{ranks_left_out(profile)}",
        Table(["rank", "computing %"], [(row["rank"], percent(row["busy"])) for row in every]),
        [
            plot.bar(
                "computing",
                rank_labels(rows),
                [percent(row["busy"]) for row in rows],
                plot.BLUE,
                "% of the step",
                width=0.6,
            )
        ],
        plot.bar_layout("%", bars_height(rows), xaxis=plot.axis("%", range=[0, 100])),
        half=True,
    )


def memory(run: Run) -> Iterator[Figure]:
    """Peak memory of device and process, if the traces have it."""
    profile = run.profile or {}
    rows, every = shown_ranks(profile), profile["ranks"]
    kinds = [
        (name, key, colour)
        for name, key, colour in (
            ("device", "memory_bytes", plot.PURPLE),
            ("process", "host_memory_bytes", plot.SKY),
        )
        if any(row.get(key) for row in every)
    ]
    if not kinds:
        return

    def gibibytes(row: dict[str, Any], key: str) -> float | None:
        return row[key] / _GIB if row.get(key) else None

    imbalances = "; ".join(
        f"{name}: {_imbalance([row[key] for row in every if row.get(key)])}"
        for name, key, _ in kinds
    )
    yield Figure(
        "Memory by rank",
        f"Peak use. {imbalances.capitalize()}.{ranks_left_out(profile)}",
        Table(
            ["rank", *(f"{name} GiB" for name, _, _ in kinds)],
            [(row["rank"], *(gibibytes(row, key) for _, key, _ in kinds)) for row in every],
        ),
        [
            plot.bar(name, rank_labels(rows), [gibibytes(row, key) for row in rows], colour, "GiB")
            for name, key, colour in kinds
        ],
        plot.bar_layout(
            "GiB",
            bars_height(rows),
            xaxis=plot.axis("GiB", rangemode="tozero"),
            barmode="group",
            showlegend=True,
        ),
        half=True,
    )


def _imbalance(values: list[float]) -> str:
    difference = relative_range(values)
    if len(values) < 2:
        return "only one rank"
    if difference is None:
        return "nothing to compare"
    return f"ranks differ by {100 * difference:.1f} %"
