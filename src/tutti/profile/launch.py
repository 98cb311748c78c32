"""Run a program that knows nothing of tutti, with every rank of it captured."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.world.errors import UsageError

_STARTUP = Path(__file__).parent / "startup"


def captured_environment(settings: Mapping[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process captures itself when it trains.

    PYTHONPATH reaches whatever the command starts: torchrun's workers, processes of
    multiprocessing, ranks of mpirun on this host.
    """
    env = dict(before)
    path = [str(_STARTUP), *filter(None, [before.get("PYTHONPATH", "")])]
    env["PYTHONPATH"] = os.pathsep.join(path)
    env["TUTTI_PROFILE"] = json.dumps(dict(settings))
    keep_collectives(env)
    return env


def keep_collectives(env: MutableMapping[str, str]) -> None:
    """Make torch's recorder of collectives large enough, in every process group made after this.

    gloo's traces lack groups and sequence numbers, which the recorder has.
    """
    env.setdefault("TORCH_FR_BUFFER_SIZE", "20000")


def program(words: Sequence[str], own_commands: Sequence[str]) -> list[str]:
    """The command to start: a script, `train …` of tutti's own, or any program."""
    first, *rest = words
    if first == "tutti" or (first in own_commands and not Path(first).is_file()):
        return [sys.executable, "-m", "tutti", *(rest if first == "tutti" else words)]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"script {first!r} does not exist: check the path")
        return [sys.executable, *words]
    # Beside this interpreter first: torchrun of an environment that was not activated.
    beside = Path(sys.executable).parent / first
    found = str(beside) if os.access(beside, os.X_OK) and "/" not in first else shutil.which(first)
    if found is None:
        raise UsageError(f"{first!r} is no program: tutti profile -- torchrun … train.py, say")
    return [found, *rest]


def run_captured(command: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Run it to its end; returns its exit code, as a shell has it. Signals are its own."""
    env = captured_environment(settings, os.environ)
    # With what our launcher left open for it: MPICH's ranks talk to mpirun by a descriptor.
    with subprocess.Popen(command, env=env, close_fds=False) as process:

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            while True:
                try:
                    code = process.wait()
                    return code if code >= 0 else 128 - code  # ended by a signal: as shells say it
                except KeyboardInterrupt:
                    # The terminal told the program as well; wait for it, and keep what it wrote.
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)
