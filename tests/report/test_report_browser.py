"""The page in a real browser: plots, sorting, dark mode, phone, print, no network requests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from report.browser import CHROMIUM, Page, browser
from report.cases import HOSTILE, ROOT, SCALE, hostile_result, report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# One source of each kind.
RESULTS = (
    SCALE,
    *(
        ROOT / "benchmarks" / name
        for name in (
            "cpu_all_reduce_epyc2_20261115_run1.json",
            "gpu_bandwidth_h200_20261115.json",
            "cpu_pairs_epyc2_20261115.json",
            "gpu_symmetric_h200_20261115.json",
            "gpu_parity_h200_20261115.json",
            "gpu_doctor_h200_20261115.json",
        )
    ),
    ROOT / "tests/machine/machines/h100-nvswitch.json",
)
# A mark that plotly drew: a bar, a point, a line or the image of a heat map.
MARKS = (
    ".barlayer .point path, .scatterlayer .points path, .scatterlayer path.js-line, "
    ".heatmaplayer image"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def path(two_ranks: Path, one_rank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "page.html"
    return report(two_ranks, one_rank, *RESULTS, "--out", out)


@pytest.fixture
def opened(tab: Page, path: Path) -> Page:
    """Return the page in a wide window. It is opened only once, because that takes seconds."""
    tab.resize(1280)
    if tab.evaluate("location.href") != path.as_uri():
        tab.requests.clear()
        tab.errors.clear()
        tab.open(path)
    return tab


@contextlib.contextmanager
def _system_is_dark(tab: Page) -> Iterator[None]:
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    tab.call("Emulation.setEmulatedMedia", features=[dark])
    tab.settle()
    try:
        yield
    finally:
        tab.call("Emulation.setEmulatedMedia", features=[])
        tab.settle()


def _requested(tab: Page) -> list[str]:
    return [url for url in tab.requests if not url.startswith("data:")]


def test_every_plot_is_drawn_and_only_the_file_is_requested(opened: Page, path: Path) -> None:
    marks = opened.evaluate(
        f"[...document.querySelectorAll('.plot')].map(p => [p.closest('figure').querySelector("
        f"'h4').textContent, p.querySelectorAll('{MARKS}').length])"
    )

    assert len(marks) > 20
    assert [title for title, count in marks if not count] == []
    assert _requested(opened) == [path.as_uri()]
    assert opened.errors == []
    titles = {title for title, _ in marks}
    assert {
        "Loss",
        "Throughput",
        "Which rank waited for which",
        "Lost efficiency by cause",
    } <= titles
    assert {"Timeline of a step", "Longest operators", "Learning rate", "Gradient norm"} <= titles
    pictures = opened.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert pictures and all(pictures)


CURVES = (
    "(() => { const p = [...document.querySelectorAll('figure')].find(f => "
    "f.querySelector('h4').textContent === 'Loss').querySelector('.plot');"
    "return { titles: [p.layout.xaxis.title.text, p.layout.yaxis.type],"
    "runs: p.data.map(t => t.run), x: p.data[0].x, y: p.data.map(t => t.y) }; })()"
)


def _set(tab: Page, selector: str, change: str) -> None:
    """Change a control as a user does, and wait until the curves are drawn."""
    tab.evaluate(
        f"(() => {{ const e = document.querySelector(`{selector}`); {change};"
        "for (const type of ['input', 'change'])"
        " e.dispatchEvent(new Event(type, { bubbles: true })); })()"
    )
    tab.settle()


def test_controls_change_the_axes_smooth_and_filter_the_curves(opened: Page) -> None:
    before = opened.evaluate(CURVES)
    assert before["titles"] == ["step", "linear"]
    assert before["runs"] == ["two-ranks", "one-rank"]

    _set(opened, "[name=x]", "e.value = 'samples'")
    samples = opened.evaluate(CURVES)
    assert samples["titles"][0] == "samples"
    assert samples["x"] != before["x"] and samples["y"] == before["y"]

    opened.click("[name=log]")
    opened.click("[name=run][value=one-rank]")
    _set(opened, "[name=smoothing]", "e.value = 0.5")
    opened.click("#theme")  # the choices survive another theme
    opened.click("#theme")
    changed = opened.evaluate(CURVES)
    assert changed["titles"] == ["samples", "log"]
    raw, smooth = changed["y"]
    mean = weight = 0.0
    expected = []
    for value in before["y"][0]:
        mean, weight = mean / 2 + value / 2, weight / 2 + 0.5
        expected.append(mean / weight)
    assert raw == before["y"][0] and smooth == pytest.approx(expected)

    opened.click("[name=log]")
    opened.click("[name=run][value=one-rank]")
    _set(opened, "[name=smoothing]", "e.value = 0")
    _set(opened, "[name=x]", "e.value = 'step'")
    assert opened.evaluate(CURVES) == before


def test_another_step_of_the_timeline_can_be_chosen(opened: Page) -> None:
    shown = (
        "(() => { const s = document.querySelector('select.variant');"
        "return [s.options.length, s.options[s.selectedIndex].text,"
        "s.closest('figure').querySelector('.plot').layout.xaxis.range[1]]; })()"
    )
    count, median, length = opened.evaluate(shown)
    assert count > 2 and median.endswith("median")

    _set(opened, "select.variant", "e.selectedIndex = 2")
    _, slowest, longer = opened.evaluate(shown)

    assert slowest.endswith("slowest")
    assert longer > length
    assert float(slowest.split()[1]) == pytest.approx(longer, rel=0.01)


def test_no_labels_of_an_axis_overlap(opened: Page) -> None:
    overlapping = (
        "[...document.querySelectorAll('.plot')].flatMap(p => ['xtick', 'ytick'].flatMap(kind => {"
        "const boxes = [...p.querySelectorAll(`.${kind} text`)].filter(t => t.textContent)"
        ".map(t => t.getBoundingClientRect());"
        "return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.left < b.right - 1 &&"
        "b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)"
        ".map(() => kind + ' of ' + p.getAttribute('aria-label'))); }))"
    )
    for width in (1280, 400):
        opened.resize(width)
        opened.settle()
        opened.wait_for(
            "[...document.querySelectorAll('.plot')].every(p => p.layout.width === p.clientWidth)"
        )
        assert opened.evaluate(overlapping) == []


def test_the_links_lead_to_the_sections_and_tables_open(opened: Page) -> None:
    sections = opened.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash)")

    assert len(sections) >= 10
    for section in sections:
        opened.click(f"nav a[href='{section}']")
        assert opened.evaluate("location.hash") == section
        assert opened.evaluate(
            f"document.querySelector('{section}').querySelector('figure, article') !== null"
        )
    opened.click("figure:has(.plot) details summary")
    assert opened.evaluate("document.querySelector('figure:has(.plot) details').open")
    assert len(_requested(opened)) == 1


def test_a_click_on_a_column_sorts_by_value_and_another_reverses(opened: Page) -> None:
    # Time of collectives in µs: as text, 1000 would come before 24.
    opened.evaluate(
        "(() => { const t = [...document.querySelectorAll('figure')].find(f => "
        "f.querySelector('h4').textContent === 'all_reduce: time'); t.id = 'timed';"
        "t.querySelector('details').open = true; })()"
    )
    column = "[...document.querySelectorAll('#timed tbody tr')].map(r => +r.cells[5].dataset.v)"
    unsorted = opened.evaluate(column)

    opened.click("#timed th:nth-child(6) button")
    rising = opened.evaluate(column)
    opened.click("#timed th:nth-child(6) button")
    falling = opened.evaluate(column)

    assert rising == sorted(unsorted) != unsorted
    assert falling == sorted(unsorted, reverse=True)


def test_copied_numbers_have_all_digits(opened: Page) -> None:
    opened.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    opened.evaluate(
        "[...document.querySelectorAll('details')].find(d => d.textContent.includes('speed-up'))"
        ".id = 'scaling'"
    )
    opened.click("#scaling summary")
    opened.click("#scaling .copy")
    text = opened.evaluate("navigator.clipboard.readText()")

    lines = [line.split("\t") for line in text.splitlines()]
    assert lines[0][:2] == ["ranks", "samples/s"]
    assert [line[:2] for line in lines[1:]] == [["1", "100.0"], ["2", "184.0"], ["4", "320.0"]]


def test_the_theme_follows_the_system_until_the_button_is_used(opened: Page) -> None:
    look = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle("
        "document.querySelector('.plot .xtick text')).fill, "
        "...new Set([...document.images].filter(i => i.offsetWidth).map(i => i.className))]"
    )
    light = opened.evaluate(look)

    with _system_is_dark(opened):
        dark = opened.evaluate(look)
        opened.click("#theme")
        chosen = opened.evaluate(look)

    assert [one == other for one, other in zip(light, dark, strict=True)] == [False] * 3
    assert chosen == light
    opened.click("#theme")
    assert opened.evaluate(look) == dark
    opened.click("#theme")


def test_the_page_fits_a_phone(opened: Page) -> None:
    opened.resize(360, 740)
    opened.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    opened.wait_for(
        "[...document.querySelectorAll('.plot svg.main-svg')].every(s => s.clientWidth <= 360)"
    )

    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")


def test_a_printed_page_is_light_with_open_tables_and_the_screen_is_restored(opened: Page) -> None:
    opened.evaluate(
        "addEventListener('beforeprint', () => { window.printed = [document.documentElement"
        ".dataset.theme, document.querySelectorAll('details:not(.long):not([open])').length]; })"
    )
    state = (
        "[document.documentElement.dataset.theme, "
        "document.querySelectorAll('details:not([open])').length]"
    )
    with _system_is_dark(opened):
        before = opened.evaluate(state)

        pdf = opened.pdf()

        assert pdf.startswith(b"%PDF")
        assert opened.evaluate("window.printed") == ["light", 0]
        assert opened.evaluate(state) == before


def test_text_from_files_is_shown_and_never_executed(tab: Page, tmp_path: Path) -> None:
    page = report(hostile_result(tmp_path), "--out", tmp_path / "hostile.html")
    tab.resize(1280)
    tab.requests.clear()
    tab.errors.clear()

    tab.open(page)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    tab.settle()

    assert tab.evaluate("typeof window.hit") == "undefined"
    assert _requested(tab) == [page.as_uri()]
    assert tab.errors == []  # and no violation of the content security policy
    assert tab.evaluate("document.images.length") == 0
    assert HOSTILE in tab.evaluate("document.body.innerText")
    legend = tab.evaluate("document.querySelector('.plot .legendtext').textContent")
    assert legend == HOSTILE
