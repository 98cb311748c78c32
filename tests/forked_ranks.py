"""Ranks without tutti.init(), forked from one process that has imported torch.

For tests of plain torch scripts, and of ranks that are killed: in a tutti world, the launcher would
end all ranks when one is killed.
"""

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from worlds import run_warm


def forked(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    backend: str = "shm",
    timeout: float = 60,
) -> list[Any]:
    """Run `function(rank, *arguments)` on forked ranks of one process group.

    Returns each rank's result. A rank that ended without a result has {"exit": status} instead; a
    negative status is the number of a signal.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-test-") as folder:
        source = function.__code__.co_filename
        words = [source, function.__name__, ranks, backend, json.dumps(arguments), folder]
        done = run_warm([__file__, *words], timeout)
        print(done.stdout, done.stderr)  # shown by pytest when the test fails
        if done.returncode != 0:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _start(source: str, name: str, count: str, backend: str, arguments: str, folder: str) -> None:
    import torch  # once, before the ranks are forked

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(source).parent))
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    children = []
    for rank in range(int(count)):
        child = os.fork()
        if child == 0:
            _run_rank(getattr(module, name), rank, int(count), backend, arguments, folder)
        children.append(child)
    for rank, child in enumerate(children):
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        result = Path(folder, str(rank))
        if status != 0 or not result.exists():
            result.write_text(json.dumps({"exit": status}))


def _run_rank(
    function: Callable[..., Any], rank: int, size: int, backend: str, arguments: str, folder: str
) -> None:
    status = 1
    try:
        import torch.distributed as dist

        from tutti.comm.shm.registration import register

        register()
        store = dist.FileStore(str(Path(folder, "store")), size)
        limit = timedelta(seconds=30)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        result = function(rank, *json.loads(arguments))
        Path(folder, str(rank)).write_text(json.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _start(*sys.argv[1:])
