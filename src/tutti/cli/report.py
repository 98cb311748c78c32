"""tutti report: writes one HTML page from run directories and result files."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from tutti.cli.flags import InputPath, OutputFile, check_path, parse
from tutti.cli.results import write_result
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Report:
    """Write one HTML page that works offline: tutti report runs/lenet-20261115-120000

    The page shows what the given files contain: loss and throughput, the parts of the step time on
    every rank, which rank waits for which other rank, scaling efficiency, benchmarks, topology,
    environment and advice. Several runs are shown side by side. Needs plotly and jinja2: pip
    install 'tutti-torch[report]'.
    """

    paths: tyro.conf.Positional[tuple[InputPath, ...]]
    """Run directories, output directories of tutti profile and tutti scale, or files written with
    --json."""
    out: OutputFile | None = None
    """File for the page (default: report.html in the given directory or beside the given file; if
    several paths are given, in the current directory)."""


def main(arguments: list[str]) -> int:
    options = parse(Report, "tutti report", arguments)
    if not options.paths:
        raise UsageError("there is nothing to report. Add the path of a run directory or a file.")
    first, *others = options.paths
    folder = Path() if others else first if first.is_dir() else first.parent
    out = options.out or folder / "report.html"
    check_path("--out", out, OutputFile)

    from tutti.report.page import build_page, check_installed
    from tutti.report.sources import read_sources

    check_installed()
    sources = read_sources(options.paths)
    write_result("--out", out, build_page(sources))
    for note in sources.notes:
        print(f"note: {note}", file=sys.stderr)
    print(out)
    return 0
