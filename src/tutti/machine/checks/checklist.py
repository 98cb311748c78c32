"""The list of all checks, the function that runs them, and the collection of their input.

This module does not depend on launchers and process groups: the caller passes the other ranks and
a function to exchange JSON values with them (`Peers.gather`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from tutti.machine.checks import (
    cpu_memory_limits,
    gpu_health,
    nccl_environment,
    network_rdma,
    nvlink_pcie,
    outliers,
    rank_agreement,
)
from tutti.machine.checks.cluster import PROBES, Cluster, GpuCopy, ProbeResults, RankObservation
from tutti.machine.checks.finding import STATUS_ORDER, Check, Finding
from tutti.machine.checks.probe_network import (
    Endpoint,
    Peers,
    ProbeServer,
    connect_hosts,
    measure_clock_offsets,
    measure_links,
)
from tutti.machine.observation import Machine, observe

_MODULES = (
    *(nccl_environment, cpu_memory_limits, gpu_health, nvlink_pcie, network_rdma),
    *(rank_agreement, outliers),
)
CHECKS = tuple(
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Check)
)


def run_checks(cluster: Cluster, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks and return their findings sorted by status: fail, warn, pass, skip.

    Findings with the same status are in the order of the checks.
    """
    found = [finding for check in checks for finding in check.findings(cluster)]
    return sorted(found, key=lambda finding: STATUS_ORDER.index(finding.status))


# --- the input of checks -------------------------------------------------------------------------


def recorded_cluster(machines: Sequence[Machine]) -> Cluster:
    """A cluster of machines from a recorded file, which cannot be probed."""
    skipped = dict.fromkeys(PROBES, "a recorded machine cannot be probed")
    return Cluster(tuple(machines), (), ProbeResults(skipped=skipped))


def collect_this_host(device: str, active: bool) -> Cluster:
    """Observe only this host. If `active`, also measure its CPU or its GPUs."""
    machine = observe()
    skipped = dict.fromkeys(("links", "all_reduce"), "needs several ranks: --ranks or a launcher")
    probes = ProbeResults(skipped=skipped)
    if active:
        from tutti.machine.checks.probe_devices import matrix_product, measure_devices, memory_copy

        used = _usable_device(device)
        alone = Peers(0, [0], lambda value: [value])
        probes = replace(
            probes,
            compute=measure_devices(alone, used, matrix_product),
            bandwidth=measure_devices(alone, used, memory_copy),
            copies=(_copies(used),),
        )
    return Cluster((machine,), (), probes)


def collect_from_ranks(
    peers: Peers,
    machine: Machine,
    gpus: Sequence[str | None],
    device: str,
    all_reduce: Callable[[], str] | None,
    progress: Callable[[str], None],
) -> Cluster:
    """Observe all ranks and test the connections between their hosts. All ranks must call this.

    Every rank gets the same result. `machine` is this rank's own observation, and `gpus` contains
    the UUID of the GPU that each rank would use. `all_reduce` runs a collective over all ranks and
    returns its error ("" if the result was exact). If `all_reduce` is None, nothing is measured.
    """
    machines = [Machine.from_json(values) for values in peers.gather(asdict(machine))]
    rows = enumerate(zip(peers.hosts, machines, gpus, strict=True))
    ranks = tuple(RankObservation(rank, *row) for rank, row in rows)
    server = ProbeServer(peers.address)
    endpoints = list(peers.gather_rows(Endpoint, [server.endpoint]))
    try:
        probes = ProbeResults()
        if len(peers.first_ranks) > 1:
            progress("connecting every host to every other")
            connections = connect_hosts(peers, endpoints)
            offsets = measure_clock_offsets(peers, endpoints)
            probes = replace(probes, connections=connections, clock_offsets=offsets)
        if all_reduce is not None:
            probes = _measure_ranks(probes, peers, endpoints, device, all_reduce, progress)
    finally:
        peers.gather(None)  # barrier: another rank may still connect to this rank's server
        server.close()
    return Cluster(tuple(machines[rank] for rank in peers.first_ranks), ranks, probes)


def _measure_ranks(
    probes: ProbeResults,
    peers: Peers,
    endpoints: Sequence[Endpoint],
    device: str,
    all_reduce: Callable[[], str],
    progress: Callable[[str], None],
) -> ProbeResults:
    from tutti.machine.checks.probe_devices import matrix_product, measure_devices, memory_copy

    used = "cuda" if all(peers.gather(_usable_device(device) == "cuda")) else "cpu"
    connections = probes.connections or ()
    if any(connection.error for connection in connections):
        skipped = {"all_reduce": "some hosts cannot connect to each other"}
        probes = replace(probes, skipped=probes.skipped | skipped)
    else:
        progress("all_reduce over all ranks")
        probes = replace(probes, all_reduce=tuple(peers.gather(all_reduce())))
    progress("transfers between all ranks")
    links = measure_links(peers, endpoints, connections)
    progress(f"compute and memory of every rank ({used})")
    compute = measure_devices(peers, used, matrix_product)
    bandwidth = measure_devices(peers, used, memory_copy)
    # The first rank of each host copies between the host's GPUs while the other ranks are idle.
    own = _copies(used) if peers.rank in peers.first_ranks else None
    gathered = peers.gather(None if own is None else [asdict(copy) for copy in own])
    copies = tuple(
        None if gathered[rank] is None else tuple(GpuCopy(**values) for values in gathered[rank])
        for rank in peers.first_ranks
    )
    return replace(probes, compute=compute, bandwidth=bandwidth, links=links, copies=copies)


def _usable_device(device: str) -> str:
    """cpu or cuda. If there is no GPU, auto and cuda fall back to cpu."""
    if device == "cpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _copies(device: str) -> tuple[GpuCopy, ...] | None:
    if device != "cuda":
        return None
    import torch

    from tutti.machine.checks.probe_devices import copy_between_gpus

    return copy_between_gpus() if torch.cuda.device_count() > 1 else None
