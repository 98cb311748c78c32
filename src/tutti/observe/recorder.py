"""Starts the recorder in a torch program and tells it about steps, phases, loaders and groups.

`tutti run` and `tutti train` set TUTTI_OBSERVE=1 for their ranks. Under any other launcher, set
this variable yourself, or start the script with `python -m tutti.observe SCRIPT`. torch calls
`autoload` at the end of `import torch`, because it is an entry point of the group "torch.backends".
The program itself is not changed. recorder.cpp records operations and stacks; ring_reader.py reads
the result.
"""

import atexit
import contextlib
import functools
import gc
import importlib.util
import os
import shlex
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from tutti.observe import ring_reader
from tutti.world.errors import UsageError
from tutti.world.launchers import Identity, identify

# "1" records this program and the programs that it starts. "0" records nothing.
VARIABLE = "TUTTI_OBSERVE"
# The pid of the process whose ring stands for the rank in RANK. A process that the rank starts,
# such as a compile worker, inherits RANK, but is not that rank.
_CLAIM = "TUTTI_OBSERVE_PID"
_INPUT, _BACKWARD, _UPDATE = 1, 3, 4  # numbers of phases, as in ring_reader.PHASES
_BEAT_SECONDS = 1.0
_P = ParamSpec("_P")
_R = TypeVar("_R")


def autoload() -> None:
    """Start the recorder if TUTTI_OBSERVE=1. An error is printed, and the program continues."""
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        start()
    except Exception as error:
        print(f"tutti: this process is not recorded: {error!r}", file=sys.stderr)


def start() -> None:
    """Record this process. Later calls do nothing.

    The ring is created now if a launcher has set the rank, or else with the first process group.
    """
    if _Recorder.current is None:
        _Recorder.current = _Recorder(_load())
        _Recorder.current.install()


def recorded(init: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that starts the recorder and then calls `init`."""

    @functools.wraps(init)
    def start_and_init(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if os.environ.get(VARIABLE) != "0":
            try:
                start()
            except Exception as error:  # a world without a recorder still works
                print(f"tutti: this process is not recorded: {error}", file=sys.stderr)
        return init(*args, **kwargs)

    return start_and_init


def _load() -> ModuleType:
    """Load recorder.cpp, and compile it if necessary. Raise BuildFailed without a compiler."""
    from tutti.comm.shm.jit_build import build_if_missing, recorder_library

    (path,) = build_if_missing(recorder_library())
    spec = importlib.util.spec_from_file_location("tutti.observe._recorder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_name(env: Mapping[str, str]) -> str:
    """Return the name of the job that this process belongs to, the same in all its ranks."""
    if "TUTTI_RUN_ID" in env:
        return env["TUTTI_RUN_ID"]
    if "TORCHELASTIC_RUN_ID" in env:
        return f"torchrun-{env.get('MASTER_PORT', '')}-{env['TORCHELASTIC_RUN_ID']}"
    if "SLURM_STEP_ID" in env:
        return f"slurm-{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    if "OMPI_COMM_WORLD_RANK" in env or "PMI_RANK" in env:
        for variable in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
            if variable in env:
                return f"mpi-{env[variable]}"
    if "MASTER_PORT" in env:
        return f"{env.get('MASTER_ADDR', 'localhost')}-{env['MASTER_PORT']}"
    return f"pid-{os.getppid()}"


class _Recorder:
    """The recorder of this process: the hooks in torch, and the C++ module that they call."""

    current: "_Recorder | None" = None

    def __init__(self, module: ModuleType) -> None:
        import ctypes

        if module.ring_bytes != ctypes.sizeof(ring_reader.Ring):
            raise RuntimeError("recorder.cpp and ring_reader.py define different layouts")
        self._module = module
        self._enter: Callable[[int], int] = module.enter
        self._leading_optimizer: weakref.ref[Any] | None = None
        self._opened_in = 0  # the pid of the process that has opened a ring
        self._exit_error = ""  # of the last call of sys.exit
        self._collection_began = 0

    def install(self) -> None:
        """Hook torch, and create the ring if a launcher has set the rank."""
        self._hook_torch()
        is_child = "multiprocessing" in sys.modules and _parent_process() is not None
        claimed = os.environ.get(_CLAIM, str(os.getpid())) != str(os.getpid())
        identity = _identity()
        if identity is not None and not is_child and not claimed:
            self._open(identity.rank, identity.size, identity.local_rank or 0)

    # -- the ring ----------------------------------------------------------------------------------

    def _open(self, rank: int, size: int, local_rank: int, worker: int = -1) -> None:
        if self._opened_in == os.getpid():
            return
        job = job_name(os.environ)
        ring_reader.remove_old_jobs()
        path = ring_reader.create_job_folder(job) / f"{os.getpid()}.ring"
        path.unlink(missing_ok=True)  # left by an earlier process with this pid
        command = _plain(shlex.join(sys.argv))[:255]
        self._module.open(
            str(path),
            rank,
            size,
            local_rank,
            worker,
            os.uname().nodename[:63],
            job[:127],
            ring_reader.boot_id()[:39],
            command,
        )
        self._opened_in = os.getpid()
        self._path = path
        if worker >= 0:
            return
        os.environ[_CLAIM] = str(os.getpid())
        thread = threading.Thread(target=self._beat, name="tutti-recorder", daemon=True)
        thread.start()
        atexit.register(self._close, os.getpid())
        if _parent_process() is not None:  # a forked child of multiprocessing calls no atexit
            from multiprocessing.util import Finalize

            Finalize(None, self._close, args=(os.getpid(),), exitpriority=0)
        self._hook_errors()

    def _beat(self) -> None:
        """Show once a second that Python threads can run. If one thread keeps the GIL, none can."""
        while True:
            self._module.beat()
            time.sleep(_BEAT_SECONDS)

    def _close(self, pid: int) -> None:
        if pid != os.getpid():
            return  # a forked child
        # In multiprocessing, this is called while the error that ends the child is propagated.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = None
        if error is not None:
            self._set_error(error)
        elif self._exit_error:
            self._module.set_error(self._exit_error)
        self._module.close()
        # `tutti run` removes the rings of its job. Otherwise the last process of the job does, if
        # all of its processes have ended normally.
        if "TUTTI_RUN_ID" not in os.environ:
            ranks = ring_reader.read_job(self._path.parent, operations=0, steps=0)
            if all(each.exit_state == ring_reader.ENDED for each in ranks if each.worker < 0):
                ring_reader.remove_job(self._path.parent.name)

    def _set_error(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # the user's error may have no text
            self._module.set_error(_describe(error, traceback.extract_tb(error.__traceback__)))

    # -- hooks -------------------------------------------------------------------------------------

    def _hook_errors(self) -> None:
        hook = sys.excepthook

        def excepthook(kind: Any, error: BaseException, where: Any) -> None:
            if not issubclass(kind, (KeyboardInterrupt, UsageError)):
                self._set_error(error.with_traceback(where))
            hook(kind, error, where)

        sys.excepthook = excepthook
        leave = sys.exit

        @functools.wraps(leave)
        def exit_with_reason(code: Any = None, /) -> None:
            # A script that handles its error and calls sys.exit(1) has failed, too.
            handled = sys.exc_info()[1]
            self._exit_error = ""
            with contextlib.suppress(Exception):
                if isinstance(handled, UsageError) or not code:
                    pass
                elif isinstance(handled, Exception):
                    frames = traceback.extract_tb(handled.__traceback__)
                    self._exit_error = _describe(handled, frames)
                elif handled is None:
                    frames = traceback.extract_stack(sys._getframe(1), limit=16)
                    self._exit_error = _describe(SystemExit(code), frames)
            leave(code)

        sys.exit = exit_with_reason  # type: ignore[assignment]

    def _hook_torch(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )
        from torch.utils.data import _utils, dataloader

        register_optimizer_step_pre_hook(lambda *_: self._before_update())
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after_update(optimizer))
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        self._wrap(_utils.worker, "_worker_loop", self._run_worker)
        self._wrap(torch.autograd, "_engine_run_backward", self._run_backward)
        if dist.is_available():
            self._wrap(dist.distributed_c10d, "_new_process_group_helper", self._new_group)
            self._wrap(dist.distributed_c10d, "split_group", self._split_group)
        gc.callbacks.append(self._on_collection)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by `around(function, *arguments)`, if this torch has the function."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)

    def _before_update(self) -> None:
        self._phase_before_update = self._enter(_UPDATE)

    def _after_update(self, optimizer: Any) -> None:
        self._enter(self._phase_before_update)
        leading = self._leading_optimizer() if self._leading_optimizer is not None else None
        if leading is None:
            self._leading_optimizer, leading = weakref.ref(optimizer), optimizer
        if leading is optimizer:  # a program with two optimizers has one step for both
            self._module.step()

    def _next_batch(self, original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = self._enter(_INPUT)
        try:
            batch = original(*args, **kwargs)
            self._module.count_batch()
            return batch
        except StopIteration:
            self._module.count_loader_end()
            raise
        finally:
            self._enter(before)

    def _run_backward(self, original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = self._enter(_BACKWARD)
        try:
            return original(*args, **kwargs)
        finally:
            self._enter(before)

    def _run_worker(self, original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Record a loader worker. It is a process of its own, with its own ring."""
        number = args[10] if len(args) > 10 and isinstance(args[10], int) else 0
        identity = _identity()
        opened = False
        try:
            self._open(
                identity.rank if identity else 0, identity.size if identity else 1, 0, number
            )
            opened = True
        except Exception as error:
            print(f"tutti: a loader worker is not recorded: {error!r}", file=sys.stderr)
        try:
            return original(*args, **kwargs)
        finally:
            if opened:
                self._module.close()
                self._path.unlink(missing_ok=True)

    def _new_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        size, rank, ranks = args[0], args[1], list(args[2])
        if not ranks:  # the default group
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            try:
                self._open(rank, size, local_rank)
                self._module.set_rank(
                    rank, size, local_rank, job_name(os.environ)[:127], str(args[3] or "")[:31]
                )
            except Exception as error:  # the program works without a recorder
                print(f"tutti: this process is not recorded: {error}", file=sys.stderr)
        result = original(*args, **kwargs)
        self._name_group(result[0] if isinstance(result, tuple) else result, ranks, size)
        return result

    def _split_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = original(*args, **kwargs)
        if hasattr(group, "group_name"):
            self._name_group(group, dist.get_process_group_ranks(group), group.size())
        return group

    def _name_group(self, group: Any, ranks: list[int], size: int) -> None:
        if hasattr(group, "group_name"):  # else this rank is not in the group
            description = str(getattr(group, "group_desc", ""))[:31]
            self._module.set_group(group.group_name[:63], description, ranks or list(range(size)))

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:  # younger generations take microseconds
            if phase == "start":
                self._collection_began = time.monotonic_ns()
            else:
                self._module.add_collection(time.monotonic_ns() - self._collection_began)


def _plain(text: str) -> str:
    """Return a text that a C string can hold."""
    return text.encode(errors="replace").decode().replace("\0", " ")


def _describe(error: BaseException, frames: traceback.StackSummary) -> str:
    """Return the type, the first line and the source line of an error."""
    sites = [f"{each.filename}:{each.lineno} in {each.name}" for each in reversed(frames)]
    first = _plain(next(iter(str(error).splitlines()), ""))
    name = f"{type(error).__name__}{f': {first[:240]}' * bool(first)}"
    return f"{name} @ {_plain(ring_reader.user_frame(sites))[-180:]}"


def _parent_process() -> Any:
    import multiprocessing

    return multiprocessing.parent_process()


def _identity() -> Identity | None:
    """Return what the launcher has set, or None without a launcher."""
    try:
        identity = identify(os.environ)
    except UsageError:
        return None
    return None if identity.launcher == "python" else identity
