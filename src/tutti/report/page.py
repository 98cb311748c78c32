"""Build the page: one HTML file that loads nothing from the network.

Text from a result file cannot run as code. The template escapes all text, and figures are embedded
as JSON that cannot close its script tag. The content security policy of the page forbids all
requests, and allows only two scripts, which are identified by their hashes.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from tutti.report.figures import (
    bench_plots,
    machine_health,
    scaling_curves,
    step_profile,
    step_timeline,
    training_curves,
)
from tutti.report.plot import plotly_data
from tutti.report.sources import ReportSources, Run, wrong_type
from tutti.report.summary import sentences, tiles
from tutti.world.errors import UsageError

# (title of the section, kind of sources, functions that yield the figures of a source). `select`
# describes the kinds. To add a figure, write a generator function and list it here.
SECTIONS: tuple[tuple[str, str, tuple[Callable[[Any], Iterator[Any]], ...]], ...] = (
    ("Runs", "runs", (training_curves.runs_table, training_curves.step_comparison)),
    (
        "Training",
        "runs",
        (training_curves.curves, training_curves.memory_by_cause, training_curves.waiting),
    ),
    ("Scaling", "tutti.scale", (scaling_curves.scaling, scaling_curves.learning_rates)),
    (
        "The step",
        "profiled",
        (
            step_profile.parts,
            step_timeline.timeline,
            step_timeline.operators,
            step_profile.waits,
            step_profile.overlap,
            step_profile.utilization,
            step_profile.memory,
            step_profile.communication,
        ),
    ),
    ("Collectives", "tutti.bench.collectives", (bench_plots.collectives,)),
    ("Bandwidth", "tutti.bench.bandwidth", (bench_plots.bandwidth,)),
    ("Symmetric memory", "tutti.bench.symmetric", (bench_plots.symmetric,)),
    ("Pairs", "tutti.bench.pairs", (bench_plots.pairs,)),
    ("Parity", "tutti.parity", (machine_health.parity,)),
    ("Topology", "tutti.topo tutti.machine", (machine_health.topology,)),
    ("Health", "tutti.doctor", (machine_health.checks,)),
    ("Other results", "other", (machine_health.result_tables,)),
    ("Environment", "all", (machine_health.environments,)),
)
# Tables with more rows stay collapsed when the page is printed.
_LONG_TABLE = 60
# These exceptions mean that a value in a file has a wrong type. In this case, no page is written.
# KeyError is not listed, because a file of an older version may lack a key. In that case, only the
# figure is omitted, and the page has a note.
_WRONG_TYPE = (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)


def select(sources: ReportSources, kind: str) -> Sequence[Any]:
    """Return the sources of a section.

    `kind` is "runs", "profiled", "all", "other", or names of schemas, separated by spaces.
    """
    if kind == "runs":
        return [sources.runs]
    if kind == "profiled":
        return sources.profiled
    if kind == "all":
        return [sources]
    if kind == "other":
        with_figures = {schema for _, kinds, _ in SECTIONS for schema in kinds.split()}
        return [result for result in sources.results if result.schema not in with_figures]
    return sources.of_schema(*kind.split())


def check_installed() -> None:
    """Raise UsageError if jinja2 or plotly is not installed. Call this before files are read."""
    for package in ("jinja2", "plotly"):
        if find_spec(package) is None:
            raise UsageError(
                f"the page needs {package}, which is not installed. "
                "Run pip install 'tutti-torch[report]'."
            )


def build_page(sources: ReportSources) -> str:
    """Return the HTML page as text."""
    check_installed()
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    notes = list(sources.notes)
    for run in sources.profiled:
        notes += [f"{run.name}: {note}" for note in (run.profile or {}).get("notes") or []]
    sections = list(_sections(sources, notes))
    _check_shown(sources, sections, notes)
    drawn = {
        name: plotly_data(figure)
        for section in sections
        for group in section["groups"]
        for name, figure in group["figures"]
        if figure.traces
    }
    folder = files("tutti.report")
    script = (folder / "page.js").read_text()
    library = get_plotlyjs()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(show=show, value=repr, picture=_svg_data_url, code=_code)
    return environment.from_string((folder / "page.html").read_text()).render(
        title=sources.title,
        style=Markup((folder / "page.css").read_text()),
        library=Markup(library),
        script=Markup(script),
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in (library, script)),
        figures=Markup(script_json(drawn)),
        summary=list(_without_damage(sentences, sources, "the summary", notes)),
        tiles=list(_without_damage(tiles, sources, "the summary's numbers", notes)),
        advice=list(_without_damage(_advice, sources, "the advice", notes)),
        sections=sections,
        notes=list(dict.fromkeys(notes)),
        long=_LONG_TABLE,
    )


def _sections(sources: ReportSources, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the template variables of each section (see page.html)."""
    count = 0
    for number, (title, kind, makers) in enumerate(SECTIONS):
        groups = []
        runs: dict[str, None] = {}  # the runs with training curves, in order
        for source in select(sources, kind):
            name = getattr(source, "name", "")
            figures = []
            for make in makers:
                what = f"{title} of {name}" if name else title
                for figure in _without_damage(make, source, what, notes):
                    count += 1
                    figures.append((f"figure{count}", figure))
                    if figure.x_axes:
                        runs |= dict.fromkeys(trace["run"] for trace in figure.traces)
            if figures:
                groups.append({"name": name, "figures": figures, "source": source})
        if groups:
            yield {"id": f"section{number}", "title": title, "groups": groups, "runs": list(runs)}


def _without_damage(
    make: Callable[[Any], Iterator[Any]], source: Any, what: str, notes: list[str]
) -> Iterator[Any]:
    """Yield the items of `make(source)`.

    If a key is missing in the source, stop and add a note. If a value has a wrong type, raise
    UsageError.
    """
    try:
        yield from make(source)
    except KeyError as error:
        notes.append(
            f"{what}: a part is omitted, because the file has no key {error}. An older version of "
            "tutti may have written the file."
        )
    except _WRONG_TYPE as error:
        path = next((part.path for part in _parts(source) if _fails(make, source, part)), what)
        raise UsageError(wrong_type(path, error)) from None


def _parts(source: Any) -> Sequence[Any]:
    """Return the runs and results that `source` contains."""
    if isinstance(source, ReportSources):
        return source.all
    return source if isinstance(source, list) else [source]


def _fails(make: Callable[[Any], Iterator[Any]], whole: Any, part: Any) -> bool:
    """Return whether `make` also fails if `part` is the only source."""
    alone = part
    if isinstance(whole, ReportSources):
        is_run = isinstance(part, Run)
        alone = ReportSources(runs=[part] * is_run, results=[part] * (not is_run))
    elif isinstance(whole, list):
        alone = [part]
    try:
        list(make(alone))
    except _WRONG_TYPE:
        return True
    except KeyError:
        pass
    return False


def _check_shown(
    sources: ReportSources, sections: Sequence[dict[str, Any]], notes: Sequence[str]
) -> None:
    """Raise UsageError if the page has no figure for one of the result files."""
    shown = [id(group["source"]) for section in sections for group in section["groups"]]
    for result in sources.results:
        if id(result) not in shown:
            reason = next(
                (note for note in notes if f" of {result.name}: " in note), "the file has no rows"
            )
            raise UsageError(f"{result.path} has nothing to report: {reason}")


def _advice(sources: ReportSources) -> Iterator[tuple[str, dict[str, Any]]]:
    for run in sources.profiled:
        for advice in (run.profile or {}).get("advice") or []:
            yield (run.name if len(sources.profiled) > 1 else ""), advice


def show(cell: Any) -> str:
    """Return a table cell as text. Floats have four digits and, if possible, no exponent."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        if cell == 0 or 1e-3 <= abs(cell) < 1e4:
            return f"{cell:.4g}"
        return f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e12 else f"{cell:.3g}"
    if isinstance(cell, dict | list | tuple):
        return json.dumps(cell, ensure_ascii=False) if cell else "–"
    return str(cell)


def script_json(content: Any) -> str:
    """Return JSON without `<`, `>` and `&`, so that it cannot close its script tag."""
    text = json.dumps(content, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _code(text: str) -> Any:
    """Return escaped text with command-line flags and text in backticks in <code>."""
    from markupsafe import Markup, escape

    pattern = r"`([^`]+)`|(?<![\w-])(--[a-z][\w-]*)"
    code = re.sub(pattern, lambda found: f"<code>{found[1] or found[2]}</code>", str(escape(text)))
    return Markup(code)


def _svg_data_url(svg: str) -> str:
    """Return a data URL of an SVG. As an image, an SVG cannot run scripts or change page styles."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
