"""The rows of a sweep as CSV: a column for each figure."""

import csv
import io
from typing import Any


def csv_text(rows: list[dict[str, Any]]) -> str:
    """The rows with a head; the parts of time_us are columns of their own."""
    flat = [
        {key: value for key, value in row.items() if key != "time_us"}
        | {f"time_us_{name}": value for name, value in row["time_us"].items()}
        for row in rows
    ]
    text = io.StringIO()
    if flat:
        writer = csv.DictWriter(text, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    return text.getvalue()
