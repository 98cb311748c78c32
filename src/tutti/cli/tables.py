"""Tables with rules between their cells, where there is room for them."""

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from tutti.bench.terminal import usable_width


def console() -> Console:
    """Standard output, as wide as it is: what goes into a file is not folded at 80 columns."""
    return Console(width=usable_width(sys.stdout), highlight=False)


def fits(table: Table, on: Console) -> bool:
    """Whether every cell of a table is on one line."""
    return Measurement.get(on, on.options.update(max_width=10_000), table).maximum <= on.width
