"""tutti doctor: checks hardware and configuration, and shows a cure for each problem."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import InputFile, OutputFile, parse
from tutti.cli.results import write_json
from tutti.cli.topo import record_machines, recorded_machines
from tutti.machine.checks import checklist, nccl_topology
from tutti.machine.checks.finding import fix_commands, report
from tutti.machine.checks.probe_network import Peers
from tutti.machine.gpus import visible_gpu_count
from tutti.machine.nics import interface_address
from tutti.machine.recording import observe
from tutti.measure.terminal import text_width
from tutti.world.errors import START_TIMEOUT, UsageError, name_ranks
from tutti.world.launch import LocalWorld
from tutti.world.launchers import Identity, identify
from tutti.world.liveness import local_address_towards
from tutti.world.placement import gloo_interface

if TYPE_CHECKING:
    import torch.distributed as dist

    from tutti.machine.checks.cluster import Cluster
    from tutti.world.rendezvous import RankInfo

# Seconds to wait for the results of a rank that still runs a probe.
_GATHER_SECONDS = 120.0
_ALL_REDUCE_SECONDS = 30.0
_ALL_REDUCE_ELEMENTS = 100_003


@dataclass(frozen=True)
class Doctor:
    """Check this machine, or all hosts of a world: tutti doctor, or torchrun … -m tutti doctor

    Each finding shows the observed state, the expected state and the cure. The exit code is 1 if a
    check failed, and 0 if there are only warnings. The command changes nothing on the machine.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start. Ignored under torchrun, srun or mpirun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that --active measures. `auto` selects CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU."""
    active: bool | None = None
    """Measure compute, memory, links between ranks and copies between GPUs. Also run a collective,
    and start NCCL on every GPU. This takes some seconds (default: only with several ranks)."""
    fix: bool = False
    """Print the shell commands that cure the problems. The commands are not run."""
    all: bool = False
    """Also show checks that passed or were skipped."""
    record: OutputFile | None = None
    """Write the description of every host to this file. --from reads such a file."""
    from_: Annotated[InputFile | None, tyro.conf.arg(name="from")] = None
    """Check the hosts in this file, which --record wrote, instead of this host."""
    json: OutputFile | None = None
    """Also write the findings to this JSON file."""
    start_timeout: float = START_TIMEOUT
    """Seconds to wait for all ranks to start."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(Doctor, "tutti doctor", arguments)
    if options.from_ is not None:
        for name in ("active", "record", "ranks", "device", "ranks_per_gpu", "start_timeout"):
            if getattr(options, name) != getattr(Doctor, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} has no effect with --from. Omit one of the flags.")
        return _check_cluster(checklist.recorded_cluster(recorded_machines(options.from_)), options)
    identity = identify(os.environ)
    if options.ranks is not None and identity.size == 1 and identity.launcher == "python":
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "doctor", *arguments],
            ranks=options.ranks,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu,
            show="first",
            start_timeout=options.start_timeout,
            reported_codes=(1, 2),  # a failed check (1) and wrong usage (2) are not crashes
        ).run()
    if identity.size == 1:
        if options.device == "cuda" and not visible_gpu_count():
            raise UsageError("--device cuda needs a GPU, but none is visible. Use cpu or auto.")
        return _check_cluster(
            checklist.collect_this_host(options.device, bool(options.active)), options
        )
    return _check_cluster(_collect_world(identity, options), options, quiet=identity.rank != 0)


def _check_cluster(cluster: "Cluster", options: Doctor, quiet: bool = False) -> int:
    """Run the checks, print and write the findings unless `quiet`, and return the exit code."""
    findings = checklist.run_checks(cluster)
    exit_code = int(any(finding.status == "fail" for finding in findings))
    if quiet:
        return exit_code
    for line in report(findings, options.all, text_width(sys.stdout)):
        print(line)
    if options.fix:
        print("\n".join(["", *(list(fix_commands(findings)) or ["# nothing to cure"])]))
    elif any(finding.commands for finding in findings):
        print("To print the commands that cure these problems, add --fix.")
    if options.record is not None:
        note = "observed by tutti doctor, one machine per host"
        record_machines(options.record, cluster.machines, note)
    if options.json is not None:
        results = {
            "checks": [asdict(finding) for finding in findings],
            "hosts": [machine.host for machine in cluster.machines],
            "ranks": len(cluster.ranks),
            "nccl": nccl_topology.describe(cluster),
            "from": None if options.from_ is None else str(options.from_),
        }
        write_json(options.json, "tutti.doctor/1", results)
    return exit_code


# --- all ranks of a world ------------------------------------------------------------------------


def _collect_world(identity: Identity, options: Doctor) -> "Cluster":
    """Collect observations and probe results from all ranks through the rendezvous store.

    A process group is created only after probes have shown that all hosts can reach each other,
    because init_process_group would hang if a network connection is broken.
    """
    # Observe first, before this process changes variables, threads or CPU affinity.
    machine = observe()
    active = options.active is not False

    def progress(text: str) -> None:
        if identity.rank == 0:
            print(f"tutti doctor: {text}", file=sys.stderr, flush=True)

    with _rendezvous(identity, options.start_timeout) as (ranks, store):
        return checklist.collect_from_ranks(
            _peers(identity.rank, ranks, store),
            machine,
            _gpu_of_each_rank(ranks, options.device),
            options.device,
            (lambda: _all_reduce_error(identity.rank, ranks, store)) if active else None,
            progress,
        )


@contextlib.contextmanager
def _rendezvous(
    identity: Identity, start_timeout: float
) -> "Iterator[tuple[Sequence[RankInfo], dist.Store]]":
    """Yield the RankInfo of all ranks, and a store that has no keys of earlier runs."""
    import torch.distributed as dist

    from tutti.world.placement import visible_gpus
    from tutti.world.rendezvous import describe_rank, exchange_rank_info, open_rendezvous

    try:
        gpus = visible_gpus()
    except RuntimeError:  # the GPU driver does not work, and one of the checks reports this
        gpus = []
    rendezvous = open_rendezvous(identity, start_timeout)
    address = local_address_towards(rendezvous.host) if rendezvous.host else None
    own_info = describe_rank(identity, address or "", gpus)
    roster = exchange_rank_info(rendezvous.store, own_info, identity.size, start_timeout)
    store = dist.PrefixStore(f"tutti/doctor/{roster.start_id}", rendezvous.store)
    yield roster.ranks, store
    # Rank 0 may serve the store, so it waits until all ranks have finished.
    store.set(f"finished/{identity.rank}", "")
    if identity.rank == 0:
        with contextlib.suppress(RuntimeError):
            keys = [f"finished/{rank}" for rank in range(identity.size)]
            store.wait(keys, timedelta(seconds=10))


def _peers(rank: int, ranks: "Sequence[RankInfo]", store: "dist.Store") -> Peers:
    from tutti.world.exchange import RanksMissing, gather_json_from_store

    keys = (str(number) for number in itertools.count())

    def gather(value: Any) -> list[Any]:
        try:
            return gather_json_from_store(
                store, next(keys), value, rank, len(ranks), _GATHER_SECONDS
            )
        except RanksMissing as missing:
            raise UsageError(
                f"{name_ranks(missing.ranks)} sent no results within {_GATHER_SECONDS:.0f} s. See "
                "the output of these ranks, or run tutti doctor on each of their hosts."
            ) from None
        except RuntimeError:
            raise UsageError(
                "the rendezvous store ended, because rank 0 exited. See the output of rank 0."
            ) from None

    machines = list(dict.fromkeys(info.machine for info in ranks))
    hosts = [machines.index(info.machine) for info in ranks]
    return Peers(rank, hosts, gather, _own_address(rank, ranks))


def _own_address(rank: int, ranks: "Sequence[RankInfo]") -> str:
    """Return the address at which other ranks reach this rank: that of gloo's interface."""
    selected = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for interface in (selected, gloo_interface(ranks, rank, {})[0]):
        if interface and (address := interface_address(interface)):
            return address
    return ranks[rank].host


def _gpu_of_each_rank(ranks: "Sequence[RankInfo]", device: str) -> list[str | None]:
    """Return the UUID of each rank's GPU, or None for all ranks if the ranks run on the CPU.

    As in tutti.init, the GPUs of a host are assigned to its ranks round-robin.
    """
    if device == "cpu" or not all(info.gpus for info in ranks):
        return [None] * len(ranks)
    machines = [info.machine for info in ranks]
    return [
        info.gpus[machines[:rank].count(info.machine) % len(info.gpus)]
        for rank, info in enumerate(ranks)
    ]


def _all_reduce_error(rank: int, ranks: "Sequence[RankInfo]", store: "dist.Store") -> str:
    """Run a gloo all_reduce over all ranks. Return the error, or "" if the result is correct."""
    import torch
    import torch.distributed as dist

    interface, _ = gloo_interface(ranks, rank, os.environ)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    size = len(ranks)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_ALL_REDUCE_SECONDS),
        )
        # In float32, sums of integers are exact in any order if they are below 2^24.
        index = torch.arange(_ALL_REDUCE_ELEMENTS) % 1000
        value = (index + rank).float()
        dist.all_reduce(value)
        expected = index * size + size * (size - 1) // 2
        wrong = int((value != expected).sum())
        return f"{wrong} of {_ALL_REDUCE_ELEMENTS} elements are wrong" if wrong else ""
    except Exception as error:
        return f"gloo: {str(error).splitlines()[0]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if interface:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
