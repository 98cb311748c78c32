"""Serves the state of a watched job on 127.0.0.1: a page, its data as JSON, and /metrics.

Only GET is answered, nothing can be changed, and nothing that a client sends is unpickled or run.
Every request must have

- a Host header that names this computer as 127.0.0.1 or localhost. A page of another site that
  reaches this server through a DNS name of its own (DNS rebinding) has another Host. The port may
  differ, because `ssh -L` forwards from another port.
- no Origin header, or the one of this page. A browser sends the Origin of the page that asks.
- the token, as `?token=` or as `Authorization: Bearer`. It is drawn for each server, and compared
  in constant time.
"""

import hmac
import json
import math
import secrets
import shlex
import socketserver
import subprocess
import sys
import threading
import urllib.request
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from tutti.observe.step_split import PARTS
from tutti.observe.watch import SAMPLE_COLUMNS, SCHEMA, STEP_COLUMNS, Alert, JobWatch

_ADDRESS = "127.0.0.1"
_MAX_COLUMNS = 2000
_ALERT_SECONDS = 30.0
_PAGE = Path(__file__).parent / "watch.html"


class WatchServer:
    """An HTTP server in threads of this process, for one JobWatch."""

    def __init__(self, watch: JobWatch, port: int = 0) -> None:
        """Listen on a port of 127.0.0.1, or on any free port. Raise OSError if it is in use."""
        self.watch, self.token = watch, secrets.token_urlsafe(24)

        class Handler(_Handler):
            server_of = self

        self._server = _Server((_ADDRESS, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="tutti-watch", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{_ADDRESS}:{self.port}/?token={self.token}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    server_of: WatchServer
    timeout = 10
    server_version, sys_version = "tutti", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        if not self._is_allowed(query.get("token", "")):
            return
        watch = self.server_of.watch
        if address.path == "/":
            self._answer(200, "text/html; charset=utf-8", _PAGE.read_bytes())
        elif address.path == "/data":
            try:
                content = data(watch, query)
            except ValueError as error:
                self._answer(400, "text/plain", f"{error}\n".encode())
                return
            self._answer(200, "application/json", json.dumps(finite(content)).encode())
        elif address.path == "/metrics":
            text = prometheus_text(watch.state)
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", text.encode())
        else:
            self._answer(404, "text/plain", b"there are /, /data and /metrics\n")

    def _refuse_method(self) -> None:
        if self._is_allowed(""):
            self._answer(405, "text/plain", b"only GET is answered\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = (
        _refuse_method
    )

    def _is_allowed(self, token: str) -> bool:
        """Return whether the request may be answered, or refuse it with code 403."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        name, _, port = host.rpartition(":") if ":" in host else (host, "", "80")
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            token = bearer.strip()
        problem = ""
        if name not in (_ADDRESS, "localhost") or not port.isdecimal():
            problem = "the Host must be 127.0.0.1 or localhost"
        elif origin is not None and origin != f"http://{host}":
            problem = "requests of other pages are refused"
        elif not hmac.compare_digest(token.encode(), self.server_of.token.encode()):
            problem = "the token is missing or wrong: use the URL that tutti watch prints"
        if problem:
            self._answer(403, "text/plain", f"{problem}\n".encode())
        return not problem

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),  # the URL contains the token
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            (
                "Content-Security-Policy",
                "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'",
            ),
        ):
            self.send_header(name, value)
        if code == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed: the terminal shows the job."""


# -- content ---------------------------------------------------------------------------------------


def data(watch: JobWatch, query: dict[str, str]) -> dict[str, Any]:
    """Return the state and the history that the page draws. Raise ValueError for a wrong query.

    The history has the `span` steps up to `last`. `columns` is the largest number of columns, and
    `value` is a part of the step, `own`, `step` or `made_wait`. With `step`, the answer has the
    parts of all ranks in this step, or in the steps that were averaged with it.
    """
    value, columns = query.get("value", "own"), int(query.get("columns", "300"))
    last, span = float(query.get("last", "inf")), float(query.get("span", "inf"))
    if value not in ("own", "step", *STEP_COLUMNS) or not 1 <= columns <= _MAX_COLUMNS:
        raise ValueError(f"value={value}, columns={columns} is not known")
    with watch.lock:
        limits = watch.steps.limits()
        steps, rows = watch.steps.window(min(last, limits[1]) - span + 1, last, columns)
        times, samples = watch.samples.window(0, math.inf, columns)
        state = watch.state
        wanted = float(query.get("step", "nan"))  # no position is >= NaN
        numbers, parts = watch.steps.window(wanted, math.inf, 1 << 30)
    heat: list[list[float]] = []
    if steps:
        heat = np.round(1e3 * _value_of(rows, value), 3).T.tolist()
    found: dict[str, Any] = {
        "state": state,
        "heat": {"value": value, "steps": steps, "milliseconds": heat},
        "limits": limits,
        "samples": {"times": times}
        | {
            name: samples[:, index].tolist() if times else []
            for index, name in enumerate(SAMPLE_COLUMNS)
        },
    }
    if numbers:
        rows_of_step = [dict(zip(STEP_COLUMNS, row.tolist(), strict=True)) for row in parts[0]]
        found["detail"] = {"step": numbers[0], "parts_s": rows_of_step}
    return found


def _value_of(rows: Any, value: str) -> Any:
    """Return a value of each step and rank from rows with STEP_COLUMNS."""
    if value in STEP_COLUMNS:
        return rows[:, :, STEP_COLUMNS.index(value)]
    seconds = rows[:, :, : len(PARTS)].sum(axis=2)
    return seconds if value == "step" else seconds - rows[:, :, PARTS.index("wait")]


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def prometheus_text(state: dict[str, Any]) -> str:
    """Return the state in the text format of Prometheus."""
    lines: list[str] = []

    def add(name: str, about: str, rows: list[tuple[dict[str, Any], Any]]) -> None:
        known = [(labels, value) for labels, value in rows if value is not None]
        if known:
            lines.append(f"# HELP tutti_{name} {about}")
            lines.append(f"# TYPE tutti_{name} gauge")
        for labels, value in known:
            text = ",".join(f'{key}="{_escaped(str(each))}"' for key, each in labels.items())
            lines.append(f"tutti_{name}{{{text}}} {value:.9g}")

    job = {"job": state["job"]}
    ranks = [({**job, "rank": row["rank"], "host": row["host"]}, row) for row in state["ranks"]]
    add("up", "1 while a rank of the job runs", [(job, state["state"] in ("running", "stalled"))])
    add("step", "completed optimizer steps", [(job, state["step"])])
    for name in ("steps_per_s", "batches_per_s", "samples_per_s", "tokens_per_s"):
        add(name.replace("_s", "_second"), "throughput", [(job, state[name])])
    add("eta_seconds", "time until the last step", [(job, state["eta_s"])])
    add("loss", "training loss", [(job, state["loss"])])
    split = [({**labels, "part": n}, v) for labels, row in ranks for n, v in row["parts_s"].items()]
    add("step_part_seconds", "mean time of a part of the step", split)
    add("made_wait_seconds", "time of a step in which other ranks wait for this rank",
        [(labels, row["made_wait_s"]) for labels, row in ranks])  # fmt: skip
    add("late", "1 if the rank is late", [(labels, bool(row["late"])) for labels, row in ranks])
    add(
        "rank_up",
        "1 while the rank runs",
        [(labels, r["state"] == "running") for labels, r in ranks],
    )
    add("memory_bytes", "resident memory", [(labels, r["memory_bytes"]) for labels, r in ranks])
    add("cpu", "CPUs that the rank uses", [(labels, row.get("cpu")) for labels, row in ranks])
    gpus = [({**job, "gpu": gpu["index"]}, gpu) for gpu in state["gpus"]]
    for name in ("utilisation", "memory_bytes", "power_w", "temperature_c", "sm_mhz"):
        add(f"gpu_{name}", "from NVML", [(labels, gpu[name]) for labels, gpu in gpus])
    add("network_bytes_per_second", "sent and received", [
        ({**job, "interface": name}, rate)
        for name, rate in state["host"]["network_bytes_per_s"].items()
    ])  # fmt: skip
    counts = dict.fromkeys(("straggler", "loss", "throughput", "memory", "input"), 0)
    for alert in state["alerts"]:
        counts[alert["kind"]] += 1
    add("alerts", "alerts so far", [({**job, "kind": kind}, n) for kind, n in counts.items()])
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# -- alerts to other programs ----------------------------------------------------------------------


def deliver(alert: Alert, job: str, command: str | None, webhook: str | None) -> None:
    """Print an alert, and hand it to a command and a webhook in threads of their own."""
    print(f"tutti watch: alert: {alert.text}", file=sys.stderr, flush=True)
    if command is not None:
        # No shell: the text, which contains file names of the job, is one argument.
        words = [word.replace("{text}", alert.text) for word in shlex.split(command)]
        threading.Thread(target=_run, args=(words,), name="tutti-alert").start()
    if webhook is not None:
        content = json.dumps({"schema": SCHEMA, "job": job, **asdict(alert)}).encode()
        threading.Thread(target=_post, args=(webhook, content), name="tutti-alert").start()


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ALERT_SECONDS,
        )
        problem = f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        print(f"tutti watch: --alert-command: {problem}", file=sys.stderr, flush=True)


def _post(url: str, content: bytes) -> None:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=_ALERT_SECONDS).close()
    except (OSError, ValueError) as error:
        print(f"tutti watch: --webhook: {error}", file=sys.stderr, flush=True)
