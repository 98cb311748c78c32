"""tutti watch: a live view of any running job."""

import contextlib
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import tyro

from tutti.cli.flags import OutputFile, parse
from tutti.cli.results import write_json
from tutti.measure.terminal import console, terminal_width
from tutti.measure.units import format_bytes, format_rate, format_seconds, three_digits
from tutti.observe.step_split import PARTS
from tutti.observe.watch import SCHEMA, JobWatch
from tutti.observe.watch_server import WatchServer, deliver, finite
from tutti.observe.why import hosts_of, job_of
from tutti.world.errors import UsageError, checked_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_SHADES, _ASCII_SHADES = "▁▂▃▄▅▆▇█", "_.-=+*%@"


@dataclass(frozen=True)
class Watch:
    """Show a running job live: tutti watch

        tutti watch                         # the newest job of this user on this host
        tutti watch runs/mine               # the job of a run directory, also after its end
        tutti watch --webhook http://localhost:9000/alerts

    Shows the parts of the step of every rank, the rank that the other ranks wait for and the
    reason, throughput, memory, and alerts. In a terminal, the same is served as a page on
    127.0.0.1 until Ctrl-C. In a pipe or file, tutti watch prints a line per second, and ends with
    the job. tutti run and tutti train record their ranks. For other launchers, set
    TUTTI_OBSERVE=1, or start the script with python -m tutti.observe.
    """

    job: tyro.conf.Positional[str | None] = None
    """Job name, process id or run directory (default: the newest job of this user)."""
    page: bool | None = None
    """Serve the page and /metrics on 127.0.0.1 until Ctrl-C (default: only in a terminal). The URL
    contains a token, without which nothing is shown."""
    port: int = 0
    """Port of the page. 0 means any free port."""
    every: float = 1.0
    """Seconds between two looks at the job."""
    total_steps: int | None = None
    """Number of steps of the job, to estimate when it ends (default: that of tutti train --steps).
    """
    hosts: str | None = None
    """Comma-separated hosts to ask, besides this one. For a Slurm job, the hosts of the job are the
    default."""
    via: str | None = None
    """Command that runs another command on a host, with {host} for its name (default: `ssh {host}`,
    or `srun` in the job of Slurm)."""
    alert_command: str | None = None
    """Command to run for every alert, with {text} for its text: 'notify-send {text}'. It is run
    without a shell."""
    webhook: str | None = None
    """URL to which every alert is sent as JSON."""
    json: OutputFile | None = None
    """Write the last state to this file."""


def main(arguments: list[str]) -> int:
    options = parse(Watch, "tutti watch", arguments)
    every = checked_seconds("--every", options.every, example=1)
    if options.port > 65535:
        raise UsageError(f"--port must be at most 65535, got {options.port}")
    if options.total_steps is not None and options.total_steps < 1:
        raise UsageError(f"--total-steps must be at least 1, got {options.total_steps}")
    _check_outlets(options)
    folder, run = job_of(options.job), None
    if options.job is not None and (Path(options.job) / "metrics").is_dir():
        run = Path(options.job)
    if folder is None and run is None:
        what = "there is no recorded job" if options.job is None else f"{options.job} is no job"
        raise UsageError(
            f"{what} of this user on this host. Start the job with tutti run, or set "
            "TUTTI_OBSERVE=1 for its ranks. tutti why --jobs prints the recorded jobs."
        )
    hosts, via = ([], "") if folder is None else hosts_of(folder, options.hosts, options.via)
    name = folder.name if folder is not None else str(run)
    watch = JobWatch(
        folder,
        run,
        hosts=hosts,
        via=via,
        total_steps=options.total_steps,
        on_alert=lambda alert: deliver(alert, name, options.alert_command, options.webhook),
    )
    with_page = sys.stdout.isatty() if options.page is None else options.page
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(watch.close)
            server = None
            if with_page:
                server = _serve(watch, options.port)
                stack.callback(server.close)
            # Ctrl-C is how a person ends the view, so it is no error.
            with contextlib.suppress(KeyboardInterrupt):
                _show(watch, server, every)
            if watch.state:
                console().print(_rank_table(watch, watch.state, len(watch.state["ranks"])))
    finally:
        if options.json is not None and watch.state:
            write_json(options.json, SCHEMA, finite(watch.state))
    return 0


def _check_outlets(options: Watch) -> None:
    """Raise UsageError for a command or a webhook that cannot work."""
    if options.alert_command is not None:
        try:
            words = shlex.split(options.alert_command)
        except ValueError as error:
            raise UsageError(f"--alert-command {options.alert_command!r}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            missing = words[0] if words else options.alert_command
            raise UsageError(f"--alert-command: {missing!r} is no program. Check the name.")
    if options.webhook is not None:
        try:
            address = urlsplit(options.webhook)
            known = address.scheme in ("http", "https") and bool(address.hostname)
        except ValueError:
            known = False
        if not known:
            raise UsageError(f"--webhook must be a URL with http or https, got {options.webhook!r}")


def _serve(watch: JobWatch, port: int) -> WatchServer:
    try:
        watch.poll()
        return WatchServer(watch, port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}. Use another port, or 0.") from None


def _show(watch: JobWatch, server: WatchServer | None, every: float) -> None:
    """Show the job until it has ended, or with a page until Ctrl-C."""
    if server is not None:
        print(f"page: {server.url}", flush=True)
    if sys.stdout.isatty():
        from rich.live import Live

        on = console()
        # With redirect_stdout, sys.stdout would have no encoding meanwhile.
        with Live(console=on, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            for _ in _polls(watch, server, every):
                live.update(_screen(watch, server, on.height), refresh=True)
    else:
        for state in _polls(watch, server, every):
            print(_printable(_line(state)), flush=True)


def _polls(watch: JobWatch, server: WatchServer | None, every: float) -> Iterator[dict[str, Any]]:
    """Look at the job every few seconds. The last state is that of the ended job."""
    while True:
        began = time.monotonic()
        yield watch.poll()
        if watch.ended and server is None:
            return
        while watch.ended:  # the page stays open
            time.sleep(3600)
        time.sleep(max(0.0, every - (time.monotonic() - began)))


# -- texts -----------------------------------------------------------------------------------------


def _line(state: dict[str, Any]) -> str:
    """Return the state in one line."""
    total = f"/{state['total_steps']}" if state["total_steps"] else ""
    parts = [f"step {state['step']}{total}"]
    if state["state"] != "running":
        parts.append(state["state"])
    parts += _rates(state)
    means = _mean_parts(state)
    if means:
        parts.append(
            f"{format_seconds(sum(means.values()))} per step: "
            + ", ".join(f"{n} {100 * v / sum(means.values()):.0f} %" for n, v in means.items())
        )
    memory = [row["memory_bytes"] for row in state["ranks"] if row["memory_bytes"]]
    parts += [f"memory {format_bytes(max(memory))}"] if memory else []
    parts += [f"late: rank {late['rank']} {late['text']}" for late in state["stragglers"][:2]]
    if state["state"] == "stalled":
        parts.append(f"tutti why {state['job']} explains a hang")
    return "  ".join(parts)


def _printable(text: str) -> str:
    """Return the text without characters that standard output cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _rates(state: dict[str, Any]) -> list[str]:
    units = {"steps_per_s": "steps/s", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
    parts = [
        f"{three_digits(state[n])} {unit}" for n, unit in units.items() if state[n] is not None
    ]
    if state["loss"] is not None:
        parts.append(f"loss {state['loss']:.4g}")
    if state["eta_s"] is not None:
        minutes, seconds = divmod(round(state["eta_s"]), 60)
        parts.append(f"ends in {minutes // 60}:{minutes % 60:02}:{seconds:02}")
    return parts


def _mean_parts(state: dict[str, Any]) -> dict[str, float]:
    """Return the mean parts of the step over the ranks, without parts that are never used."""
    rows = [row["parts_s"] for row in state["ranks"] if None not in row["parts_s"].values()]
    means = {name: math.fsum(row[name] for row in rows) / len(rows) for name in PARTS if rows}
    return {name: value for name, value in means.items() if value > 0}


def _screen(watch: JobWatch, server: WatchServer | None, height: int) -> "Group":
    """Return what a terminal of this height shows."""
    from rich.console import Group
    from rich.text import Text

    state = watch.state
    head = [
        f"{state['job'] or state['run']}: {state['state']}, step {state['step']}"
        + (f" of {state['total_steps']}" if state["total_steps"] else ""),
        *_rates(state),
    ]
    lines = [Text("  ".join(head), style="bold")]
    host = state["host"]
    traffic = max(host["network_bytes_per_s"].items(), key=lambda each: each[1], default=None)
    about = [f"CPUs {100 * host['cpu']:.0f} %"] if host["cpu"] is not None else []
    about += [f"{traffic[0]} {format_rate(traffic[1])}"] if traffic and traffic[1] > 0 else []
    lines.append(Text("  ".join(about), style="dim"))
    for gpu in state["gpus"][:8]:
        lines.append(Text(_gpu_text(gpu), style="dim"))
    if state["state"] == "stalled":
        lines.append(Text(f"no progress: tutti why {state['job']}", style="yellow"))
    below = [
        Text(_printable(f"alert: {each['text']}"), style="red") for each in state["alerts"][-3:]
    ]
    below += [
        Text(_printable(f"{strftime('%H:%M:%S', localtime(each['time']))} {each['text']}"))
        for each in state["events"][-3:]
    ]
    if server is not None:
        below.append(Text(f"page: {server.url}", style="dim", no_wrap=True, overflow="fold"))
    room = max(4, height - len(lines) - 2 * len(below) - 4)
    return Group(*lines, _rank_table(watch, state, room), *below)


def _gpu_text(gpu: dict[str, Any]) -> str:
    parts = [f"GPU {gpu['index']}"]
    if gpu["utilisation"] is not None:
        parts.append(f"{100 * gpu['utilisation']:.0f} %")
    parts += [format_bytes(gpu["memory_bytes"])] if gpu["memory_bytes"] is not None else []
    parts += [f"{gpu['power_w']:.0f} W"] if gpu["power_w"] is not None else []
    parts += [f"{gpu['temperature_c']} °C"] if gpu["temperature_c"] is not None else []
    parts += [f"{gpu['sm_mhz']} MHz"] if gpu["sm_mhz"] is not None else []
    if gpu["pcie_bytes_per_s"] is not None:
        parts.append(f"PCIe {format_rate(gpu['pcie_bytes_per_s'])}")
    return "  ".join([*parts, *gpu["throttle"]])


def _rank_table(watch: JobWatch, state: dict[str, Any], room: int) -> "Table":
    """Return a table with at most `room` ranks. Late ranks come first."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "step", "ms", *PARTS, "CPU", "memory"):
        table.add_column("gc" if name == "collection" else name, justify="right", no_wrap=True)
    # A row of the heat map for each rank: own time in its last steps, on one scale for all ranks.
    width = min(40, terminal_width() - 92)
    shades = _own_times(watch, width) if width >= 8 else {}
    if shades:
        table.add_column("own time of the last steps", no_wrap=True)
    table.add_column("")
    rows = sorted(state["ranks"], key=lambda row: (not row["late"], row["state"] == "running"))
    for row in sorted(rows[:room], key=lambda row: int(row["rank"])):
        cells = [str(row["rank"]), str(row["step"]), _milliseconds(row["step_s"])]
        cells += [_milliseconds(row["parts_s"][name]) for name in PARTS]
        cells.append("" if row.get("cpu") is None else f"{100 * row['cpu']:.0f} %")
        cells.append("" if row["memory_bytes"] is None else format_bytes(row["memory_bytes"]))
        if shades:
            cells.append(shades.get(row["rank"], ""))
        note = row["state"] if row["state"] != "running" else ""
        style = "yellow" if row["late"] else "red" if row["state"] == "failed" else None
        cells.append(_printable(f"late: {row['late']}" if row["late"] else note))
        table.add_row(*map(escape, cells), style=style)
    if len(rows) > room:
        table.add_row("", f"{len(rows) - room} more")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _own_times(watch: JobWatch, width: int) -> dict[int, str]:
    """Return, for each rank, one character per step for its own time in the last steps."""
    with watch.lock:
        last = watch.steps.limits()[1]
        _, rows = watch.steps.window(max(0.0, last - width + 1), last, width)
    if not rows.size:
        return {}
    own = rows[:, :, : len(PARTS)].sum(axis=2) - rows[:, :, PARTS.index("wait")]
    known = own[own == own]
    scale = float(known.max()) if known.size else 0.0
    characters = _SHADES if "utf" in (sys.stdout.encoding or "").lower() else _ASCII_SHADES
    return {
        rank: "".join(
            characters[min(7, int(8 * value / scale))] if scale > 0 and value == value else " "
            for value in own[:, rank]
        )
        for rank in range(own.shape[1])
    }
