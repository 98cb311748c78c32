"""Runs many command lines of tutti, each in a forked child of one process that has loaded tutti.

A new process for each command line would need a second or more, most of it for imports. Standard
input has one JSON list of arguments per line; standard output gets one JSON object per line.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

SECONDS = 60  # a command line that runs longer is killed with its ranks


def run_all(command_lines: list[list[str]], directory: Path) -> list[dict[str, Any]]:
    """Run the command lines in `directory`. Return arguments, code and output of each.

    The key `torch` of an outcome is not empty if the command line has loaded torch, which takes
    seconds.
    """
    import subprocess

    lines = "".join(json.dumps(arguments) + "\n" for arguments in command_lines)
    done = subprocess.run(
        [sys.executable, __file__],
        input=lines,
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _obey_permissions() -> None:
    """Let the root user have only the permissions of an owner: drop CAP_DAC_OVERRIDE and others."""
    libc, words = ctypes.CDLL(None, use_errno=True), ctypes.c_uint32 * 6
    header, values = (ctypes.c_uint32 * 2)(0x20080522, 0), words()
    if libc.capget(header, values) == 0:
        for word in (0, 1):  # the effective and the permitted set
            values[word] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.capset(header, values)


def _run_in_child(run: Any, arguments: list[str], files: list[Path]) -> int | None:
    """Return the exit code, or None if the child was killed after SECONDS."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), number)
        _obey_permissions()
        code = 99  # an exception that the command line did not turn into a message
        try:
            code = run(arguments)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 2
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(len(files), b"torch" * ("torch" in sys.modules))
        os._exit(code)
    ended = signal.sigtimedwait({signal.SIGCHLD}, SECONDS)
    if ended is None:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if ended is None else os.waitstatus_to_exitcode(status)


def _serve() -> None:
    import tempfile

    import tutti.cli

    run = tutti.cli.run_cli
    for module in pkgutil.iter_modules(tutti.cli.__path__):
        importlib.import_module(f"tutti.cli.{module.name}")
    for name in tutti.cli.COMMANDS:  # fills the caches of the parser, which the children share
        for kind in tutti.cli.SUBCOMMANDS.get(name, ("",)):
            with contextlib.redirect_stderr(io.StringIO()):
                run([name, *kind.split(), "--not-a-flag"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    gc.freeze()  # a collection in a child would copy all pages
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err", "torch")]
        for line in sys.stdin.read().splitlines():
            arguments = json.loads(line)
            code = _run_in_child(run, arguments, files)
            texts = {path.name: path.read_text(errors="replace") for path in files}
            print(
                json.dumps({"arguments": arguments, "code": code, **texts}),
                flush=True,
            )


if __name__ == "__main__":
    _serve()
