"""Where every rank belongs: node, local rank, device and CPUs, computed from the roll alone.

A pure function of what all ranks said, so that every rank computes the same table, and two ranks
on one device are seen before either touches it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.machine.cpus import format_cpu_list, parse_cpu_list
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.rollcall import Answer


@dataclass(frozen=True)
class Place:
    """One rank's place in the world."""

    rank: int
    host: str
    machine: str
    node: int
    local_rank: int
    local_size: int
    # Index among the devices this rank sees; None for a rank on CPU.
    gpu: int | None
    # How many ranks compute on the same device.
    ranks_on_gpu: int


def place(answers: "Sequence[Answer]", device: str = "auto", ranks_per_gpu: int = 1) -> list[Place]:
    """The place of every rank, in rank order; `device` is auto, cpu or cuda."""
    by_machine: dict[str, list[int]] = defaultdict(list)
    for answer in answers:
        by_machine[answer.machine].append(answer.rank)
    machines = list(by_machine)  # in the order of their lowest rank
    gpus = _gpu_of_each(answers, ranks_per_gpu) if _use_gpus(answers, device) else {}
    users = _users_of_each_gpu(answers, gpus, ranks_per_gpu)

    places = []
    for answer in answers:
        neighbours = by_machine[answer.machine]
        position, count = neighbours.index(answer.rank), len(neighbours)
        gpu = gpus.get(answer.rank)
        places.append(
            Place(
                rank=answer.rank,
                host=answer.host,
                machine=answer.machine,
                node=machines.index(answer.machine) if answer.node is None else answer.node,
                local_rank=position if answer.local_rank is None else answer.local_rank,
                local_size=count if answer.local_size is None else answer.local_size,
                gpu=gpu,
                ranks_on_gpu=0 if gpu is None else len(users[_physical(answer, gpu)]),
            )
        )
    return places


def cpus_for(
    answers: "Sequence[Answer]", rank: int, numa: Mapping[int, tuple[int, ...]]
) -> str | None:
    """The CPUs a rank on CPU should keep to; None to stay as it is.

    Ranks that may use all the same CPUs are dealt out to the NUMA nodes in blocks, and inside a
    node each gets CPUs of its own while there are enough: ranks wait for each other by spinning,
    so that two on one CPU cost each other a time slice per message. Ranks whose launcher already
    gave them different CPUs keep those.
    """
    mine = answers[rank]
    peers = [a.rank for a in answers if a.machine == mine.machine and a.cpus == mine.cpus]
    allowed = set(parse_cpu_list(mine.cpus))
    nodes = [cpus for node in sorted(numa) if (cpus := allowed.intersection(numa[node]))]
    if len(peers) < max(2, len(nodes)):
        return None  # fewer ranks than nodes: each may use all
    node_of = [index * len(nodes) // len(peers) for index in range(len(peers))]
    node = node_of[peers.index(rank)]
    here, ranks = sorted(nodes[node]), node_of.count(node)
    if ranks > len(here):
        return format_cpu_list(here) if len(nodes) > 1 else None
    index = peers.index(rank) - node_of.index(node)
    return format_cpu_list(here[index * len(here) // ranks : (index + 1) * len(here) // ranks])


def _use_gpus(answers: "Sequence[Answer]", device: str) -> bool:
    without = [answer for answer in answers if not answer.gpus]
    if device == "cpu" or (device == "auto" and len(without) == len(answers)):
        return False
    if without:
        odd = without[0]
        raise UsageError(
            f"rank {odd.rank} on {odd.host} sees no GPU ({len(without)} of {len(answers)} ranks do "
            "not): give every rank one (--gpus-per-node, CUDA_VISIBLE_DEVICES), or use --device cpu"
        )
    return True


def _gpu_of_each(answers: "Sequence[Answer]", ranks_per_gpu: int) -> dict[int, int]:
    # Ranks of a machine that see the same GPUs take them in turn. Where the scheduler shows each
    # task one GPU only, every such set is of one rank, which takes its device 0: the same rule.
    alike: dict[tuple[str, tuple[str, ...]], list[Answer]] = defaultdict(list)
    for answer in answers:
        alike[answer.machine, answer.gpus].append(answer)
    chosen = {}
    for (_, gpus), group in alike.items():
        refuse_more_ranks_than_gpus(len(group), len(gpus), ranks_per_gpu, group[0].host)
        for position, answer in enumerate(group):
            chosen[answer.rank] = position // ranks_per_gpu
    return chosen


def refuse_more_ranks_than_gpus(ranks: int, gpus: int, ranks_per_gpu: int, host: str) -> None:
    """Raise when `ranks` ranks on a host do not fit its GPUs."""
    places = gpus * ranks_per_gpu
    if ranks > places:
        raise UsageError(
            f"{ranks} ranks on {host}, but {gpus} GPU{'s' * (gpus != 1)} × {ranks_per_gpu} per GPU "
            f"= {places} places: use {places} ranks, --ranks-per-gpu {-(-ranks // gpus)}, or "
            "--device cpu"
        )


def _users_of_each_gpu(
    answers: "Sequence[Answer]", gpus: dict[int, int], ranks_per_gpu: int
) -> dict[tuple[str, str], list[int]]:
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, gpu in gpus.items():
        users[_physical(answers[rank], gpu)].append(rank)
    for (_, name), ranks in users.items():
        if len(ranks) > ranks_per_gpu:
            raise UsageError(
                f"ranks {', '.join(map(str, ranks))} would compute on the same GPU {name} of "
                f"{answers[ranks[0]].host}: give each its own (CUDA_VISIBLE_DEVICES, --gpu-bind), "
                f"or ask for it with --ranks-per-gpu {len(ranks)}"
            )
    return users


def _physical(answer: "Answer", gpu: int) -> tuple[str, str]:
    # By the kernel's boot id, not the host name: two containers may show the same GPU.
    return answer.machine.split("/")[1], answer.gpus[gpu]
