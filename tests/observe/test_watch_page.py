"""The page of tutti watch in Chromium, and what its server refuses."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from test_watch import data_parallel_job

from report.browser import CHROMIUM, browser
from tutti.observe.step_split import PARTS
from tutti.observe.watch import SAMPLE_COLUMNS, STEP_COLUMNS, JobWatch
from tutti.observe.watch_server import WatchServer, prometheus_text

RANKS, HOURS, STEPS_PER_S = 64, 8, 10


def long_job() -> JobWatch:
    """Return a job of 64 ranks that has run for 8 hours. Rank 7 is late in the last steps."""
    watch = JobWatch(None)
    random = np.random.default_rng(0)
    steps = HOURS * 3600 * STEPS_PER_S
    rows = np.zeros((1000, RANKS, len(STEP_COLUMNS)))
    rows[:, :, 0] = 0.08 * random.lognormal(0, 0.1, (1000, RANKS))
    rows[:, :, PARTS.index("exposed")] = 0.01
    for number in range(2, steps):
        watch.steps.add(number, rows[number % 1000])
    samples = np.tile(np.arange(1.0, len(SAMPLE_COLUMNS) + 1), (HOURS * 3600, 1))
    samples[:, SAMPLE_COLUMNS.index("loss")] = np.linspace(3, 1, len(samples))
    for second, sample in enumerate(samples):
        watch.samples.add(1e9 + second, sample)
    compute = 0.08 * random.lognormal(0, 0.1, (60, RANKS))
    compute[:, 7] += 0.12
    watch._next_step = steps
    watch._world = RANKS
    watch.add(data_parallel_job(compute, first=steps), 1e9 + HOURS * 3600)
    watch.close()
    return watch


@pytest.fixture(scope="module")
def watch() -> JobWatch:
    return long_job()


@contextmanager
def served(watch: JobWatch) -> Iterator[WatchServer]:
    server = WatchServer(watch)
    try:
        yield server
    finally:
        server.close()


def ask(
    server: WatchServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Return (code, headers, content) of a request. `Host=""` leaves the header out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, content


def test_only_the_owner_of_the_token_sees_anything(watch: JobWatch) -> None:
    with served(watch) as server, served(watch) as other:
        token = f"?token={server.token}"
        here = f"127.0.0.1:{server.port}"
        # The socket listens on the loopback address only.
        own = psutil.Process().net_connections("tcp")
        listening = {each.laddr.ip for each in own if each.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        assert server.token != other.token and len(server.token) >= 32

        for path in ("/", "/data", "/metrics"):
            code, headers, _ = ask(server, path + token)
            assert code == 200 and headers["cache-control"] == "no-store"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "access-control-allow-origin" not in headers
            bearer = {"Authorization": f"Bearer {server.token}"}
            assert ask(server, path, **bearer)[0] == 200
            for wrong in ("", "?token=", f"?token={other.token}", "?token=%ff%00é"[:-1]):
                code, _, content = ask(server, path + wrong)
                assert code == 403 and server.token not in content and watch.state["job"] == ""
            assert ask(server, path, Authorization="Bearer no")[0] == 403
            assert ask(server, path, Authorization=server.token)[0] == 403
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "",
                     "[::1]:80", "127.0.0.1:80:80", "0.0.0.0", "localhost:x"):  # fmt: skip
            code, _, content = ask(server, "/data" + token, Host=host)
            assert code == 403 and "ranks" not in content, host
        for origin in ("http://evil.example", "null", "http://localhost:1", f"https://{here}"):
            assert ask(server, "/data" + token, Origin=origin)[0] == 403, origin
        for origin in (f"http://{here}", ""):
            assert ask(server, "/data" + token, Origin=origin)[0] == 200
        # Through `ssh -L 9000:localhost:PORT`, the browser names another port.
        assert ask(server, "/" + token, Host="localhost:9000")[0] == 200
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
            code, _, content = ask(server, "/data", method, Authorization=f"Bearer {server.token}")
            assert code == 405 and "ranks" not in content, method
            assert ask(server, "/data", method)[0] == 403
        assert ask(server, "/etc/passwd" + token)[0] == 404
        assert ask(server, "/../../secret" + token)[0] == 404
        for query in ("value=__class__", "columns=0", "columns=x", "span=x", "columns=99999999"):
            assert ask(server, f"/data{token}&{query}")[0] == 400, query


def test_metrics_are_in_the_format_of_prometheus(watch: JobWatch) -> None:
    text = prometheus_text(watch.state | {"job": 'a"b\\c\nd'})
    for line in text.splitlines():
        sample = r'tutti_[a-z_]+\{([a-z]+="([^"\\]|\\.)*",?)*\} -?[0-9.e+-]+'
        assert re.fullmatch(rf"# (HELP|TYPE) tutti_\w+ .+|{sample}", line), line
    assert text.count("# TYPE tutti_step_part_seconds gauge") == 1
    assert 'tutti_late{job="a\\"b\\\\c\\nd",rank="7",host="a"} 1' in text
    assert 'tutti_alerts{job="a\\"b\\\\c\\nd",kind="straggler"} 1' in text


def test_the_history_of_a_long_job_is_small(watch: JobWatch) -> None:
    """8 hours of 64 ranks: the newest steps exactly, older ones as means, in one small answer."""
    with served(watch) as server:
        bearer = {"Authorization": f"Bearer {server.token}"}
        code, _, content = ask(server, "/data?columns=400", **bearer)
    answer = json.loads(content)
    last = HOURS * 3600 * STEPS_PER_S + 59
    assert code == 200 and len(content) < 2_000_000
    assert len(answer["heat"]["milliseconds"]) == RANKS
    assert len(answer["heat"]["steps"]) <= 400 and answer["heat"]["steps"][-1] == last
    assert answer["limits"] == [2, last]
    assert answer["samples"]["loss"][0] == pytest.approx(3, abs=0.05)
    assert answer["state"]["stragglers"][0]["rank"] == 7


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_renders_and_reacts(watch: JobWatch, tmp_path: Path) -> None:
    with served(watch) as server, browser() as page:
        page.resize(1200)
        page.call("Page.navigate", url=server.url)
        page.wait_for("typeof view === 'object' && view.answer !== null")
        assert "rank 7" in page.evaluate("document.getElementById('alerts').innerText")
        assert page.evaluate("view.answer.heat.milliseconds.length") == RANKS
        steps = "view.answer.heat.steps"
        drawn = "document.getElementById('heat').toDataURL()"
        live, picture = page.evaluate(f"{steps}[{steps}.length - 1]"), page.evaluate(drawn)
        assert page.evaluate(f"{steps}.length") == 100
        # Not a blank canvas, and late rank 7 is brighter than rank 6.
        bright = (
            "(rank => { const c = document.getElementById('heat'), r = devicePixelRatio;"
            "return c.getContext('2d').getImageData((c.width / r - 5) * r, (rank + 0.5) * "
            "view.height * r, 1, 1).data[1]; })"
        )
        assert page.evaluate(f"{bright}(7)") > page.evaluate(f"{bright}(6)")

        page.click("button[data-span='Infinity']")
        page.wait_for(f"{steps}[0] < 20000")
        assert page.evaluate(drawn) != picture
        page.evaluate(
            "(() => { const s = document.getElementById('scroll'); s.value = 100000;"
            "s.dispatchEvent(new Event('input')); })()"
        )
        page.click("button[data-span='1000']")
        page.wait_for(f"Math.abs({steps}[{steps}.length - 1] - 100000) < 1000")
        page.click("#live")
        page.wait_for(f"{steps}[{steps}.length - 1] === {live}")
        for value in ("wait", "made_wait", "step"):
            page.evaluate(
                f"(() => {{ const v = document.getElementById('value'); v.value = '{value}';"
                "v.dispatchEvent(new Event('change')); })()"
            )
            page.wait_for(f"view.answer.heat.value === '{value}'")
        page.click("#heat")
        page.wait_for("/Parts of step \\d+/.test(document.getElementById('split-title').innerText)")
        page.click("#live")
        for width in (500, 1600):
            page.resize(width)
            page.settle()
            wide = "document.documentElement.scrollWidth <= innerWidth"
            assert page.evaluate(wide), f"wider than {width} pixels"
            assert page.evaluate("document.getElementById('heat').clientWidth") > 0.8 * width
        page.screenshot(tmp_path / "watch.png")
        page.wait_for("document.querySelectorAll('#ranks tr').length === 65")
        # Nothing but this server was asked, and nothing has failed.
        hosts = {urlsplit(url).netloc for url in page.requests if url.startswith("http")}
        assert hosts == {f"127.0.0.1:{server.port}"}
        assert page.errors == []
