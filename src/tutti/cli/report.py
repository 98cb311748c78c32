"""tutti report: one HTML page from runs and results."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable
from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Report:
    """Write one HTML page that works offline: tutti report runs/lenet-20261115-120000

    The page shows what the paths hold: loss and throughput, where the time of a step goes on every
    rank, which rank waits for which, scaling and its losses, benchmarks, topology, environment and
    advice. Several runs stand side by side. Needs plotly and jinja2: pip install
    'tutti-torch[report]'.
    """

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, folders of `tutti profile` and `tutti scale`, files written by --json."""
    out: Path | None = None
    """The page (default: report.html in the folder, beside the file, or here for several)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Report, "tutti report", arguments)
    if not options.paths:
        raise UsageError("name a run directory or a result file: tutti report PATH…")
    first, *others = options.paths
    folder = Path() if others else first if first.is_dir() else first.parent
    out = options.out or folder / "report.html"

    from tutti.report.page import build_page, check_installed
    from tutti.report.sources import ACCEPTED, read_sources

    check_installed()
    for path in options.paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist: name {ACCEPTED}")
    check_writable("--out", out)
    sources = read_sources(options.paths)
    page = build_page(sources)
    try:
        write_atomically(out, page)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}: choose another file") from None
    for note in sources.notes:
        print(f"note: {note}", file=sys.stderr)
    print(out)
    return 0
