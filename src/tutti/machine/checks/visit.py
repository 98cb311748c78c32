"""A visit: observe this host, or all hosts of a world, and probe what can only be tried."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tutti.machine.checks.patient import Copy, Patient, Probes, Seat
from tutti.machine.observation import Machine, observe

if TYPE_CHECKING:
    from tutti.machine.checks.company import Company
    from tutti.machine.checks.mesh import Place
    from tutti.world.rendezvous import RankInfo


def visit_machine(device: str, active: bool) -> Patient:
    """This machine alone."""
    machine = observe()
    alone = "needs a world: --ranks, or a launcher"
    reasons = dict.fromkeys(("calls", "offsets"), "needs a world on several hosts")
    reasons |= dict.fromkeys(("links", "results"), alone)
    probes = Probes(reasons=reasons)
    if active:
        probes = _probe_alone(probes, machine, _device(device))
    return Patient((machine,), (), probes)


def visit_world(device: str, active: bool, start_timeout: float) -> tuple[Patient, bool]:
    """All ranks that a launcher started; the same on every rank. Also whether this is the first."""
    # Before anything of ours changes variables, threads or CPUs.
    machine = observe()
    from tutti.machine.checks.company import gather_company
    from tutti.machine.checks.probe_network import call_hosts, compare_clocks, open_mesh

    with gather_company(start_timeout) as company:
        seen = [Machine.from_json(each) for each in company.gather(machine.to_json())]
        gpus = _gpu_of_each(company.answers, company.hosts, device)
        seats = tuple(
            Seat(rank, company.hosts[rank], each, gpus[rank]) for rank, each in enumerate(seen)
        )
        service, places = open_mesh(company)
        try:
            probes = Probes(reasons={"copies": "not asked for: --active"})
            if len(company.leaders) > 1:
                _note(company.rank, "calling every host from every other")
                calls = call_hosts(company, places)
                probes = replace(probes, calls=calls, offsets=compare_clocks(company, places))
            if active:
                probes = _probe_world(probes, company, places, device)
        finally:
            company.gather(None)  # somebody may still be calling
            service.close()
        machines = tuple(seen[leader] for leader in company.leaders)
        return Patient(machines, seats, probes), company.rank == 0


def _note(rank: int, what: str) -> None:
    if rank == 0:
        print(f"tutti doctor: {what}", file=sys.stderr, flush=True)


def _device(device: str) -> str:
    """auto, cpu or cuda as asked → cpu or cuda as it is."""
    if device == "cpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _probe_alone(probes: Probes, machine: Machine, device: str) -> Probes:
    """A company of one needs no store that others could reach."""
    import torch.distributed as dist

    from tutti.machine.checks.company import Company
    from tutti.machine.checks.probe_compute import measure
    from tutti.world.launchers import Identity
    from tutti.world.rendezvous import describe_rank

    answer = describe_rank(Identity("python", 0, 1, 0, 1), "", [])
    company = Company(0, (answer,), dist.HashStore())
    copies = _copies(device) if device == "cuda" else None
    return replace(
        probes,
        compute=measure(company, "compute", device),
        bandwidth=measure(company, "bandwidth", device),
        copies=(copies,),
    )


def _probe_world(
    probes: Probes, company: "Company", places: "Sequence[Place]", device: str
) -> Probes:
    from tutti.machine.checks.probe_collective import all_reduce_exactly
    from tutti.machine.checks.probe_compute import measure
    from tutti.machine.checks.probe_network import measure_links

    where = "cuda" if all(company.gather(_device(device) == "cuda")) else "cpu"
    reasons = dict(probes.reasons)
    if any(call.error for call in probes.calls or ()):
        results = None
        reasons["results"] = "not all hosts can call each other"
    else:
        _note(company.rank, "an all_reduce over all ranks")
        results = all_reduce_exactly(company)
    _note(company.rank, "data between every two ranks")
    links = measure_links(company, places, probes.calls or ())
    _note(company.rank, f"compute and memory of every rank ({where})")
    compute = measure(company, "compute", where)
    bandwidth = measure(company, "bandwidth", where)
    # One rank of each host tries its GPUs, while the others rest.
    mine = _copies(where) if where == "cuda" and company.leads else None
    told = company.gather(None if mine is None else [vars(copy) for copy in mine])
    copies = tuple(
        None if told[leader] is None else tuple(Copy(**each) for each in told[leader])
        for leader in company.leaders
    )
    return replace(
        probes,
        compute=compute,
        bandwidth=bandwidth,
        links=links,
        copies=copies,
        results=results,
        reasons=reasons,
    )


def _copies(device: str) -> tuple[Copy, ...] | None:
    import torch

    from tutti.machine.checks.probe_copies import copy_between_gpus

    return copy_between_gpus() if torch.cuda.device_count() > 1 else None


def _gpu_of_each(
    answers: "Sequence[RankInfo]", hosts: Sequence[int], device: str
) -> list[str | None]:
    """The GPU each rank would take: in turn among those it sees, as tutti.init does."""
    if device == "cpu" or not all(answer.gpus for answer in answers):
        return [None] * len(answers)
    return [
        answer.gpus[hosts[:rank].count(hosts[rank]) % len(answer.gpus)]
        for rank, answer in enumerate(answers)
    ]
