"""Which ranks a figure shows, when there are more than the eye can follow."""

from collections.abc import Sequence
from typing import Any

MOST = 48


def shown(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the first ranks, and of those that are late; tables have all."""
    rows: list[dict[str, Any]] = profile["ranks"]
    if len(rows) <= MOST:
        return rows
    late = {each["rank"] for each in (profile.get("stragglers") or [])[: MOST // 4]}
    first = [row for row in rows if row["rank"] not in late][: MOST - len(late)]
    return sorted(
        first + [row for row in rows if row["rank"] in late], key=lambda row: int(row["rank"])
    )


def left_out(profile: dict[str, Any]) -> str:
    """A sentence about the others, or nothing."""
    drawn, all_ = len(shown(profile)), len(profile["ranks"])
    if drawn == all_:
        return ""
    return f" {drawn} of {all_} ranks are drawn, those that are late among them."


def names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """As axes name them."""
    return [f"rank {row['rank']}" for row in rows]


def height(rows: Sequence[Any], each: int = 26) -> int:
    """Of a plot with a bar for each of these, in pixels."""
    return 150 + min(max(2, len(rows)) * each, max(420, 16 * len(rows)))
