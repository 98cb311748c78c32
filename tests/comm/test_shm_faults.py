"""Given ranks that die, stall or disagree, when others wait for them, then nobody hangs, the error
names the rank, and no memory is left anywhere."""

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from forked_ranks import forked
from shm_cases import group_of, reduce_scatter_flat
from tutti.comm.shm import connect, registration, set_where
from tutti.comm.shm.connect import make
from tutti.comm.shm.registration import ShmOptions
from worlds import in_world, run_command, run_warm


def operations(size: int, peer: int, group: Any) -> dict[str, Callable[[], Any]]:
    """Return one call of each kind; `peer` is the other rank of a pair, in the world."""
    one, many = torch.ones(50_000), [torch.ones(50_000) for _ in range(size)]
    flat = torch.ones(size * 50_000)
    return {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "all_reduce later": lambda: dist.all_reduce(one, group=group, async_op=True).wait(),
        "reduce": lambda: dist.reduce(one, 0, group=group),
        "broadcast": lambda: dist.broadcast(one, peer, group=group),
        "all_gather": lambda: dist.all_gather(many, one, group=group),
        "reduce_scatter": lambda: reduce_scatter_flat(one, flat, group=group),
        "gather": lambda: dist.gather(one, many, 0, group=group),
        "scatter": lambda: dist.scatter(one, None, peer, group=group),
        "all_to_all": lambda: dist.all_to_all(many, [m.clone() for m in many], group=group),
        "recv": lambda: dist.recv(one, peer, group=group),
        "send": lambda: dist.send(torch.ones(1 << 23), peer, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }


KINDS = list(operations(2, 1, None))


def killed_in_the_middle(rank: int) -> Any:
    """Rank 0 forms a pair with one victim for each kind of operation."""
    victims = {kind: 1 + i for i, kind in enumerate(KINDS)}
    groups = {kind: group_of([0, victim]) for kind, victim in victims.items()}
    reports = {}
    for kind, victim in victims.items():
        if rank == 0:
            began = time.monotonic()
            try:
                operations(2, victim, groups[kind])[kind]()
                text = "no error"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            reports[kind] = [text, time.monotonic() - began < 20]
        elif rank == victim:
            time.sleep(0.5 + 0.15 * victim)
            os.kill(os.getpid(), signal.SIGKILL)
    return reports


def test_a_killed_peer_is_named_during_every_operation() -> None:
    reports, *victims = forked(killed_in_the_middle, 1 + len(KINDS), timeout=100)
    assert all(victim == {"exit": -signal.SIGKILL} for victim in victims)
    assert len(reports) == len(victims)
    for what, (text, soon) in reports.items():
        assert "PeerDied" in text and "rank 1" in text and soon, (what, text)


def disagreeing(rank: int) -> list[str]:
    texts = []
    set_where(lambda: f"train.py:{70 + rank} in step")
    for different in (
        lambda group: dist.all_reduce(torch.ones(4 + rank), group=group),
        lambda group: dist.all_reduce(torch.ones(4, dtype=_dtype(rank)), group=group),
        lambda group: dist.barrier(group) if rank else dist.all_reduce(torch.ones(4), group=group),
        lambda group: (
            dist.broadcast(torch.ones(4), rank, group=group),
            dist.barrier(group),  # a root waits for nobody: it learns of it here
        ),
    ):
        group = group_of()
        try:
            different(group)
            texts.append("no error")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
        try:  # afterwards the group says at once what went wrong first
            dist.all_reduce(torch.ones(1), group=group)
            texts.append("no error")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def _dtype(rank: int) -> torch.dtype:
    return torch.int32 if rank else torch.float32


def test_ranks_that_call_different_operations_get_an_error_that_names_both() -> None:
    for rank, texts in enumerate(forked(disagreeing, 2)):
        for text in texts:
            assert "RanksDiffer" in text and f"rank {1 - rank}" in text, text
            assert "train.py:70 in step" in text and "train.py:71 in step" in text, text


def stays_away_here(reports: dist.Store, times: int) -> None:
    while reports.add("raised", 0) < times:
        time.sleep(0.02)


def test_a_timeout_names_the_rank_that_did_not_arrive_and_its_location() -> None:
    texts, nothing = in_world(late_by_design, 2)
    assert nothing == []
    for text in texts:
        assert "ShmTimeout" in text and "rank 1" in text and "all_reduce" in text, text
        assert "test_shm_faults.py" in text and "stays_away_here" in text, text


def late_by_design(world: Any) -> list[str]:
    texts: list[str] = []
    store = _get_default_store()
    for number, asynchronous in enumerate((False, True)):
        group = group_of()
        dist.barrier(group)
        if world.rank == 0:
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=2)
            options.asyncOp = asynchronous
            try:
                group.allreduce([torch.ones(3)], options).wait()
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
            store.add("raised", 1)
        else:
            stays_away_here(store, number + 1)
        dist.barrier()
    return texts


def aborted(rank: int) -> list[str]:
    """Abort a group of CPU tensors with torch's own function."""
    texts = []
    group = group_of()
    work = dist.irecv(torch.ones(1), 1 - rank, group)
    try:
        group._get_backend(torch.device("cuda"))
        texts.append("has a backend for CUDA")
    except RuntimeError:
        pass
    distributed_c10d._abort_process_group(group)
    if group in distributed_c10d._world.pg_map:
        texts.append("is still there")
    try:
        work.wait(timedelta(seconds=20))
        texts.append("no error")
    except Exception as error:
        if type(error).__name__ not in ("GroupClosed", "PeerLeft"):
            texts.append(f"{error!r}")
    return texts


def test_torch_can_abort_a_group() -> None:
    assert forked(aborted, 2) == [[], []]


def memory_of_groups() -> list[str]:
    """Return the memory of tutti that this process still maps or holds open."""
    maps = [line.split()[-2:] for line in Path("/proc/self/maps").read_text().splitlines()]
    held = [" ".join(words) for words in maps if "memfd:tutti-shm" in " ".join(words)]
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if "memfd:tutti-shm" in target or "memfd:tutti-probe" in target:
            held.append(target)
    return held


def left_behind(rank: int) -> list[str]:
    before = memory_of_groups()
    assert before, "the default group has memory"
    for _ in range(3):
        group = group_of()
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
        dist.isend(torch.ones(3), 1 - rank, group)  # never waited for
        dist.recv(torch.ones(3), 1 - rank, group)
        dist.destroy_process_group(group)
        del group
    left = memory_of_groups()
    dist.destroy_process_group()
    return [f"{len(left)} not {len(before)}"] * (len(left) != len(before)) + memory_of_groups()


def test_destroying_a_group_frees_its_memory() -> None:
    assert forked(left_behind, 2) == [[], []]


def test_a_group_that_cannot_be_made_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError("gloo finds no network")

    monkeypatch.setattr(dist, "ProcessGroupGloo", fails)
    options = ShmOptions(can_open=lambda card: False)  # a host for each rank
    before, store = memory_of_groups(), dist.HashStore()

    def make_one(rank: int) -> None:
        with pytest.raises(OSError, match="gloo finds no network"):
            make(store, rank, 2, timedelta(seconds=20), "odd", [0, 1], options)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(make_one, range(2)))
    gc.collect()  # the error's traceback held the group
    assert memory_of_groups() == before


def test_if_shm_cannot_be_built_all_ranks_use_gloo_and_rank_0_prints_one_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registration, "_load", lambda: (None, "no C compiler: install gcc"))
    connect._print_gloo_note.cache_clear()
    before = memory_of_groups()
    for name in ("one", "other"):
        group = make(dist.HashStore(), 0, 1, timedelta(seconds=20), name)
        assert isinstance(group, dist.ProcessGroupGloo)
    assert memory_of_groups() == before
    (line,) = capsys.readouterr().err.splitlines()
    assert "gloo" in line and "no C compiler: install gcc" in line


SCRIPT = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import tutti
from tutti.comm.shm import register
register()
with tutti.init() as world:
    group = dist.new_group(backend="shm")
    for step in range(100000):
        dist.all_reduce(torch.ones(10), group=group)
        if step == 50 and world.rank == 1:
            {act}
        if step > 200 and "{act}" == "pass":
            break
"""


@pytest.mark.parametrize(
    "act",
    [
        "pass",
        "raise RuntimeError('on purpose')",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
    ids=["success", "exception", "SIGTERM", "SIGKILL"],
)
def test_nothing_is_left_after(act: str, tmp_path: Path) -> None:
    def in_shared_memory() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    before = in_shared_memory()
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT.replace("{act}", act))
    command = ["-m", "tutti", "run", "-n", "2", "--device", "cpu", script]
    if "kill" in act:
        done = run_warm(command, timeout=60)
    else:  # the end of an interpreter matters
        done = run_command([sys.executable, *command], timeout=60)
    assert (done.returncode == 0) == (act == "pass"), done.stderr
    deadline = time.monotonic() + 5  # other tests may use shared memory for a moment
    while not in_shared_memory() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert in_shared_memory() <= before
    assert _holders() == []


def _holders() -> list[str]:
    """Processes of this test, orphans included, that hold memory of tutti open."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            if any("memfd:tutti-" in link for link in links):
                found.append(f"{process.pid} {links}")
    return found
