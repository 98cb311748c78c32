"""tutti.spawn: run a Python function as local ranks and return the result of every rank.

The function and its arguments are pickled into a private directory. Each rank is a new process that
runs this module: it reads the pickle file, calls the function and writes the result into the
directory. cloudpickle is used because it can pickle functions that a rank cannot import: functions
that are defined in a notebook, a REPL or a script.
"""

import json
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from tutti.measure.files import write_atomically
from tutti.world.errors import TIMEOUT, UsageError
from tutti.world.launch import LocalWorld

Result = TypeVar("Result")


class RankFailed(Exception):
    """A rank of `tutti.spawn` failed. The message has the number and the traceback of the rank."""


def spawn(
    function: Callable[..., Result],
    args: Sequence[object] = (),
    *,
    ranks: int = 2,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    ranks_per_gpu: int = 1,
    show: Literal["all", "first", "none"] = "all",
    timeout: float = TIMEOUT,
    grace: float = 5.0,
) -> list[Result]:
    """Call `function(*args)` in `ranks` new processes. Return the results, ordered by rank.

        def mean_rank(scale):
            with tutti.init() as world:
                value = torch.tensor(float(world.rank), device=world.device)
                tutti.comm.all_reduce(value)
                return scale * value.item() / world.size

        tutti.spawn(mean_rank, (10,), ranks=4)      # [15.0, 15.0, 15.0, 15.0]

    `spawn` can be called from a script, a REPL or a notebook. A script needs no
    `if __name__ == "__main__":`. Each rank has the environment variables of torchrun, so the
    function can call `tutti.init()` or `torch.distributed.init_process_group()`. Arguments and
    results must be picklable. A CUDA tensor in a result must be copied with `tensor.cpu()` first.

    `show` selects the ranks whose output is printed. `timeout` is the time limit of a collective,
    in seconds. If a rank fails, all ranks are stopped, and RankFailed is raised with the traceback
    of the rank that failed first. Ctrl-C stops all ranks and raises KeyboardInterrupt. A rank that
    handles SIGINT is killed if it has not ended after `grace` seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "tutti.spawn installs signal handlers, which Python allows only in the main thread. "
            "Call tutti.spawn from the main thread."
        )
    with tempfile.TemporaryDirectory(prefix="tutti-spawn-") as name:
        folder = Path(name)
        _write_call(folder, function, args)
        supervisor = LocalWorld(
            command=[sys.executable, "-m", "tutti.world.spawn", name],
            ranks=ranks,
            device=device,
            ranks_per_gpu=ranks_per_gpu,
            show=show,
            timeout=timeout,
            grace=grace,
        ).supervise()
        if supervisor.stopped_by is not None:
            raise KeyboardInterrupt
        if (message := supervisor.usage_error()) is not None:
            raise UsageError(message)
        if (failure := supervisor.failure()) is not None:
            raise RankFailed("\n".join(failure))
        return [_read_pickle(folder / f"result{rank}") for rank in range(ranks)]


def _read_pickle(path: Path) -> Any:
    # The directory has mode 0700, so only processes of this user can write the file.
    return pickle.loads(path.read_bytes())  # noqa: S301


def _write_call(folder: Path, function: Callable[..., object], args: Sequence[object]) -> None:
    import cloudpickle

    # Ranks use this process's sys.path, so they find the same modules, including modules in the
    # directory of the script.
    (folder / "sys_path").write_text(json.dumps([os.path.abspath(path) for path in sys.path]))
    try:
        (folder / "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        name = getattr(function, "__name__", repr(function))
        raise UsageError(
            f"tutti.spawn cannot send {name} to the ranks: {error}. Create the object "
            "that cannot be pickled inside the function, or pass an argument that can be pickled."
        ) from None


def _run_rank(folder: Path) -> None:
    """Call the function in this rank. Write its result, or the report of its failure."""
    sys.path[:] = json.loads((folder / "sys_path").read_text())
    rank = int(os.environ["RANK"])
    try:
        import cloudpickle

        function, args = _read_pickle(folder / "call")
        result = function(*args)
        try:
            content = cloudpickle.dumps(result)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            kind = type(result).__name__
            raise UsageError(
                f"the result of rank {rank} has type {kind} and cannot be pickled: {error}"
            ) from None
        write_atomically(folder / f"result{rank}", content)
    except Exception as error:
        # Remove this function's frame from the traceback, so that it starts at the user's function.
        where = error.__traceback__.tb_next if error.__traceback__ else None
        try:
            if sys.excepthook is not sys.__excepthook__:  # tutti.init's hook informs other ranks
                sys.excepthook(type(error), error, where)
        finally:
            _write_report(rank, error.with_traceback(where))
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None


def _write_report(rank: int, error: Exception) -> None:
    """Write the failure report for the launcher, unless tutti.init's hook has written it."""
    report = Path(os.environ["TUTTI_REPORT"])
    if report.exists():
        return
    summary = "".join(traceback.format_exception_only(error)).strip()
    failure = {
        "rank": rank,
        "host": os.uname().nodename,
        "summary": str(error) if isinstance(error, UsageError) else summary,
        "details": "".join(traceback.format_exception(error)),
    }
    write_atomically(report, json.dumps(failure))


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
