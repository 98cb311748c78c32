"""The list of all checks, a function that runs checks, and functions that collect their input."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from tutti.machine.checks import (
    cpu_memory_limits,
    gpu_health,
    nccl_environment,
    nccl_topology,
    network_rdma,
    nvlink_pcie,
    outliers,
    probe_network,
)
from tutti.machine.checks.cluster import PROBES, Cluster, GpuCopy, ProbeResults, RankObservation
from tutti.machine.checks.finding import STATUS_ORDER, Check, Finding
from tutti.machine.checks.probe_network import Endpoint, Peers, ProbeServer
from tutti.machine.recording import Machine, observe

_MODULES = (
    nccl_environment,
    cpu_memory_limits,
    gpu_health,
    nvlink_pcie,
    network_rdma,
    outliers,
    nccl_topology,
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


def recorded_cluster(machines: Sequence[Machine]) -> Cluster:
    """Return a cluster of machines from a machine file. All probes are skipped."""
    skipped = dict.fromkeys(PROBES, "a recorded machine cannot be probed")
    return Cluster(tuple(machines), (), ProbeResults(skipped=skipped))


def collect_this_host(device: str, active: bool) -> Cluster:
    """Observe this host only.

    With `active`, also start NCCL and measure the CPU or the GPUs.
    """
    machine = observe()
    skipped = dict.fromkeys(("links", "all_reduce"), "needs several ranks (--ranks or a launcher)")
    probes = ProbeResults(skipped=skipped)
    if active:
        peers = Peers(0, [0], lambda value: [value])
        probes = _measure_devices(_start_nccl(probes, peers, device), peers, device)
    return Cluster((machine,), (), probes)


def collect_from_ranks(
    peers: Peers,
    machine: Machine,
    gpus: Sequence[str | None],
    device: str,
    all_reduce: Callable[[], str] | None,
    progress: Callable[[str], None],
) -> Cluster:
    """Observe all ranks, and test the connections between their hosts.

    All ranks must call this function, and all ranks get the same result. `machine` is this rank's
    observation of its host. `gpus` contains, for each rank, the UUID of the GPU that the rank would
    use. `all_reduce` runs a collective over all ranks and returns its error, or "" if the result
    was exact. If `all_reduce` is None, only the connections and clock offsets between hosts are
    measured.
    """
    machines = [Machine.from_json(values) for values in peers.gather(asdict(machine))]
    rows = enumerate(zip(peers.hosts, machines, gpus, strict=True))
    ranks = tuple(RankObservation(rank, *row) for rank, row in rows)
    server = ProbeServer(peers.address)
    endpoints = list(peers.gather_rows(Endpoint, [server.endpoint]))
    try:
        probes = ProbeResults()
        if len(peers.first_ranks) > 1:
            progress("connecting every host to every other host")
            connections = probe_network.connect_hosts(peers, endpoints)
            offsets = probe_network.measure_clock_offsets(peers, endpoints)
            probes = replace(probes, connections=connections, clock_offsets=offsets)
        if all_reduce is not None:
            if any(connection.error for connection in probes.connections or ()):
                reason = "some hosts cannot connect to each other"
                probes = replace(probes, skipped=dict.fromkeys(("all_reduce", "nccl"), reason))
            else:
                progress("all_reduce over all ranks")
                probes = replace(probes, all_reduce=tuple(peers.gather(all_reduce())))
                progress("NCCL on all ranks")
                probes = _start_nccl(probes, peers, device)
            progress("transfers between all ranks")
            links = probe_network.measure_links(peers, endpoints, probes.connections or ())
            progress("compute and memory of every rank")
            probes = _measure_devices(replace(probes, links=links), peers, device)
    finally:
        peers.gather(None)  # a barrier, because another rank may still connect to this server
        server.close()
    return Cluster(tuple(machines[rank] for rank in peers.first_ranks), ranks, probes)


def _start_nccl(probes: ProbeResults, peers: Peers, device: str) -> ProbeResults:
    """Start NCCL on every rank.

    This probe runs before all other GPU probes, because they keep GPU memory allocated.
    """
    import torch

    from tutti.machine.checks import probe_nccl

    reason = ""
    if device == "cpu":
        reason = "NCCL needs GPUs, not --device cpu"
    elif not torch.cuda.is_available():
        reason = "NCCL needs GPUs: torch finds no CUDA device"
    elif not torch.distributed.is_nccl_available():
        reason = "torch is built without NCCL"
    if reasons := [text for text in peers.gather(reason) if text]:
        return replace(probes, skipped={**probes.skipped, "nccl": reasons[0]})
    return replace(probes, nccl=probe_nccl.start_nccl(peers, torch.cuda.device_count()))


def _measure_devices(probes: ProbeResults, peers: Peers, device: str) -> ProbeResults:
    """Measure the CPU or the GPU of every rank. If any rank has no GPU, all ranks measure CPUs."""
    import torch

    from tutti.machine.checks import probe_devices

    has_gpu = device != "cpu" and torch.cuda.is_available()
    used = "cuda" if all(peers.gather(has_gpu)) else "cpu"
    compute = probe_devices.measure_devices(peers, used, probe_devices.matrix_product)
    bandwidth = probe_devices.measure_devices(peers, used, probe_devices.memory_copy)
    # The first rank of each host copies data between the GPUs of the host. The other ranks wait.
    copies = None
    if used == "cuda" and peers.rank in peers.first_ranks and torch.cuda.device_count() > 1:
        copies = [asdict(copy) for copy in probe_devices.copy_between_gpus()]
    gathered = peers.gather(copies)
    return replace(
        probes,
        compute=compute,
        bandwidth=bandwidth,
        copies=tuple(
            None if gathered[rank] is None else tuple(GpuCopy(**row) for row in gathered[rank])
            for rank in peers.first_ranks
        ),
    )
