"""`shm` as a torch.distributed backend: `init_process_group("shm")`, `"cpu:shm,cuda:nccl"`.

If the package is installed, torch finds this module through the entry point group "torch.backends";
otherwise `tutti.comm.shm.register()` registers the backend. The compiled libraries are loaded, and
compiled if necessary, when the first group is created. If a rank cannot compile the libraries, all
ranks of the group use gloo, and rank 0 prints the reason.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class ShmOptions:
    """The argument `pg_options=` for a group that uses the shm backend."""

    # Returns whether a peer's memory can be opened. Tests set this function to simulate several
    # hosts.
    can_open: Callable[[dict[str, Any]], bool] | None = None


def register() -> None:
    """Register the backend `shm` with torch. Later calls do nothing."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "SHM"):
        return
    dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
    with contextlib.suppress(ImportError):  # _dist2 is experimental and may be removed
        from torch.distributed import _dist2

        _dist2.register_backend("shm", _create_group)
    # torch 2.15 writes each call to its flight recorder, unless the backend is in this set. Writing
    # takes half as long as a small all_reduce and is unnecessary, because the core's ledger records
    # the same calls.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add("shm")


def autoload() -> None:
    """Register the backend. torch calls this function at the end of `import torch`.

    Errors become warnings, because an exception would break every program that imports torch.
    """
    try:
        register()
    except Exception as error:
        warnings.warn(f"the shm backend is not registered: {error!r}", stacklevel=2)


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """Return (C++ module, details), or (None, reason) if the module cannot be used."""
    if sys.platform != "linux":
        return None, f"shm needs Linux (memfd and /proc), but this system is {sys.platform}"
    if not os.path.isdir("/proc/self/fd"):
        return None, "shm needs /proc to open the memory of other ranks, but /proc is not mounted"
    from tutti.comm.shm import native
    from tutti.comm.shm.jit_build import BuildFailed, build_if_missing, core_library, front_library

    try:
        core, front = build_if_missing(core_library(), front_library())
        spec = importlib.util.spec_from_file_location("tutti.comm.shm._front", front)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.load_core(str(core))
        code = native.core().tutti_vector_code().decode()
    except BuildFailed as error:
        return None, str(error)
    except (ImportError, RuntimeError, native.CoreMissing) as error:
        return None, f"the compiled shm backend cannot be loaded: {error}"
    import torch

    from tutti.comm.shm.connect import make

    module.set_exceptions(native.error_for)
    module.set_maker(make)
    return module, f"{code} kernels, compiled for torch {torch.__version__}"


def available() -> tuple[bool, str]:
    """Return (True, details) if the backend can be used here, or (False, reason).

    The first call may compile the backend.
    """
    module, text = _load()
    return module is not None, text


def native_group(group: "dist.ProcessGroup | None" = None) -> int | None:
    """Return the address of the core's group, or None if shm is not the group's CPU backend.

    The result is also None for a process group over several hosts. Such a group has one core group
    per host, and the ranks in the core groups differ from the ranks in the process group.
    """
    return getattr(_cpu_backend(group), "native_group", None) or None


def hosts(group: "dist.ProcessGroup | None" = None) -> int:
    """Return the number of hosts of a group that uses shm, or 1 for every other group."""
    return int(getattr(_cpu_backend(group), "hosts", 1))


def _cpu_backend(group: "dist.ProcessGroup | None") -> Any:
    import torch
    import torch.distributed as dist

    process_group: Any = dist.group.WORLD if group is None else group
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends


def set_where(where: Callable[[], str] | None) -> None:
    """Set the function that returns the call site, so that errors name each rank's call site.

    The function is called in every operation, which makes operations slower. None removes the
    function.
    """
    module, _ = _load()
    if module is not None:
        module.set_where(where)


def _create(options: Any, pg_options: Any) -> Any:
    """Return the backend of a new group. torch calls this function if the group uses shm."""
    from tutti.comm.shm.connect import make

    return make(
        options.store,
        options.group_rank,
        options.group_size,
        timedelta(seconds=options.timeout.total_seconds()),
        options.group_id,
        list(options.global_ranks_in_group),
        # With the backend "cpu:shm,cuda:nccl", pg_options may be the options of NCCL.
        pg_options if isinstance(pg_options, ShmOptions) else None,
    )


def _create_group(
    store: "dist.Store",
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: "torch.device",
    **options: object,
) -> "dist.ProcessGroup":
    """Return a new group, for `torch.distributed._dist2.new_group("shm", ...)`."""
    import torch
    import torch.distributed as dist

    from tutti.comm.shm.connect import make

    if options or device.type != "cpu":
        raise ValueError(f"shm takes device='cpu' and no options, got {device} and {options}")
    backend = make(dist.PrefixStore("shm/", store), rank, world_size, timeout, "shm")
    group = dist.ProcessGroup(store, rank, world_size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    group._register_backend(torch.device("cpu"), custom, backend)
    return group
