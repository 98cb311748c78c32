"""Starts ranks of hanging_programs.py, explains them, and compares with what was planted."""

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hanging_programs as programs
import psutil

from tutti.observe import ring_reader, why
from worlds import start_warm

PROGRAM = Path(programs.__file__)


@dataclass(frozen=True)
class Case:
    """One program with one fault on one backend."""

    program: str
    backend: str
    fault: str

    @property
    def ranks(self) -> int:
        return 3 if self.program == "plain" else 2

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of an explanation that are right."""
        return (programs.ANYWHERE | programs.PLAIN | programs.LOADER)[self.fault][1]  # type: ignore[operator]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(cases: Sequence[Case]) -> Iterator[dict[Case, Path]]:
    """Start the ranks of all cases at the same time. Yield the folder of each job's rings."""
    processes = []
    folders = {}
    for case in cases:
        port = _free_port()
        folders[case] = ring_reader.job_folder(f"127.0.0.1-{port}")
        for rank in range(case.ranks):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(case.ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(case.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TUTTI_OBSERVE": "1",
                "OMP_NUM_THREADS": "1",
            }
            words = [PROGRAM, case.program, case.backend, case.fault]
            processes.append(start_warm(words, env))
    try:
        yield folders
    finally:
        for process in processes:
            children = []
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
            for pid in (process.pid, *(child.pid for child in children)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pipe in (process.stdout, process.stderr):
                pipe.close()
            process.wait()
        for folder in folders.values():
            ring_reader.remove_job(folder.name)


def wait_until_still(folders: Sequence[Path], seconds: float = 3.5, limit: float = 90.0) -> None:
    """Wait until no counter of these jobs has moved for `seconds`."""
    end = time.monotonic() + limit
    last: Any = None
    since = time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < seconds:
        now = [ring_reader.read_progress(folder) for folder in folders]
        if now != last or not all(now):
            last, since = now, time.monotonic()
        time.sleep(0.2)


def explain_all(cases: Sequence[Case], seconds: list[float] | None = None) -> dict[Case, list[str]]:
    """Run all cases at once. Return what is wrong in the explanations, by case.

    The seconds of every explanation are appended to `seconds`.
    """
    wrong = {}

    def explain(folder: Path) -> why.Explanation:
        began = time.monotonic()
        found = why.explain_job(folder, hang_after=1.0)
        if seconds is not None:
            seconds.append(time.monotonic() - began)
        return found

    with running(cases) as folders:
        moving = ("slow_but_alive", "heartbeats")
        wait_until_still([f for case, f in folders.items() if case.fault not in moving])
        with ThreadPoolExecutor(8) as pool:
            for case, found in zip(cases, pool.map(explain, folders.values()), strict=True):
                if faults := judge(case, found):
                    wrong[case] = [*faults, found.verdict, *found.evidence]
    return wrong


def judge(case: Case, found: why.Explanation) -> list[str]:
    """Return what is wrong in an explanation, or [] if rank, class and source line are right."""
    wrong = []
    if found.kind not in case.kinds:
        wrong.append(f"the class is {found.kind}, planted was one of {case.kinds}")
    if case.fault == "slow_but_alive":
        return wrong + ["it is called a hang"] * found.hang
    if not found.hang and not found.verdict.startswith("Not a hang so far"):
        wrong.append("it is not called a hang")
    guilty = [each for each in found.culprits if each.rank == programs.GUILTY]
    if not guilty:
        wrong.append(f"rank {programs.GUILTY} is not among {[c.rank for c in found.culprits]}")
    line = programs.line_of(case.fault)
    if line and guilty:
        each = guilty[0]
        if (Path(each.file).name, each.line) != (PROGRAM.name, line):
            wrong.append(f"the line is {each.file}:{each.line}, planted was line {line}")
    return wrong
