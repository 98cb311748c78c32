"""Headless Chromium for tests, controlled through the DevTools protocol."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import websocket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. Collects the requests of the page and its errors."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=30, suppress_origin=True)
        self._last = 0
        self._loaded = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Events that arrive meanwhile are kept."""
        self._last += 1
        number = self._last
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._handle_event(message.get("method", ""), message.get("params", {}))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page. A promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded and two frames are painted."""
        before = self._loaded
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 60
        while self._loaded == before:
            assert time.monotonic() < end, f"{path} was not loaded"
            self.call("Runtime.evaluate", expression="0")
            time.sleep(0.02)
        self.settle()

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 20
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"not true after 20 s: {condition}"
            self.settle()

    def settle(self) -> None:
        """Wait for two frames, so that everything is painted."""
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def click(self, selector: str) -> None:
        """Click with the mouse on the middle of an element."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )
        self.settle()

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def _handle_event(self, method: str, about: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(str([argument.get("value") for argument in about["args"]]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Return a browser with its own profile. Its processes end with the block."""
    assert CHROMIUM is not None
    with (
        tempfile.TemporaryDirectory(prefix="tutti-chromium-", ignore_cleanup_errors=True) as home,
        subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--force-prefers-reduced-motion", "--disable-dev-shm-usage", "--mute-audio"),
                "--disable-background-networking",
                *("--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HOME": home},
            start_new_session=True,
        ) as process,
    ):
        try:
            page = Page(_address(process))
            try:
                yield page
            finally:
                page.close()
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the browser and its children, and wait until they are gone."""
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def _address(process: subprocess.Popen[str]) -> str:
    """Return the address of the first tab: the browser prints its port and lists its tabs there."""
    import urllib.request

    assert process.stderr is not None
    output = []
    for line in process.stderr:
        output.append(line)
        if found := re.search(r"listening on ws://([\d.]+:\d+)/", line):
            with urllib.request.urlopen(f"http://{found[1]}/json/list", timeout=20) as answer:
                tabs = json.load(answer)
            return next(str(t["webSocketDebuggerUrl"]) for t in tabs if t["type"] == "page")
    raise AssertionError("Chromium did not start:\n" + "".join(output))
