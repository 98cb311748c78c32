"""--batch-find: finds the largest --batch that fits into memory.

Each batch size is tried in an attempt: a short run in new processes. An attempt has five steps and,
after every second step, an evaluation of one test batch. On a CPU, it also saves a checkpoint,
because the snapshot for a checkpoint needs host memory. During an attempt, 5 % of the free memory
is reserved, so that the result also fits in a long run. If a rank is out of memory, all ranks of
the attempt end, so no rank waits for it, and all memory is freed.

The batch is doubled or halved until one batch fits and a larger batch does not. Then bisection
narrows the interval between these two batches.
"""

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from tutti.machine.cpu_numa import read_limits
from tutti.machine.sysfs import SysFiles
from tutti.measure.units import format_bytes
from tutti.train.memory import status_bytes
from tutti.train.out_of_memory import memory_in_use
from tutti.train.recipe import Recipe
from tutti.world.exchange import gather_json
from tutti.world.world import World

Result = Literal["fits", "whole", "too large"]
"""`whole` means that the batch fits and is as large as the whole training set."""
# Exit codes of a rank that was ended by the kernel's out-of-memory killer or by a failed C++
# allocation.
_MEMORY_SIGNALS = tuple(128 + number for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGBUS))
_PRECISION = 16  # the search ends when the interval is at most 1/16 of the batch
_MARGIN = 0.05  # fraction of the free memory that is reserved during an attempt


def as_attempt(recipe: Recipe) -> Recipe:
    """Return the recipe of an attempt: a run of five steps."""
    length = replace(recipe.length, steps=5, keep_best=None, patience=None)
    return replace(recipe, length=replace(length, evaluate_every=2, checkpoint_every=2))


def limit_host_memory(world: World) -> None:
    """Limit this rank to its share of the available host memory. All ranks must call this.

    Without a limit, Linux lets processes allocate more memory than exists, and later kills one.
    """
    used, free = memory_in_use(torch.device("cpu"))
    cgroup = read_limits(SysFiles()).cgroup_memory_bytes
    if isinstance(cgroup, int):
        free = min(free, max(0, cgroup - world.local_size * used))
    gather_json(None)  # a barrier: all ranks read the free memory before a rank allocates more
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = status_bytes("VmData") + free // world.local_size
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def reserve_margin(device: torch.device) -> torch.Tensor:
    """Return a tensor that occupies 5 % of the memory that this rank can still allocate."""
    _, free = memory_in_use(device)
    return torch.empty(int(_MARGIN * free), dtype=torch.uint8, device=device)


def judge(code: int, summary: dict[str, Any]) -> tuple[Result, str] | None:
    """Return the result of an attempt and its description.

    Return None if the attempt failed for another reason than memory. `code` is the exit code of the
    attempt. `summary` is the content of its summary.json, or {} if there is no file.
    """
    if (report := summary.get("out_of_memory")) is not None:
        return "too large", f"rank {report['rank']} is {report['reason']}"
    if code in _MEMORY_SIGNALS:
        return "too large", f"a rank was killed by {signal.Signals(code - 128).name}"
    if code != 0:
        return None
    memory = summary["memory"]
    peak = max(memory["device_peak_bytes"] or memory["host_peak_bytes"])
    whole = summary["plan"]["steps_per_epoch"] == 1
    note = ", and one step uses the whole training set" if whole else ""
    return "whole" if whole else "fits", f"fits, {format_bytes(peak)} per rank{note}"


def largest_batch(first: int, attempt: Callable[[int], Result]) -> int:
    """Return the largest batch that fits, or 0 if a batch of 1 does not fit.

    The first attempt has the batch `first`.
    """
    fitting, too_large = 0, 0
    batch = first
    while True:
        result = attempt(batch)
        if result == "too large":
            too_large = batch
        else:
            fitting = batch
        done = too_large and too_large - fitting <= max(1, fitting // _PRECISION)
        if result == "whole" or done:
            return fitting
        batch = 2 * fitting if not too_large else (fitting + too_large) // 2
