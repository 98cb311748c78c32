"""Explains a job that hangs or has died: which rank, which operation, which line.

The input is two snapshots of all rings of a job, about a second apart. `explain` looks for the
causes in this order, from the most certain to the least certain:

1. an operation that ranks of one group entered with different kinds, sizes, dtypes or roots
2. a rank that ended with an error of its own
3. a rank that ended while others needed it, died, or is stopped by a signal
4. progress between the snapshots: the job does not hang
5. ranks for which others wait. A rank waits for every member of the group that has not entered its
   operation. A rank that others wait for, and which itself waits for nobody, is the cause. If ranks
   wait for each other, they entered operations in different orders.
6. an operation that all ranks have entered but which does not complete: the network
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tutti.measure.files import write_atomically
from tutti.observe import ring_reader
from tutti.observe.ring_reader import (
    ENDED,
    FAILED,
    RUNNING,
    Operation,
    Process,
    is_user_frame,
    user_frame,
)
from tutti.world.errors import HANG_AFTER, UsageError, name_ranks
from tutti.world.launchers import expand_hosts

SCHEMA = "tutti.why/1"
# Errors of a rank because another rank is gone or late. They are consequences, not causes.
_CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|pair closure|remote process"
    r"|timed? ?out|communicator was aborted|recvvalue failed|failed to recv|connection was likely"
    r"|closed the group|of group .* has died|wait timeout|differs between ranks"
    r"|DistBackendError|DistNetworkError",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out ?of ?memory|MemoryError|can't allocate memory", re.IGNORECASE)
_KINDS_WITH_FREE_SIZES = ("all_to_all", "all_to_all_single", "barrier", "monitored_barrier")
_KINDS_WITH_LISTS = ("all_gather", "reduce_scatter")  # NCCL allows lists of different sizes
_LOADER = "/torch/utils/data/dataloader.py"
_FILE_CALLS = ("read", "write", "fsync", "open", "lock")
# Functions that return when all ranks have called them. They use the store, not an operation.
_SETUP = re.compile(
    r"/torch/distributed/distributed_c10d\.py:\d+ in (init_process_group|new_group|split_group)$"
    r"|/tutti/world/world\.py:\d+ in (init)$"
)


@dataclass(frozen=True)
class Culprit:
    """A rank that causes the hang: its operation, its source line, and what it does there."""

    rank: int
    host: str
    operation: str
    file: str
    line: int
    doing: str


@dataclass(frozen=True)
class Explanation:
    """Why a job does not continue. `kind` is the class of the cause.

    `hang` is False if the job makes progress or has waited for less than `hang_after` seconds.
    """

    kind: str
    verdict: str
    hang: bool
    waited_s: float = 0.0
    culprits: list[Culprit] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# -- snapshots -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """The processes of a job on all hosts that answered."""

    processes: list[Process]
    silent_hosts: tuple[str, ...] = ()  # hosts that did not answer

    @property
    def ranks(self) -> list[Process]:
        return [process for process in self.processes if process.worker < 0]


def take_snapshot(
    folder: Path, hosts: Sequence[str] = (), via: str = "ssh {host}", timeout: float = 5.0
) -> Snapshot:
    """Read all rings of a job on this host, and on other hosts through the command `via`.

    `via` is a command that runs its arguments on a host, such as `ssh {host}` or
    `srun --jobid 7 --overlap -w {host}`. On that host, it runs `tutti why --snapshot`.
    """
    processes = ring_reader.read_job(folder)
    silent = []
    running = []
    for host in hosts:
        command = [*shlex.split(via.format(host=host)), "tutti", "why", folder.name, "--snapshot"]
        running.append(
            (
                host,
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                ),
            )
        )
    end = time.monotonic() + timeout
    for host, process in running:
        try:
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            rows = json.loads(output)["processes"]
            known = {(each.host, each.pid) for each in processes}
            found = [Process.from_json(row) for row in rows]
            processes += [each for each in found if (each.host, each.pid) not in known]
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            silent.append(host)
    processes.sort(key=lambda each: (each.worker, each.rank))
    return Snapshot(processes, tuple(silent))


def hosts_of(folder: Path, hosts: str | None, via: str | None) -> tuple[list[str], str]:
    """Return the other hosts of a job, and the command that runs a command on one of them.

    `hosts` and `via` are the flags of tutti why. Without them, Slurm is asked for the hosts of its
    jobs, and a job of another launcher has only this host.
    """
    slurm = re.match(r"slurm-(\d+)\.", folder.name)
    names: list[str] = []
    if hosts is not None:
        names = expand_hosts(hosts, "--hosts")
    elif slurm:
        try:
            command = ["squeue", "--noheader", "--jobs", slurm[1], "--format", "%N"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=5)
            names = expand_hosts(done.stdout.strip(), "squeue") if done.stdout.strip() else []
        except (OSError, subprocess.TimeoutExpired, UsageError):
            names = []
    if via is None:
        via = "ssh -o BatchMode=yes {host}"
        if slurm:
            via = f"srun --jobid {slurm[1]} --overlap --nodes 1 --ntasks 1 --nodelist {{host}}"
    elif "{host}" not in via:
        raise UsageError(f"--via must have {{host}} for the name of the host, got {via!r}")
    try:
        shlex.split(via.format(host="host"))
    except (LookupError, ValueError, AttributeError):
        raise UsageError(
            f"--via {via!r} is no command line: only {{host}} may be in braces, and quotes must be "
            "closed"
        ) from None
    return [name for name in names if name != os.uname().nodename], via


def explain_job(
    folder: Path,
    hosts: Sequence[str] = (),
    via: str = "ssh {host}",
    *,
    hang_after: float = HANG_AFTER,
    pause: float = 1.2,
    timeout: float = 5.0,
) -> Explanation:
    """Take two snapshots of a job and explain them.

    A host that does not answer within `timeout` seconds is asked only once.
    """
    first = take_snapshot(folder, hosts, via, timeout)
    if any(process.alive for process in first.processes):
        time.sleep(pause)
    answering = [host for host in hosts if host not in first.silent_hosts]
    second = take_snapshot(folder, answering, via, timeout)
    return explain(first, replace(second, silent_hosts=first.silent_hosts), hang_after)


# -- the explanation -------------------------------------------------------------------------------


def explain(first: Snapshot, second: Snapshot, hang_after: float = HANG_AFTER) -> Explanation:
    """Explain why a job does not continue, from two snapshots of it."""
    return _Analysis(first, second, hang_after).explain()


class _Analysis:
    def __init__(self, first: Snapshot, second: Snapshot, hang_after: float) -> None:
        self.before = {(each.host, each.pid): each for each in first.processes}
        self.snapshot, self.hang_after = second, hang_after
        self.ranks = {process.rank: process for process in second.ranks}
        self.size = max((each.world_size for each in self.ranks.values()), default=0)
        self.blocked = {r: ops for r, p in self.ranks.items() if (ops := self._blocking(p))}
        self.waits_for = {r: self._missing(r, ops) for r, ops in self.blocked.items()}
        # Ranks that sleep or compute while an operation is pending. They may poll the operation.
        polling = {r: ops for r, p in self.ranks.items() if (ops := self._polling(p))}
        self.polls_for = {r: self._missing(r, ops) for r, ops in polling.items()}
        if not any(self.waits_for.values()):
            self.blocked |= polling
            self.waits_for |= self.polls_for
        self.setup = {r: call for r, p in self.ranks.items() if (call := _setup_call(p))}

    def explain(self) -> Explanation:
        if not self.ranks:
            return Explanation("no_ranks", "No recorded rank of this job was found.", False)
        for look in (
            self._mismatch,
            self._error,
            self._ended_early,
            self._dead,
            self._stopped,
            self._progress,
            self._silent_host,
            self._setup,
            self._not_arriving,
            self._order,
            self._network,
            self._no_communication,
        ):
            found = look()
            if found is not None:
                kind, verdict, culprits, evidence = found
                waited = self._waited()
                certain = kind in _CERTAIN
                limit = max(self.hang_after, 1.5 * self._usual_pause())
                hang = kind != "progress" and (certain or waited >= limit)
                if not hang and kind not in ("progress", "ended"):
                    verdict = f"Not a hang so far ({waited:.0f} s): {verdict}"
                rows = [self._row(process) for process in self.ranks.values()]
                return Explanation(kind, verdict, hang, round(waited, 3), culprits, evidence, rows)
        raise AssertionError("_no_communication always finds something")

    # -- certain facts ---------------------------------------------------------------------------

    def _error(self) -> "_Found":
        failed = [p for p in self.ranks.values() if p.exit_state == FAILED]
        causes = [p for p in failed if not _CONSEQUENCE.search(p.error.rpartition(" @ ")[0])]
        if not causes:
            return None
        first = max(causes, key=lambda p: p.exited_ago or 0.0)
        message, _, site = first.error.rpartition(" @ ")
        kind = "out_of_memory" if _MEMORY.search(message) else "error"
        worker = self._dead_worker(first)
        if worker is not None and "DataLoader worker" in message:
            kind, site = "loader_worker_dead", self._where(worker) or site
            message = f"loader worker {worker.worker} (pid {worker.pid}) died: {message}"
        verdict = f"{self._name(first)} failed at {site or 'an unknown line'}: {message}."
        evidence = [self._also_waiting({first.rank})]
        evidence += [
            f"{self._name(p)} failed afterwards: {_shorten(p.error.partition(' @ ')[0])}"
            for p in failed
            if p is not first
        ]
        return kind, verdict, [self._culprit(first, site, message)], _non_empty(evidence)

    def _ended_early(self) -> "_Found":
        """Find ranks that have ended normally, while others failed because they are gone."""
        failed = [p for p in self.ranks.values() if p.exit_state == FAILED]
        ended = [p for p in self.ranks.values() if p.exit_state == ENDED]
        if not failed or not ended:
            return None
        kind, doing, where = self._activity(ended[0], None, [p.rank for p in failed])
        who = name_ranks([p.rank for p in ended])
        verdict = f"{who[0].upper()}{who[1:]} {doing}."
        evidence = [
            f"{self._name(p)} failed afterwards: {_shorten(p.error.partition(' @ ')[0])}"
            for p in failed
        ]
        return kind, verdict, [self._culprit(p, where, doing) for p in ended], evidence

    def _dead(self) -> "_Found":
        dead = [p for p in self.ranks.values() if not p.alive and p.exit_state == RUNNING]
        if not dead:
            return None
        age = max(p.sample_age for p in dead)
        if len(dead) == len(self.ranks) > 1:
            stuck = self._not_arriving(ended=True)
            if stuck is not None:
                kind, verdict, culprits, evidence = stuck
                return (
                    kind,
                    f"The job has ended. Before that, {verdict[0].lower()}{verdict[1:]}",
                    culprits,
                    evidence,
                )
        first = [p for p in dead if p.sample_age > age - 1.0]
        culprits = [self._culprit(p, self._where(p), "died") for p in first]
        who = name_ranks([p.rank for p in first])
        where = (
            f" Its last known line was {self._where(first[0])}." if self._where(first[0]) else ""
        )
        verdict = (
            f"{who[0].upper()}{who[1:]} on {first[0].host} died without an error message "
            f"(killed by a signal, by the kernel because memory ran out (see dmesg), or by "
            f"os._exit).{where}"
        )
        return "dead", verdict, culprits, _non_empty([self._also_waiting({p.rank for p in first})])

    def _stopped(self) -> "_Found":
        stopped = [p for p in self.ranks.values() if p.alive and p.state in ("T", "t")]
        if not stopped:
            return None
        first = stopped[0]
        who = name_ranks([p.rank for p in stopped])
        pids = " ".join(str(p.pid) for p in stopped)
        verdict = (
            f"{who[0].upper()}{who[1:]} on {first.host} is stopped by a signal (SIGSTOP) at "
            f"{self._where(first)}. Continue it with kill -CONT {pids}."
        )
        culprits = [self._culprit(p, self._where(p), "stopped by a signal") for p in stopped]
        return (
            "stopped",
            verdict,
            culprits,
            _non_empty([self._also_waiting({p.rank for p in stopped})]),
        )

    def _progress(self) -> "_Found":
        moved = [
            p
            for p in self.snapshot.processes
            if (old := self.before.get((p.host, p.pid))) is not None and old.progress != p.progress
        ]
        if all(p.exit_state == ENDED for p in self.ranks.values()):
            return "ended", "All ranks have ended normally.", [], []
        moved = [p for p in moved if p.worker < 0]
        stuck = [r for r, ops in self.blocked.items() if self._waits_of(r, ops) >= self.hang_after]
        if not moved or (stuck and not any(self._main_moved(p) for p in moved)):
            return None
        steps = [p.steps for p in self.ranks.values()]
        seconds = [
            step.ended - step.began for p in self.ranks.values() for step in p.step_history[-20:]
        ]
        speed = f", {sorted(seconds)[len(seconds) // 2]:.3g} s per step" if seconds else ""
        verdict = f"The job makes progress: step {max(steps)}{speed}. It does not hang."
        # It may be an evaluation on one rank, or a loop that never ends.
        evidence = [
            f"rank {rank} has waited for {self._waits_of(rank, operations):.0f} s in "
            f"{self._name_operation(operations[0], rank)} at {operations[0].site}"
            for rank in stuck[:4]
            if (operations := self.blocked[rank])
        ]
        return "progress", verdict, [], evidence

    def _main_moved(self, process: Process) -> bool:
        """Return whether the main thread has moved, not only a thread that exchanges heartbeats."""
        old = self.before[process.host, process.pid]
        if process.progress[:3] != old.progress[:3] or not process.threads:
            return True
        main = process.threads[0].thread
        recent = [each for each in process.operations if each.number > old.entered]
        done = [each for each in old.operations if each.pending and each.thread == main]
        now = {each.number for each in process.operations if each.pending}
        return any(each.thread == main for each in recent) or any(
            each.number not in now for each in done
        )

    def _silent_host(self) -> "_Found":
        if not self.snapshot.silent_hosts:
            return None
        hosts = ", ".join(self.snapshot.silent_hosts)
        missing = sorted(set(range(self.size)) - set(self.ranks))
        of_host = f" with {name_ranks(missing)}" if missing else ""
        verdict = (
            f"Host {hosts}{of_host} does not answer: the host is frozen or down, or the network is "
            "partitioned."
        )
        culprits = [
            Culprit(rank, hosts, "", "", 0, "on a host that does not answer") for rank in missing
        ]
        return "host_silent", verdict, culprits, _non_empty([self._also_waiting(set(missing))])

    # -- operations that do not match --------------------------------------------------------------

    def _mismatch(self) -> "_Found":
        """Find the first operation that ranks of one group entered with different arguments."""
        by_place: dict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)
        for rank, process in self.ranks.items():
            for operation in process.operations:
                if not operation.point_to_point:
                    by_place[operation.group, operation.sequence][rank] = operation
        found = []
        for (group, _), operations in by_place.items():
            forms = {rank: _form(operation) for rank, operation in operations.items()}
            # Only an operation that some rank still waits for, or that failed, explains a hang.
            stuck = any(
                each.state != "completed" or self._was_last(rank, each)
                for rank, each in operations.items()
            )
            if stuck and len(set(forms.values())) > 1:
                found.append((min(each.entered for each in operations.values()), group, operations))
        if not found or self._all_moved():
            return None
        _, group, operations = min(found, key=lambda item: item[0])
        wrong = self._odd_ones(operations)
        usual = [rank for rank in operations if rank not in wrong] or sorted(operations)[:1]
        sequence = next(iter(operations.values())).sequence
        label = self._label(group, operations)
        parts = [
            f"rank {rank} entered {each.signature} at {each.site or 'an unknown line'}"
            for rank, each in ((rank, operations[rank]) for rank in (*wrong, usual[0]))
        ]
        what = _difference([operations[rank] for rank in (*wrong, usual[0])])
        others = f" ({name_ranks(usual)} agree)" if len(usual) > 1 else ""
        verdict = (
            f"Ranks disagree about the {what} of operation #{sequence} of {label}: "
            f"{', but '.join(parts)}{others}."
        )
        culprits = [
            self._culprit(self.ranks[rank], operations[rank].site, operations[rank].signature)
            for rank in wrong
        ]
        evidence = [
            f"{self._name(p)} failed afterwards: {_shorten(p.error.rpartition(' @ ')[0])}"
            for p in self.ranks.values()
            if p.exit_state == FAILED
        ]
        return "mismatch", verdict, culprits, evidence

    def _was_last(self, rank: int, operation: Operation) -> bool:
        """Return whether a rank failed after this operation of its group or the next one.

        gloo completes a broadcast of a wrong size. The rank fails when it uses the result.
        """
        process = self.ranks[rank]
        entered = process.groups[operation.group].collectives
        return process.exit_state == FAILED and entered - operation.sequence < 2

    def _all_moved(self) -> bool:
        old = {key: process.progress for key, process in self.before.items()}
        return all(
            p.alive and old.get((p.host, p.pid), p.progress) != p.progress
            for p in self.ranks.values()
        )

    def _odd_ones(self, operations: dict[int, Operation]) -> list[int]:
        """Return the ranks whose operation is the wrong one.

        These are the ranks of the minority. If there is none, they are the ranks that never before
        called such an operation from that line. If that does not help either, all ranks are named.
        """
        counts = Counter(_form(each) for each in operations.values())
        usual, count = counts.most_common(1)[0]
        if count > len(operations) / 2:
            return [rank for rank, each in operations.items() if _form(each) != usual]
        new = [rank for rank, each in operations.items() if not self._seen_before(rank, each)]
        return new if 0 < len(new) < len(operations) else sorted(operations)[1:]

    def _seen_before(self, rank: int, operation: Operation) -> bool:
        """Return whether the operation continues the order of the rank's earlier operations.

        It does if the same form was called from the same line before, after the same predecessor.
        """
        calls = [
            (_form(each), each.site)
            for each in self.ranks[rank].operations
            if each.group == operation.group and each.number <= operation.number
        ]
        pairs = list(pairwise(calls))
        return bool(pairs) and pairs[-1] in pairs[:-1]

    # -- ranks that do not arrive ------------------------------------------------------------------

    def _blocking(self, process: Process) -> list[Operation]:
        """Return the pending operations in which the main thread of the process is blocked."""
        if process.exit_state == ENDED:
            return []
        pending = [each for each in process.operations if each.pending]
        # NCCL's operations run on the GPU, so the host does not know whether they have completed.
        # The latest one counts as pending if no later operation was entered.
        pending = [each for each in pending if each.device == "cpu"] or pending[-1:]
        if not pending or not process.threads:
            return pending
        main = process.threads[0]
        top = main.frames[0] if main.frames else ""
        if any(_LOADER in each for each in main.frames[:6]):
            return []
        in_communication = not is_user_frame(top) and ("/torch/" in top or "/tutti/" in top)
        waits = main.system_call in ("futex", "poll", "receive", "send", "")
        return pending if in_communication or (waits and main.state != "R") else []

    def _polling(self, process: Process) -> list[Operation]:
        """Return pending operations that a loop of the program, or another thread, may wait for."""
        main = process.threads[0] if process.threads else None
        if main is None or process.rank in self.blocked or process.exit_state != RUNNING:
            return []
        if main.system_call in _FILE_CALLS or any(_LOADER in each for each in main.frames):
            return []
        return [each for each in process.operations if each.pending and each.device == "cpu"]

    def _missing(self, rank: int, operations: list[Operation]) -> dict[int, Operation]:
        """Return the ranks that have not entered the operations, each with one operation."""
        process = self.ranks[rank]
        missing: dict[int, Operation] = {}
        for operation in operations:
            group = process.groups.get(operation.group)
            if group is None:
                continue
            members = group.ranks or tuple(range(group.size))
            if operation.point_to_point:
                peer = members[operation.peer] if 0 <= operation.peer < len(members) else None
                if peer is not None and not self._has_counterpart(peer, rank, operation, members):
                    missing.setdefault(peer, operation)
                continue
            for member in members:
                other = self.ranks.get(member)
                entered = (
                    other.groups[operation.group].collectives
                    if other is not None and operation.group in other.groups
                    else 0
                )
                if member != rank and entered < operation.sequence:
                    missing.setdefault(member, operation)
        return missing

    def _has_counterpart(
        self, peer: int, rank: int, operation: Operation, members: Sequence[int]
    ) -> bool:
        """Return whether `peer` has called the receive of this send (or the reverse)."""
        other = self.ranks.get(peer)
        if other is None:
            return False
        kinds = ("recv", "recv_any_source") if operation.kind == "send" else ("send",)
        own = members.index(rank) if rank in members else rank
        return any(
            each.kind in kinds
            and each.group == operation.group
            and each.peer in (own, -1)
            and each.tag == operation.tag
            and (each.sequence >= operation.sequence or each.kind == "recv_any_source")
            for each in other.operations
        )

    def _not_arriving(self, ended: bool = False) -> "_Found":
        wanted: dict[int, list[int]] = defaultdict(list)  # rank: the ranks that wait for it
        for rank, missing in self.waits_for.items():
            for other in missing:
                wanted[other].append(rank)
        # A rank that is blocked, but not by a rank of this list, is not the cause.
        roots = [rank for rank in wanted if not self.waits_for.get(rank)]
        roots = [rank for rank in roots if not self.polls_for.get(rank)] or roots
        if not roots:
            return None
        waiters = sorted({each for root in roots for each in wanted[root]})
        operation = self.waits_for[wanted[roots[0]][0]][roots[0]]
        first = self.ranks.get(roots[0])
        name = self._name_operation(operation, wanted[roots[0]][0])
        waited = self._waited()
        if first is None:
            return self._not_recorded(sorted(r for r in roots if r not in self.ranks), name)
        kind, doing, where = self._activity(first, operation, waiters)
        if operation.point_to_point:
            verb = (
                "called the matching recv for"
                if operation.kind == "send"
                else "sent the message of"
            )
            if kind in ("waiting", "busy", "sleeping"):
                kind = "missing_receive" if operation.kind == "send" else "missing_send"
            lead = f"{self._name(first)} has not {verb} {name}"
        else:
            lead = f"{self._name(first)} has not entered {name}"
        also = [rank for rank in roots[1:] if rank in self.ranks]
        verdict = f"{lead}: it {doing}{f' for {waited:.0f} s' if waited >= 1 else ''}."
        if also:
            verdict += f" So {'have' if len(also) > 1 else 'has'} {name_ranks(sorted(also))} not."
        waiting = [
            f"rank {each} waits in it at {self._site(each, roots[0])}" for each in waiters[:4]
        ]
        if len(waiters) > 4:
            waiting.append(f"{len(waiters) - 4} more ranks wait in it")
        culprits = [self._culprit(first, where, doing, name)]
        for rank in also:
            _, each_doing, each_where = self._activity(self.ranks[rank], operation, waiters)
            culprits.append(self._culprit(self.ranks[rank], each_where, each_doing, name))
        return kind, verdict, culprits, waiting

    def _not_recorded(
        self, missing: list[int], name: str
    ) -> tuple[str, str, list[Culprit], list[str]]:
        """Ranks that have not started, or whose rings are on another host."""
        who = name_ranks(missing)
        one = len(missing) == 1
        verdict = (
            f"{who[0].upper()}{who[1:]} of {self.size} left no recording here and "
            f"{'has' if one else 'have'} not entered {name}: "
            f"{'it has' if one else 'they have'} not started, or "
            f"{'runs' if one else 'run'} on another host (give --hosts)."
        )
        culprits = [Culprit(rank, "", name, "", 0, "not recorded") for rank in missing]
        return "missing", verdict, culprits, _non_empty([self._also_waiting(set(missing))])

    def _setup(self) -> "_Found":
        """Ranks wait in init_process_group or new_group for ranks that have not called it."""
        if not self.setup:
            return None
        name = Counter(self.setup.values()).most_common(1)[0][0]
        inside = [f"rank {r} waits in it at {self._where(self.ranks[r])}" for r in self.setup][:4]
        missing = sorted(set(range(self.size)) - set(self.ranks))
        if missing:
            kind, verdict, culprits, _ = self._not_recorded(missing, name)
            return kind, verdict, culprits, inside
        late = [r for r in self.ranks if r not in self.setup]
        # A rank that waits for a rank which is in this function cannot be the first cause, unless
        # it called its operation in another order.
        late = [r for r in late if not self.waits_for.get(r)] or late
        if not late:
            return None
        first = self.ranks[late[0]]
        kind, doing, where = self._activity(first, None, [])
        if self.blocked.get(first.rank):
            operation = self.blocked[first.rank][0]
            where = operation.site
            kind = "order"
            doing = f"waits in {self._name_operation(operation, first.rank)} at {where}"
        verdict = f"{self._name(first)} has not entered {name}: it {doing}."
        if late[1:]:
            verdict += f" So {'have' if late[2:] else 'has'} {name_ranks(late[1:])} not."
        culprits = [
            self._culprit(self.ranks[r], self._where(self.ranks[r]), "", name) for r in late
        ]
        culprits[0] = self._culprit(first, where, doing, name)
        return kind, verdict, culprits, inside

    def _order(self) -> "_Found":
        """Ranks wait for each other: they entered operations in different orders."""
        cycle = self._cycle()
        if not cycle:
            return None
        if (found := self._wrong_message()) is not None:
            return found
        parts = []
        culprits = []
        messages = []
        for rank, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            operation = self.waits_for[rank][other]
            messages.append(operation.point_to_point)
            name = self._name_operation(operation, rank)
            parts.append(f"rank {rank} waits for rank {other} in {name} at {operation.site}")
            culprits.append(
                self._culprit(self.ranks[rank], operation.site, operation.signature, name)
            )
        if all(messages):
            kinds = {
                self.waits_for[r][o].kind
                for r, o in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            }
            missing = "send" if kinds == {"recv"} else "receive" if kinds == {"send"} else "message"
            lead = f"Ranks wait for each other and none calls the matching {missing}: "
            return f"missing_{missing}", lead + "; ".join(parts) + ".", culprits, []
        lead = "Ranks wait for each other, because they call operations in different orders: "
        return "order", lead + "; ".join(parts) + ".", culprits, []

    def _wrong_message(self) -> "_Found":
        """Find a send of one rank whose peer or tag is wrong, and the receive that waits for it."""
        receives = [
            (rank, operation)
            for rank, missing in self.waits_for.items()
            for operation in missing.values()
            if operation.kind == "recv"
        ]
        for other, receive in receives:
            rank = self._peer(receive, other)
            for send in self.ranks[rank].operations if rank in self.ranks else ():
                # A send of a small message may have completed although nobody received it.
                if send.kind != "send" or not self._missing(rank, [send]):
                    continue
                cause = "tag" if self._peer(send, rank) == other else "peer"
                verdict = (
                    f"A message has a wrong {cause}: rank {rank} called "
                    f"{self._name_operation(send, rank)} at {send.site}, but rank {other} called "
                    f"{self._name_operation(receive, other)} at {receive.site}."
                )
                culprits = [
                    self._culprit(self.ranks[rank], send.site, send.signature),
                    self._culprit(self.ranks[other], receive.site, receive.signature),
                ]
                return "missing_message", verdict, culprits, []
        return None

    def _peer(self, operation: Operation, rank: int) -> int:
        """Return the global rank of the other end of a message, or -1."""
        group = self.ranks[rank].groups[operation.group]
        members = group.ranks or tuple(range(group.size))
        return members[operation.peer] if 0 <= operation.peer < len(members) else operation.peer

    def _cycle(self) -> list[int]:
        for start in self.waits_for:
            path = [start]
            while True:
                following = [
                    each for each in self.waits_for.get(path[-1], {}) if each in self.ranks
                ]
                if not following:
                    break
                if following[0] in path:
                    return path[path.index(following[0]) :]
                path.append(following[0])
        return []

    def _network(self) -> "_Found":
        """All ranks have entered the operations that they wait for."""
        if not self.blocked:
            return None
        # The oldest operation that has not completed on some rank.
        operation, rank = min(
            ((op, r) for r, ops in self.blocked.items() for op in ops),
            key=lambda item: item[0].entered,
        )
        name = self._name_operation(operation, rank)
        hosts = sorted({p.host for p in self.ranks.values()})
        lost = {p.rank: p.network for p in self.ranks.values() if p.network}
        evidence = [
            f"rank {r} has sent data that {', '.join(addresses)} does not acknowledge"
            for r, addresses in lost.items()
        ]
        blocked = name_ranks(sorted(self.blocked))
        if lost or len(hosts) > 1:
            verdict = (
                f"All ranks have entered {name}, but no data arrives: the network between "
                f"{' and '.join(hosts)} is interrupted. {blocked[0].upper()}{blocked[1:]} wait."
            )
            culprits = [
                self._culprit(self.ranks[r], operation.site, "no acknowledgement of data", name)
                for r in lost or self.blocked
            ]
            return "partition", verdict, culprits, evidence
        on_gpu = operation.device != "cpu"
        reason = (
            "A GPU kernel does not end, or the GPUs cannot reach each other."
            if on_gpu
            else "The backend does not complete it."
        )
        verdict = (
            f"All members have entered {name} at {operation.site}, but it does not complete. "
            f"{reason}"
        )
        culprits = [
            self._culprit(self.ranks[r], operation.site, "inside the operation", name)
            for r in self.blocked
        ]
        return "gpu" if on_gpu else "inside", verdict, culprits, evidence

    def _no_communication(self) -> "_Found":
        """No rank waits for another rank."""
        missing = sorted(set(range(self.size)) - set(self.ranks))
        rows = []
        kinds = []
        for process in self.ranks.values():
            kind, doing, where = self._activity(process, None, [])
            kinds.append(kind)
            rows.append((process, doing, where))
        places = Counter(where for _, _, where in rows)
        kind = (
            "storage"
            if set(kinds) == {"storage"}
            else kinds[0]
            if len(set(kinds)) == 1
            else "mixed"
        )
        process, doing, where = rows[0]
        if len(places) == 1 and len(rows) > 1:
            verdict = f"No rank waits for another rank: every rank {doing}."
        else:
            verdict = "No rank waits for another rank: " + "; ".join(
                f"rank {p.rank} {text}" for p, text, _ in rows[:8]
            )
            verdict += "."
        culprits = [self._culprit(p, place, text) for p, text, place in rows]
        evidence = [f"{name_ranks(missing)} of {self.size} left no recording here"] * bool(missing)
        return kind, verdict, culprits, evidence

    # -- what a rank does --------------------------------------------------------------------------

    def _activity(
        self, process: Process, operation: Operation | None, waiters: Sequence[int]
    ) -> tuple[str, str, str]:
        """Return (kind, what the rank does as text, its source line)."""
        where = self._where(process)
        others = [self.ranks[rank] for rank in waiters]
        if process.exit_state == ENDED:
            ended = f"has ended normally after {process.steps} steps and {process.batches} batches"
            if others:
                ended += f", while rank {others[0].rank} is in step {others[0].steps + 1}"
            uneven = any(p.batches != process.batches for p in others) and process.batches > 0
            return ("uneven_batches" if uneven else "ended_early"), ended, where
        if process.exit_state == FAILED:
            message, _, site = process.error.rpartition(" @ ")
            return "error", f"failed at {site or where}: {_shorten(message)}", site or where
        if not process.alive:
            return "dead", f"has died (last known line: {where})", where
        main = process.threads[0] if process.threads else None
        if main is None and process.operations:  # a dump of the flight recorder has no stacks
            last = process.operations[-1]
            name = self._name_operation(last, process.rank)
            return "unknown", f"entered {name} last, at {last.site}", last.site
        if main is None:
            return "unknown", "has entered no operation, and its stack is not known", where
        if any(_LOADER in frame for frame in main.frames):
            return self._loader_activity(process, where)
        keeps_gil = process.gil_age > 3.0 and process.sample_age < 3.0
        if keeps_gil and main.system_call not in _FILE_CALLS:
            text = f"keeps the GIL at {where}: native code runs without releasing it"
            return "gil", text, where
        fewer = [p for p in others if p.loaders_ended < process.loaders_ended]
        note = "keeps the GIL and " if keeps_gil else ""
        kind = ""
        if fewer and process.batches:
            kind = "uneven_batches"
            note = (
                f"its data loader has ended after {process.batches} batches, "
                f"rank {fewer[0].rank} is at batch {fewer[0].batches}, and it now "
            )
        if main.state == "D":
            return (
                kind or "storage",
                f"{note}waits for a disk or file system{_of_file(main.file)} at {where}",
                where,
            )
        if main.system_call in _FILE_CALLS:
            verbs = {"lock": "waits for a file lock on", "fsync": "flushes"}
            verb = verbs.get(main.system_call, f"{main.system_call}s")
            target = f" {main.file}" if main.file else ""
            is_file = main.file.startswith("/") and not main.file.startswith("/dev/")
            found = "storage" if is_file or main.system_call == "open" else "waiting"
            return kind or found, f"{note}{verb}{target} at {where}", where
        if any(
            re.search(r"/torch/cuda/__init__.py:\d+ in synchronize", each)
            for each in main.frames[:2]
        ):
            return kind or "gpu", f"{note}waits for its GPU at {where}", where
        texts = {
            "sleep": ("sleeping", "sleeps"),
            "futex": ("waiting", "waits for a lock or another thread"),
            "poll": ("waiting", "waits for input or output"),
            "receive": ("waiting", "waits for data from a socket"),
            "send": ("waiting", "sends data to a socket"),
            "connect": ("waiting", "connects to another process"),
            "wait": ("waiting", "waits for a child process"),
        }
        if self._is_busy(process) or (main.state == "R" and not main.system_call):
            return kind or "busy", f"{note}computes at {where}", where
        found, text = texts.get(main.system_call, ("waiting", "is"))
        threads = ""
        if main.system_call == "futex":  # the main thread may wait for another thread
            places = [user_frame(each.frames) for each in process.threads[1:]]
            places = [each for each in places if each and is_user_frame(each)]
            joins = any(
                re.search(r"/threading.py:\d+ in (join|_shutdown)$", f) for f in main.frames
            )
            if joins and len(places) == 1:
                text = f"waits for its thread at {places[0]}"
                return kind or found, f"{note}{text} (its main thread is at {where})", places[0]
            verb = "threads are" if places[1:] else "thread is"
            threads = f" (its other {verb} at {', '.join(places[:3])})" if places else ""
        return kind or found, f"{note}{text} at {where or 'an unknown line'}{threads}", where

    def _is_busy(self, process: Process) -> bool:
        old = self.before.get((process.host, process.pid))
        if old is None or process.time <= old.time:
            return False
        return (process.cpu_seconds - old.cpu_seconds) / (process.time - old.time) > 0.5

    def _workers(self, process: Process) -> list[Process]:
        return [
            p
            for p in self.snapshot.processes
            if p.worker >= 0 and p.parent == process.pid and p.host == process.host
        ]

    def _dead_worker(self, process: Process) -> Process | None:
        """Return a loader worker of the rank that has died without ending normally."""
        workers = self._workers(process)
        return next((p for p in workers if not p.alive and p.exit_state == RUNNING), None)

    def _loader_activity(self, process: Process, where: str) -> tuple[str, str, str]:
        workers = self._workers(process)
        dead = self._dead_worker(process)
        if dead is not None:
            place = self._where(dead)
            text = f"waits for its data loader at {where}, whose worker {dead.worker} has died"
            return "loader_worker_dead", f"{text} (last known line: {place})", place or where
        stopped = [p for p in workers if p.state in ("T", "t")]
        if stopped:
            number = stopped[0].worker
            text = f"waits for its data loader at {where}: worker {number} is stopped by a signal"
            return "loader_worker_stuck", text, self._where(stopped[0]) or where
        for worker in workers:
            main = worker.threads[0] if worker.threads else None
            place = self._where(worker)
            if main is None or not place or "/torch/utils/data/_utils/worker.py" in place:
                continue
            if re.search(r"/(queues|connection|synchronize)\.py:\d+", main.frames[0]) and (
                "/torch/utils/data/"
                in next(
                    iter(f for f in main.frames if "/lib/python3" not in f or "/torch/" in f), ""
                )
            ):
                continue  # idle: the worker waits for indices
            _, doing, place = self._activity_of_worker(worker)
            text = f"waits for its data loader at {where}: worker {worker.worker} {doing}"
            return "loader_worker_stuck", text, place
        return "input", f"waits for its data loader at {where}", where

    def _activity_of_worker(self, worker: Process) -> tuple[str, str, str]:
        main = worker.threads[0]
        place = self._where(worker)
        if main.system_call in ("read", "write", "fsync", "open") and main.file:
            return "storage", f"{main.system_call}s {main.file} at {place}", place
        texts = {"sleep": "sleeps", "futex": "waits for a lock or another thread"}
        verb = texts.get(main.system_call, "computes" if main.state == "R" else "waits")
        return "waiting", f"{verb} at {place}", place

    # -- texts -------------------------------------------------------------------------------------

    def _where(self, process: Process) -> str:
        """Return the source line of the program in which the main thread was last seen."""
        last = process.operations[-1] if process.operations else None
        main = process.threads[0].thread if process.threads else None
        newer = last is not None and last.entered > process.time - process.sample_age
        if last is not None and newer and main in (None, last.thread):
            return last.site  # newer than the sampled stack
        return user_frame(process.threads[0].frames) if process.threads else ""

    def _site(self, rank: int, wanted: int) -> str:
        operation = self.waits_for[rank][wanted]
        return operation.site or self._where(self.ranks[rank]) or "an unknown line"

    def _name(self, process: Process) -> str:
        return f"Rank {process.rank}{f' (host {process.host})' * bool(process.host)}"

    def _label(self, group: str, operations: dict[int, Operation]) -> str:
        return self.ranks[next(iter(operations))].groups[group].label

    def _name_operation(self, operation: Operation, rank: int) -> str:
        group = self.ranks[rank].groups[operation.group]
        if operation.point_to_point:
            peer = self._peer(operation, rank)
            way = (
                f"from rank {rank} to rank {peer}"
                if operation.kind == "send"
                else (f"from rank {peer} to rank {rank}")
            )
            tag = f" with tag {operation.tag}" if operation.tag > 0 else ""
            return f"{operation.kind} #{operation.sequence} {way}{tag}"
        return f"{operation.kind} #{operation.sequence} of {group.label}"

    def _waited(self) -> float:
        """Return for how long the ranks have waited, in seconds."""
        waits = [self._waits_of(rank, operations) for rank, operations in self.blocked.items()]
        return max(waits, default=min((p.step_age for p in self.ranks.values()), default=0.0))

    def _waits_of(self, rank: int, operations: list[Operation]) -> float:
        return max(self.ranks[rank].time - operation.entered for operation in operations)

    def _usual_pause(self) -> float:
        """Return the longest pause that the job had at least three times, in seconds.

        A job whose steps take minutes does not hang because nothing has moved for seconds.
        """
        times = sorted(
            moment + process.clock_offset
            for process in self.ranks.values()
            for moment in (
                *(each.entered for each in process.operations),
                *(each.completed for each in process.operations if each.completed),
                *(each.ended for each in process.step_history),
            )
        )
        pauses = sorted((after - before for before, after in pairwise(times)), reverse=True)
        return pauses[2] if len(pauses) > 2 else 0.0

    def _also_waiting(self, causes: set[int]) -> str:
        waiting = sorted(rank for rank in self.blocked if rank not in causes)
        if not waiting:
            return ""
        operation = self.blocked[waiting[0]][0]
        name = self._name_operation(operation, waiting[0])
        return (
            f"{name_ranks(waiting)} wait{'s' * (len(waiting) == 1)} in {name} at {operation.site}"
        )

    def _culprit(self, process: Process, site: str, doing: str, operation: str = "") -> Culprit:
        match = re.match(r"(.*):(\d+) in ", site)
        if not operation and process.operations:
            operation = process.operations[-1].signature
        file, line = (match[1], int(match[2])) if match else ("", 0)
        return Culprit(process.rank, process.host, operation, file, line, doing)

    def _row(self, process: Process) -> dict[str, Any]:
        """Return the row of a rank in the table and in the JSON."""
        pending = self.blocked.get(process.rank)
        kind, doing, where = (
            ("blocked", "waits for other ranks", self._where(process))
            if pending
            else self._activity(process, None, [])
        )
        operation = (
            pending[0] if pending else process.operations[-1] if process.operations else None
        )
        return {
            "rank": process.rank,
            "host": process.host,
            "pid": process.pid,
            "alive": process.alive,
            "step": process.steps,
            "batches": process.batches,
            "phase": process.phase,
            "state": kind,
            "doing": doing,
            "where": where,
            "operation": self._name_operation(operation, process.rank) if operation else "",
            "operation_state": operation.state if operation else "",
            "site": operation.site if operation else "",
            "waits_for": sorted(self.waits_for.get(process.rank, {})),
            "error": process.error,
            "stack": list(process.threads[0].frames) if process.threads else [],
        }


_Found = tuple[str, str, list[Culprit], list[str]] | None
_CERTAIN = (
    "error", "out_of_memory", "dead", "stopped", "mismatch", "order", "ended_early",
    "uneven_batches", "loader_worker_dead",
)  # fmt: skip


def _form(operation: Operation) -> tuple[Any, ...]:
    """Return what all ranks of a group must have in common."""
    on_gpu = operation.device != "cpu"
    if operation.kind in _KINDS_WITH_FREE_SIZES or (on_gpu and operation.kind in _KINDS_WITH_LISTS):
        return (operation.kind,)
    return (
        operation.kind, operation.dtype, operation.elements, operation.reduction, operation.peer,
    )  # fmt: skip


def _setup_call(process: Process) -> str:
    """Return the function for all ranks in which a process creates its groups, or ""."""
    if not process.alive or process.exit_state != RUNNING or not process.threads:
        return ""
    for frame in reversed(process.threads[0].frames):
        if match := _SETUP.search(frame):
            return "tutti.init" if match[2] else f"{match[1]}"
    return ""


def _difference(operations: list[Operation]) -> str:
    """Return the first property in which the operations differ."""
    for name in ("kind", "dtype", "reduction", "peer"):
        if len({getattr(each, name) for each in operations}) > 1:
            return {"peer": "root", "reduction": "reduction"}.get(name, name)
    return "size"


def _of_file(file: str) -> str:
    return f" ({file})" if file.startswith("/") else ""


def _shorten(message: str) -> str:
    """Return the first 120 characters of a message, without the source file of C++ errors."""
    message = re.sub(r"^(\w+: )?\[[^\]]*\]\s*", r"\1", message)
    return message if len(message) <= 120 else f"{message[:119]}…"


def _non_empty(texts: list[str]) -> list[str]:
    return [text for text in texts if text]


# -- finding a hang without being asked ------------------------------------------------------------


class HangWatch:
    """Notices that a job has stopped making progress, and explains it once.

    The supervisor of the ranks calls `tick` about once a second. A job hangs if no counter of any
    rank has moved for `hang_after` seconds, or for 4 times the longest pause that the job had
    before and recovered from, whichever is longer.
    """

    def __init__(self, job: str, hang_after: float = HANG_AFTER) -> None:
        self.folder = ring_reader.job_folder(job)
        self.hang_after = hang_after
        self.explanation: Explanation | None = None
        self._last: tuple[Any, ...] = ()
        self._moved = time.monotonic()
        self._longest_pause = 0.0

    def tick(self) -> Explanation | None:
        """Return an explanation when a hang is noticed, and None otherwise."""
        ranks = ring_reader.read_progress(self.folder)
        now = time.monotonic()
        counters = tuple(ranks)
        if counters != self._last or not counters:
            if self._last:
                self._longest_pause = max(self._longest_pause, now - self._moved)
            self._last, self._moved, self.explanation = counters, now, None
            return None
        limit = max(self.hang_after, 4 * self._longest_pause)
        if now - self._moved < limit or self.explanation is not None:
            return None
        self.explanation = explain_job(self.folder, hang_after=min(limit, self.hang_after) * 0.5)
        return self.explanation


class RunObserver:
    """Records the ranks of `tutti run` or `tutti train`, and explains a hang or a failure.

    The explanation is printed on standard error and written to why.json in `folder`. The rings of a
    job that ended normally are removed. Otherwise they stay for `tutti why`, for a day at most.
    """

    def __init__(self, hang_after: float = HANG_AFTER, folder: Path | None = None) -> None:
        self._hang_after, self._folder = hang_after, folder
        self._job, self._watch = "", HangWatch("", hang_after)
        self._last: Explanation | None = None

    def begin(self, job: str) -> dict[str, str]:
        """Return the environment variables that make the ranks record themselves."""
        self._job, self._watch = job, HangWatch(job, self._hang_after)
        return {"TUTTI_OBSERVE": "1"}

    def tick(self) -> None:
        """Print an explanation if the job has just begun to hang."""
        explanation = self._watch.tick()
        if explanation is not None and explanation.hang:
            self._last = explanation
            self._show(explanation)
        if self._last is not None and self._watch.explanation is None:
            self._last = None
            print("tutti why: the job makes progress again", file=sys.stderr, flush=True)

    def failed(self) -> None:
        """Explain the state of the ranks at the moment of the first failure."""
        explanation = explain_job(self._watch.folder, hang_after=0.0, pause=0.0)
        # `tutti run` itself reports an error, and a rank that died.
        if explanation.kind not in ("error", "dead", "no_ranks", "ended", "out_of_memory"):
            self._last = explanation

    def end(self, code: int) -> None:
        """Print the explanation of a failed job again as its last output, and remove the rings."""
        if code and self._last is not None:
            self._show(self._last)
        if code == 0:
            ring_reader.remove_job(self._job)

    def _show(self, explanation: Explanation) -> None:
        lines = [
            f"tutti why: {explanation.verdict}",
            *(f"  {each}" for each in explanation.evidence),
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        if self._folder is not None and self._folder.is_dir():
            content = {"schema": SCHEMA, "job": self._job, **explanation.to_json()}
            write_atomically(self._folder / "why.json", json.dumps(content, indent=1))


def job_of(text: str | None) -> Path | None:
    """Return the folder of the job that a user named: by job name, pid or run folder.

    Without a name it is the job with the newest living process, or else the newest job.
    """
    folders = ring_reader.jobs()
    if text is None:
        living = [f for f in folders if any(p.alive for p in ring_reader.read_job(f, 0, 0))]
        return next(iter(living or folders), None)
    named = Path(text)
    if (named / "job.txt").is_file():
        text = (named / "job.txt").read_text().strip()
    for folder in folders:
        if folder.name == ring_reader.job_folder(text).name or folder == named:
            return folder
        if text.isdecimal() and (folder / f"{text}.ring").exists():
            return folder
    if text.isdecimal():  # the pid of a launcher, such as torchrun or tutti run
        for folder in folders:
            if any(p.parent == int(text) for p in ring_reader.read_job(folder, 0, 0)):
                return folder
    return named if named.is_dir() and any(named.glob("*.ring")) else None
