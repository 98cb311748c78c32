"""From figures to one file: nothing in it asks the network for anything.

Three things see to that and to it that no text from a file becomes code: the template escapes all
text, figures travel as data that no tag can end, and the page's own policy lets the browser run
only the scripts whose hashes it names and fetch nothing.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from tutti.report.collect import Material
from tutti.report.figure import Figure, for_plotly
from tutti.report.summary import sentences, tiles
from tutti.world.errors import UsageError

# Printed pages leave out the numbers of figures that have more rows: the page itself has them.
_LONG_TABLE = 60
# What a damaged or older file may lack: its figure is left out, and a line says so.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)


@dataclass(frozen=True)
class _Group:
    name: str
    figures: list[tuple[str, Figure]]


@dataclass(frozen=True)
class _Section:
    id: str
    title: str
    groups: list[_Group]


def check_installed() -> None:
    """Refuse before anything is read."""
    for package in ("jinja2", "plotly"):
        if find_spec(package) is None:
            raise UsageError(
                f"tutti report needs {package}, which is not installed: "
                "pip install 'tutti-torch[report]'"
            )


def build(material: Material) -> str:
    """The page as text."""
    check_installed()
    import jinja2
    from plotly.offline import get_plotlyjs

    notes = list(material.notes)
    for run in material.profiled:
        notes += [f"{run.name}: {note}" for note in (run.profile or {}).get("notes") or []]
    sections = list(_sections(material, notes))
    summary = list(_guarded(sentences, material, "the summary", notes))
    numbers = list(_guarded(tiles, material, "the summary's numbers", notes))
    drawn = {
        name: for_plotly(figure)
        for section in sections
        for group in section.groups
        for name, figure in group.figures
        if figure.traces
    }
    room = files("tutti.report")
    script = (room / "page.js").read_text()
    library = get_plotlyjs()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(show=show, value=value, picture=_picture)
    return environment.from_string((room / "page.html").read_text()).render(
        title=material.title,
        style=_raw((room / "page.css").read_text()),
        library=_raw(library),
        script=_raw(script),
        hashes=" ".join(f"'sha256-{_digest(each)}'" for each in (library, script)),
        figures=_raw(data_for_script(drawn)),
        summary=summary,
        tiles=numbers,
        advice=list(_guarded(_advice, material, "the advice", notes)),
        sections=sections,
        notes=list(dict.fromkeys(notes)),
        long=_LONG_TABLE,
    )


def _sections(material: Material, notes: list[str]) -> Iterator[_Section]:
    from tutti.report.figures import SECTIONS

    count = 0
    for number, section in enumerate(SECTIONS):
        groups = []
        for source in section.sources(material):
            name = getattr(source, "name", "")
            figures = []
            for maker in section.makers:
                what = f"{section.title}{f' of {name}' if name else ''}"
                for figure in _guarded(maker, source, what, notes):
                    count += 1
                    figures.append((f"figure{count}", figure))
            if figures:
                groups.append(_Group(name, figures))
        if groups:
            yield _Section(f"section{number}", section.title, groups)


def _guarded(
    make: Callable[[Any], Iterator[Any]], source: Any, what: str, notes: list[str]
) -> Iterator[Any]:
    try:
        yield from make(source)
    except _DAMAGE as error:
        kind = "is missing" if isinstance(error, KeyError) else ""
        notes.append(f"{what}: a part is left out, its file is not as expected: {error} {kind}")


def _advice(material: Material) -> Iterator[tuple[str, dict[str, Any]]]:
    several = len(material.profiled) > 1
    for run in material.profiled:
        for each in (run.profile or {}).get("advice") or []:
            yield (run.name if several else ""), each


def show(cell: Any) -> str:
    """A cell for people: four digits, no exponent where it can be helped."""
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


def value(cell: Any) -> str:
    """A cell for sorting and copying: a number in full, or the text."""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return "" if cell is None else show(cell)
    return repr(cell)


def data_for_script(content: Any) -> str:
    """JSON that no tag in it can end: `</script>` and `<!--` cannot occur."""
    text = json.dumps(content, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _raw(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _picture(svg: str) -> str:
    """As an image: its rules hold for nothing else on the page, and nothing in it can run."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
