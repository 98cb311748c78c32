"""tutti report: one HTML page from runs and results."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Report:
    """Make one HTML page that opens offline: tutti report runs/lenet-20261115-120000

    Loss and throughput, where a step's time goes on every rank, who waits for whom, scaling with
    its losses, benchmarks, topology, environment and advice: whatever the paths hold. Several runs
    stand side by side. Needs plotly and jinja2: pip install 'tutti-torch[report]'.
    """

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, folders of `tutti profile` and `tutti scale`, files that --json wrote."""
    out: Path | None = None
    """The page (default: report.html in the folder, or beside the file; of several, here)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Report, "tutti report", arguments)
    if not options.paths:
        raise UsageError("name a run directory or a result: tutti report PATH…")
    first, *others = options.paths
    folder = Path() if others else first if first.is_dir() else first.parent
    out = options.out or folder / "report.html"

    from tutti.report.collect import ACCEPTED, collect
    from tutti.report.page import build, check_installed

    check_installed()
    for path in options.paths:
        if not path.exists():
            raise UsageError(f"{path}: there is no such file or folder: name {ACCEPTED}")
    check_writable("--out", out)
    material = collect(options.paths)
    page = build(material)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(page, encoding="utf-8")
        beside.replace(out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"--out {out}: {error.strerror}: choose another file") from None
    for note in material.notes:
        print(f"note: {note}", file=sys.stderr)
    print(out)
    return 0
