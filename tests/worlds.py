"""Starts real processes as ranks for a test, with a timeout, and shows all output on failure."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warm import Warm, WarmProcess

TUTTI = [sys.executable, "-m", "tutti"]
_NO_LAUNCHER = (
    *("RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_"),
    *("GLOO_", "NCCL_"),
)


_warm: Warm | None = None


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables of a launcher that may have started the tests.

    GPUs are hidden, so that tests run the same everywhere; tests marked `gpu` make one visible.
    """
    ours = {k: v for k, v in os.environ.items() if not k.startswith(_NO_LAUNCHER)}
    return ours | {"CUDA_VISIBLE_DEVICES": ""}


def run_command(
    command: Sequence[str | Path],
    timeout: float = 90,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command. At the timeout all its processes are killed and the test fails."""
    with subprocess.Popen(
        [str(word) for word in command],
        env=clean_environment() | dict(env or {}),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            words = " ".join(map(str, command))
            raise AssertionError(f"{words}\nran past {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_warm(
    command: Sequence[str | Path],
    timeout: float = 90,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script as `run_command` does, in a process that has imported torch (warm.py)."""
    env = clean_environment() | dict(env or {})
    return _the_warm_process().run([*map(str, command)], timeout, env, cwd or Path.cwd())


def start_warm(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> WarmProcess:
    """Start what `run_warm` runs. The output comes through the pipes `stdout` and `stderr`."""
    pipes = [os.pipe(), os.pipe()]
    process = _the_warm_process().start(
        [*map(str, command)],
        clean_environment() | dict(env or {}),
        cwd or Path.cwd(),
        *(write for _, write in pipes),
    )
    for _, write in pipes:
        os.close(write)
    process.stdout, process.stderr = (os.fdopen(read) for read, _ in pipes)
    return process


def _the_warm_process() -> Warm:
    global _warm
    _warm = _warm or Warm(clean_environment())
    return _warm


def run_tutti(
    *words: str | Path,
    timeout: float = 90,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run tutti as `run_command` does, in a process that has imported torch (warm.py)."""
    return run_warm(["-m", "tutti", *words], timeout, env, cwd)


def standing_processes() -> set[int]:
    """Return the pids of processes that exist until the tests end."""
    return {_warm.pid} if _warm else set()


def in_world(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 90,
    gpu: bool = False,
) -> list[Any]:
    """Run `function(world, *arguments)` on every rank of a new world. Return all results.

    Arguments and results are sent as JSON. The function must be defined at the top of its module.
    With `gpu`, all ranks share the first GPU.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-test-") as folder:
        source = Path(function.__code__.co_filename)
        job = [__file__, str(source), function.__name__, json.dumps(arguments), folder]
        run = ["run", "-n", str(ranks)]
        if gpu:
            device = ["--device", "cuda", "--ranks-per-gpu", str(ranks)]
            done = run_command(
                [*TUTTI, *run, *device, *job], timeout, {"CUDA_VISIBLE_DEVICES": "0"}
            )
        else:
            done = run_tutti(*run, "--device", "cpu", *job, timeout=timeout)
        if done.returncode != 0:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


@contextlib.contextmanager
def default_group(backend: str) -> Iterator[None]:
    """Give the default group this backend inside the context. Call it on every rank."""
    import torch.distributed as dist

    original = dist.group.WORLD
    dist.group.WORLD = dist.new_group(backend=backend, group_desc="default_pg")
    try:
        yield
    finally:
        dist.group.WORLD = original


def _run_rank(source: str, name: str, arguments: str, folder: str) -> None:
    import tutti

    sys.path.insert(0, str(Path(source).parent))
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with tutti.init() as world:
        result = getattr(module, name)(world, *json.loads(arguments))
        Path(folder, str(world.rank)).write_text(json.dumps(result))


if __name__ == "__main__":
    _run_rank(*sys.argv[1:])
